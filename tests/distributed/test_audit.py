"""The audit on 2 ranks: stock FSDP1, FSDP2 and DDP, faults of FSDP planted for real, clean counterparts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stock import ROUNDS_OUTPUT

from .launch import Outcome, run_scenarios

BOTH = (
    "stock clean clean_accumulation reduce_half accumulate_half cache_over_fp32_gather fp32_gather_without_cache "
    "checkpointed checkpointed_reentrant amp losses stock_strict second_run "
    "amp_accumulating amp_lora exact exact_llama_accumulating"
)
SCENARIOS = [f"{name}@{version}" for name in BOTH.split() for version in (1, 2)]
SCENARIOS += ["stock@0", "output_half@2", "reduce_half_by_choice@2", "buffer_half@1", "accumulating@0", "inactive@2"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    prefix = "tests.distributed.audit_scenarios:"
    results = run_scenarios(tmp_path_factory.mktemp("audit"), [prefix + name for name in SCENARIOS])
    return {name.removeprefix(prefix): value for name, value in results.items()}


@pytest.fixture
def result(outcomes: dict[str, list[Outcome]]) -> Any:
    def get(name: str, version: int, rank: int = 0) -> dict[str, Any]:
        outcome = outcomes[f"{name}@{version}"][rank]
        assert outcome.error is None, outcome.trace or outcome.error
        return outcome.result

    return get


def codes(result: dict[str, Any], severity: str | None = None) -> set[str]:
    return {code for code, found, _ in result["findings"] if severity in (None, found)}


NORMS = [f"transformer.blocks.*.norm_{i}" for i in (1, 2)] + ["transformer.norm_f"]


def test_stock_ddp_is_plain_amp(result: Any) -> None:
    stock = result("stock", 0)
    assert stock["findings"] == [["logits-upcast", "warning", "lm_head"]]
    assert stock["collectives"].count("all_reduce fp32 backward") == 1
    assert stock["parameters"] == ["fp32 fp32 fp32"]


def test_stock_fsdp1(result: Any) -> None:
    """The README's list."""
    stock = result("stock", 1)
    expected = [["reduce-half", "error", "transformer.blocks.*"], ["logits-upcast", "warning", "lm_head"]]
    expected += [["norm-half", "warning", module] for module in NORMS]
    assert stock["findings"] == [*expected, ["embedding-half", "warning", "transformer.wte"]]
    assert stock["aspects"]["autocast"] == "bf16"
    assert stock["aspects"]["loss"].startswith("fp32")


def test_stock_fsdp2(result: Any) -> None:
    stock = result("stock", 2)
    expected = [["autocast-missing", "error", ""]]
    expected += [["loss-half", "error", ""]] if ROUNDS_OUTPUT else []
    expected += [["reduce-half", "error", "transformer.blocks.*"]]
    expected += [["norm-half", "error", module] for module in NORMS]
    assert stock["findings"] == [*expected, ["embedding-half", "error", "transformer.wte"]]
    assert stock["aspects"]["autocast"] == "off"
    assert stock["aspects"]["loss"].startswith("bf16" if ROUNDS_OUTPUT else "fp32")
    assert stock["evidence"]["autocast-missing"].startswith("bf16 was asked for")


@pytest.mark.parametrize("version", [1, 2])
def test_amp_has_notes_only(result: Any, version: int) -> None:
    """On CPU, FSDP2 keeps norm weights in fp32 under `amp`: its layer_norm takes no mixed dtypes."""
    amp = result("amp", version)
    assert codes(amp) == ({"norm-half", "embedding-half"} if version == 1 else {"embedding-half"})
    assert codes(amp, "note") == codes(amp)


@pytest.mark.parametrize("name", ["exact", "exact_llama_accumulating"])
@pytest.mark.parametrize("version", [1, 2])
def test_exact_has_no_findings(result: Any, name: str, version: int) -> None:
    exact = result(name, version)
    assert exact["findings"] == []
    assert exact["aspects"]["embedding out"] == exact["aspects"]["norm out"] == "fp32"
    assert exact["aspects"]["matmul"] == "bf16"
    assert ("fp32 bf16 fp32" in exact["parameters"]) == (version == 2), "matmul weights are gathered in bf16"


@pytest.mark.parametrize("version", [1, 2])
def test_collectives_and_parameters(result: Any, version: int) -> None:
    clean = result("clean", version)
    gather = ["all_gather bf16 backward", "all_gather bf16 forward"]
    assert clean["collectives"] == [*gather, "reduce_scatter fp32 backward"]
    assert clean["parameters"] == ["fp32 bf16 fp32"]
    assert codes(clean, "error") == set()
    # bf16 is half of fp32, up to the padding of each unit to the number of ranks
    fp32 = result("fp32_gather_without_cache", version)
    assert abs(2 * clean["gathered"] - fp32["gathered"]) <= 64


@pytest.mark.parametrize("version", [1, 2])
def test_backward_ops_have_modules(result: Any, version: int) -> None:
    modules = set(result("clean", version)["backward_modules"])
    assert {"head", "wte", "blocks.0.attn.qkv", "blocks.1.norm_1", "blocks.1.moe.experts.0"} <= modules


@pytest.mark.parametrize("version", [1, 2])
def test_reduce_half(result: Any, version: int) -> None:
    found = result("reduce_half", version)["findings"]
    assert [f for f in found if f[1] == "error"] == [["reduce-half", "error", "blocks.*"]]
    assert "reduce-half" not in codes(result("clean", version))


def test_reduce_half_by_choice_is_a_note(result: Any) -> None:
    assert ["reduce-half", "note", "blocks.*"] in result("reduce_half_by_choice", 2)["findings"]


def test_output_half(result: Any) -> None:
    found = result("output_half", 2)
    assert [f for f in found["findings"] if f[1] == "error"] == [["loss-half", "error", ""]]
    assert "output_dtype" in found["evidence"]["loss-half"]
    assert "loss-half" not in codes(result("clean", 2))


@pytest.mark.parametrize("version", [1, 2])
def test_accumulate_half(result: Any, version: int) -> None:
    planted, clean = result("accumulate_half", version), result("clean_accumulation", version)
    unit = "blocks.*" if version == 1 else ""
    assert ["accumulate-half", "error", unit] in planted["findings"]
    assert clean["micro_batches"] == 2
    assert "accumulate-half" not in codes(clean)


@pytest.mark.parametrize("version", [1, 2])
def test_accumulation_under_amp(result: Any, version: int) -> None:
    """FSDP1 keeps unsynchronised gradients in the gather dtype, which `amp` cannot change: a warning."""
    found = result("amp_accumulating", version)["findings"]
    serious = [finding for finding in found if finding[1] != "note"]
    assert serious == ([["accumulate-half", "warning", "transformer.blocks.*"]] if version == 1 else [])


@pytest.mark.parametrize("version", [1, 2])
def test_lora_on_a_bf16_base_has_no_errors(result: Any, version: int) -> None:
    lora = result("amp_lora", version)
    assert codes(lora, "error") == set()
    assert "fp32 bf16 fp32" in lora["parameters"]


def test_accumulation_under_ddp_has_no_error(result: Any) -> None:
    accumulated = result("accumulating", 0)
    assert accumulated["micro_batches"] == 2
    assert codes(accumulated, "error") == set()


def test_buffer_half(result: Any) -> None:
    assert ["buffer-half", "error", "blocks.*.attn"] in result("buffer_half", 1)["findings"]
    assert "buffer-half" not in codes(result("clean", 1))


@pytest.mark.parametrize("version", [1, 2])
def test_cache_over_fp32_gather(result: Any, version: int) -> None:
    planted = result("cache_over_fp32_gather", version)["findings"]
    assert planted == [["autocast-cache-holds-weights", "warning", "blocks.*.attn.qkv"]]
    assert result("fp32_gather_without_cache", version)["findings"] == []


def test_fsdp_inactive(result: Any) -> None:
    """accelerate silently trains DDP on CPU; for FSDP1 its plugin raises by itself there."""
    assert ["fsdp-inactive", "error", ""] in result("inactive", 2)["findings"]
    assert "fsdp-inactive" not in codes(result("stock", 2))


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant"])
@pytest.mark.parametrize("version", [1, 2])
def test_checkpointing(result: Any, name: str, version: int) -> None:
    found = result(name, version)
    assert "recompute" in found["phases"]
    assert codes(found, "error") == set()
    assert "recompute" not in result("clean", version)["phases"]


@pytest.mark.parametrize("version", [1, 2])
def test_strict_stops_after_one_step(result: Any, version: int) -> None:
    stopped = result("stock_strict", version)
    assert stopped["findings"] == result("stock", version)["findings"]
    assert "reduce-half at transformer.blocks.*" in stopped["error"]
    assert stopped["steps"] == 1


@pytest.mark.parametrize("version", [1, 2])
def test_each_trainer_is_audited_once(result: Any, version: int) -> None:
    assert result("second_run", version) == {"reports": [0, 0, 2, 2], "files": ["a", "b"]}


@pytest.mark.parametrize("version", [1, 2])
def test_the_audit_changes_no_loss(result: Any, version: int) -> None:
    losses = result("losses", version)
    assert losses["audited"] == losses["bare"]


def test_ranks_agree(outcomes: dict[str, list[Outcome]]) -> None:
    for name, (first, second) in outcomes.items():
        if first.error is None and first.result and "findings" in first.result:
            assert first.result["findings"] == second.result["findings"], name


def test_text_fits_a_terminal(outcomes: dict[str, list[Outcome]]) -> None:
    for name, (first, _) in outcomes.items():
        if first.error is None and first.result and "widest" in first.result:
            assert first.result["widest"] <= 80, name
            assert first.result["text_lines"] < 40, name
