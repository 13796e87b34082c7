"""`FSDPAutocast` at the edges of the Trainer's uses: what went wrong once, 2 gloo ranks on CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .launch import Outcome, run_scenarios

BF16, FP32 = "torch.bfloat16", "torch.float32"
BOTH = ["batch_norm", "offload", "refused"]
ONLY: dict[int, list[str]] = {
    1: [],
    2: [
        "sharded_at_load_evaluates_first",
        "earlier_callback_runs_the_model",
        "late_callback_after_the_model_ran",
        "later_callback_runs_the_model",
    ],
}

Ran = tuple[int, dict[str, list[Outcome]]]


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp1", "fsdp2"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    version = request.param
    names = {f"tests.distributed.edge_scenarios:{name}@{version}": name for name in BOTH + ONLY[version]}
    outcomes = run_scenarios(tmp_path_factory.mktemp(f"edges{version}"), list(names))
    return version, {names[name]: outcome for name, outcome in outcomes.items()}


def result(ran: Ran, name: str) -> Any:
    """The scenario's result on rank 0, after checking that every rank finished it."""
    if name not in ran[1]:
        pytest.skip(f"no scenario of FSDP{ran[0]}")
    for rank, outcome in enumerate(ran[1][name]):
        assert outcome.error is None, f"{name}, rank {rank}: {outcome.error}\n{outcome.trace}"
    return ran[1][name][0].result


def errors(ran: Ran, name: str) -> list[str]:
    """The scenario's error on each rank."""
    if name not in ran[1]:
        pytest.skip(f"no scenario of FSDP{ran[0]}")
    return [outcome.error or "no error" for outcome in ran[1][name]]


def test_batch_norms_that_fsdp1_keeps_in_fp32_stay_there(ran: Ran) -> None:
    found = result(ran, "batch_norm")
    assert found["autocast"] == [BF16]
    assert found["loss"] == [FP32]
    assert not any("had another policy" in line for line in found["lines"])
    if ran[0] == 1:
        assert "None None None None" in found["units"]


def test_model_sharded_at_load_is_evaluated_before_it_is_trained(ran: Ran) -> None:
    found = result(ran, "sharded_at_load_evaluates_first")
    assert found["exact"] == found["ddp"]
    assert found["amp"] == pytest.approx(found["ddp"], abs=1e-3)


def test_another_callback_may_run_the_model_first(ran: Ran) -> None:
    earlier, later = result(ran, "earlier_callback_runs_the_model"), result(ran, "later_callback_runs_the_model")
    assert earlier["losses"] == later["losses"]
    assert earlier["loss"] == [FP32]


def test_a_late_callback_after_the_model_ran_is_told(ran: Ran) -> None:
    for error in errors(ran, "late_callback_after_the_model_ran"):
        assert "to the Trainer's constructor" in error
        assert "\n" not in error


def test_offload_can_be_rehearsed_on_cpu(ran: Ran) -> None:
    assert result(ran, "offload")["autocast"] == [BF16]


def test_a_launch_that_hangs_leaves_no_rank_behind(tmp_path: Path) -> None:
    name = "tests.distributed.edge_scenarios:hangs@0"
    outcomes = run_scenarios(tmp_path, [name], timeout=25)[name]
    assert [outcome.error for outcome in outcomes] == ["did not finish"] * 2
    pids = [int(path.read_text()) for path in tmp_path.glob("*/pid*")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_refused_setting_leaves_nothing_half_done(ran: Ran) -> None:
    found = result(ran, "refused")
    assert "keep_fp32" in found["message"]
    assert found["policies"][0] == found["policies"][1]
    assert not found["patched"]
