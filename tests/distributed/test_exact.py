"""Preset `exact`: bit-identical to DDP + autocast under FSDP2, and what `keep_fp32` does, 2 gloo ranks on CPU."""

from __future__ import annotations

from typing import Any

import pytest

from .launch import Outcome, run_scenarios

AGAINST_DDP = ["mpt", "llama", "llama_tied", "accumulation", "clipped", "lora", "mixtral", "by_hand"]
FSDP2 = [
    *AGAINST_DDP,
    *("no_reshard", "offload", "checkpointing", "compiled", "ram_efficient", "saved", "resumed", "fp16", "hybrid"),
    *("keep_fp32", "keep_fp32_low_reduction", "keep_fp32_typo", "measured_bytes"),
]
FSDP1 = ["mpt", "llama", "keep_fp32"]

Ran = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    wanted = [f"{name}@0" for name in [*AGAINST_DDP, "fp16"]] + [f"{n}@1" for n in FSDP1] + [f"{n}@2" for n in FSDP2]
    names = {f"tests.distributed.exact_scenarios:{name}": name for name in wanted}
    return {names[k]: v for k, v in run_scenarios(tmp_path_factory.mktemp("exact"), list(names)).items()}


def result(ran: Ran, name: str) -> Any:
    for rank, outcome in enumerate(ran[name]):
        assert outcome.error is None, f"{name}, rank {rank}: {outcome.error}\n{outcome.trace}"
    return ran[name][0].result


@pytest.mark.parametrize("name", ["mpt", "llama", "llama_tied", "accumulation", "fp16", "lora", "mixtral"])
def test_bit_identical_to_ddp(ran: Ran, name: str) -> None:
    ddp, exact = result(ran, f"{name}@0"), result(ran, f"{name}@2")
    assert exact["losses"] == ddp["losses"]
    assert exact["digest"] == ddp["digest"]
    assert len(exact["losses"]) == 20
    assert exact["reduced"] == ["torch.float32"]
    if name != "lora":  # whose fp32 adapters are all cast and whose base is stored in bf16
        assert "torch.uint8" in exact["gathered"]  # both dtypes in one all-gather


def test_clipping_is_close(ran: Ran) -> None:
    """The norm of sharded gradients is summed in another order."""
    ddp, exact = result(ran, "clipped@0"), result(ran, "clipped@2")
    assert max(abs(a - b) for a, b in zip(exact["losses"], ddp["losses"], strict=True)) < 1e-3


def test_without_a_trainer(ran: Ran) -> None:
    assert result(ran, "by_hand@2") == result(ran, "by_hand@0")


def test_hybrid_sharding(ran: Ran) -> None:
    assert result(ran, "hybrid@2") == result(ran, "by_hand@0")


@pytest.mark.parametrize("name", ["no_reshard", "offload", "checkpointing", "compiled"])
def test_other_ways_to_shard_and_run_change_no_bit(ran: Ran, name: str) -> None:
    assert result(ran, f"{name}@2")["digest"] == result(ran, "mpt@0")["digest"]


def test_cpu_ram_efficient_loading(ran: Ran) -> None:
    assert result(ran, "ram_efficient@2")["digest"] == result(ran, "llama@0")["digest"]


def test_lora_keeps_the_base_in_bf16(ran: Ran) -> None:
    assert result(ran, "lora@2")["dtypes"] == ["False torch.bfloat16", "True torch.float32"]


def test_experts_in_fp32_are_told_with_their_cost(ran: Ran) -> None:
    line = next(line for line in result(ran, "mixtral@2")["lines"] if "experts" in line)
    assert "plain AMP computes them in fp32" in line
    assert "experts_implementation='eager'" in line


def test_it_says_how_it_decided_and_what_it_costs(ran: Ran) -> None:
    lines = result(ran, "mpt@2")["lines"]
    assert any("8 parameters gathered in bf16, 7 in fp32, as seen in a forward on fake cpu tensors" in x for x in lines)
    assert any("MiB a pass" in x and "in the same number of collectives" in x for x in lines)


def test_bytes_on_the_wire_are_the_formulas(ran: Ran) -> None:
    """Counted from the collectives of a real step; `exact` adds no collective to `amp`'s."""
    counted = result(ran, "measured_bytes@2")
    for measured, formula, _ in counted.values():
        assert measured == formula
    for model in ("mpt", "llama", "llama odd"):
        assert counted[f"{model} exact"][2] == counted[f"{model} amp"][2]
        assert counted[f"{model} exact"][0] > counted[f"{model} amp"][0]


def test_save_and_resume(ran: Ran) -> None:
    saved, resumed = result(ran, "saved@2"), result(ran, "resumed@2")
    assert saved["before"] == saved["after"]
    assert resumed["whole"] == resumed["resumed"]


@pytest.mark.parametrize("name", ["mpt", "llama"])
def test_fsdp1_has_the_same_numbers_at_the_fp32_gather(ran: Ran, name: str) -> None:
    ddp, exact = result(ran, f"{name}@0"), result(ran, f"{name}@1")
    assert max(abs(a - b) for a, b in zip(exact["losses"], ddp["losses"], strict=True)) < 1e-5
    assert "torch.bfloat16" not in exact["gathered"]
    assert any("gathers every parameter in fp32" in line and "MiB a pass" in line for line in exact["lines"])


def test_keep_fp32_pins_by_name(ran: Ran) -> None:
    kept = result(ran, "keep_fp32@2")
    assert {name for name, dtype in kept["dtypes"].items() if dtype == "float32"} == {
        f"transformer.blocks.{i}.ffn.up_proj" for i in (0, 1)
    }
    assert kept["reduced"] == ["torch.float32"]
    assert result(ran, "keep_fp32_low_reduction@2")["reduced"] == ["torch.bfloat16"]


def test_keep_fp32_that_matches_nothing(ran: Ran) -> None:
    for outcome in ran["keep_fp32_typo@2"]:
        assert outcome.error is not None
        assert outcome.error.startswith("ValueError: keep_fp32='nrom_1' matches no parameter. Near ones: ")
        assert "norm_1.weight" in outcome.error


def test_keep_fp32_needs_fsdp2(ran: Ran) -> None:
    for outcome in ran["keep_fp32@1"]:
        assert outcome.error == "ValueError: keep_fp32 needs FSDP2: FSDP1's flat parameters have one dtype per unit."
