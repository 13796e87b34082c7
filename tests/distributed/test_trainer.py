"""`FSDPAutocast` in the real Trainer under FSDP1 and FSDP2, 2 gloo ranks on CPU.

One launch per FSDP version runs every scenario of `scenarios.py`; each test asserts on one of them. Where stock
FSDP is wrong, `stock` shows it, so that the assertions on ours would fail without the callback.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stock import EVALUATES_FIRST, ROUNDS_OUTPUT

from .launch import Outcome, run_scenarios

BF16, FP16, FP32 = "torch.bfloat16", "torch.float16", "torch.float32"
MIXED = "torch.uint8"  # FSDP2 sends bf16 weights and, on CPU, fp32 norms in one all-gather
AMP_UNITS = {1: [f"{BF16} {FP32} None None"], 2: [f"{BF16} {FP32} None None"]}
BOTH = [
    *("train", "stock", "fsdp_preset", "predict", "accumulation", "label_smoothing", "outer_loss"),
    *("checkpointing_reentrant", "checkpointing", "checkpointing_fsdp", "compiled", "compiled_stock"),
    *("save", "resume_full", "best_model", "train_twice", "two_trainers", "own_policy", "late_callback"),
    *("late_callback_after_training", "environment", "plugin_object", "fp16", "lora", "master_weights"),
    *("contradiction", "without_trainer"),
]
ONLY = {
    1: ["evaluate_first", "evaluate_then_train_repaired"],
    2: ["ddp", "resume_sharded", "sharded_at_load", "generate", "cpu_without_shim", "evaluate_first"]
    + ["evaluate_then_train", "evaluate_then_train_exact"] * EVALUATES_FIRST,
}

Ran = tuple[int, dict[str, list[Outcome]]]


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp1", "fsdp2"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    version = request.param
    names = {f"tests.distributed.scenarios:{name}@{version}": name for name in BOTH + ONLY[version]}
    outcomes = run_scenarios(tmp_path_factory.mktemp(f"fsdp{version}"), list(names))
    return version, {names[name]: outcome for name, outcome in outcomes.items()}


def result(ran: Ran, name: str) -> Any:
    """The scenario's result on rank 0, after checking that every rank finished it."""
    for rank, outcome in enumerate(ran[1][name]):
        assert outcome.error is None, f"{name}, rank {rank}: {outcome.error}\n{outcome.trace}"
    return ran[1][name][0].result


def errors(ran: Ran, name: str) -> list[str]:
    """The scenario's error on each rank."""
    return [outcome.error or "no error" for outcome in ran[1][name]]


def only(version: int, ran: Ran) -> None:
    if ran[0] != version:
        pytest.skip(f"a scenario of FSDP{version}")


def test_stock_is_wrong(ran: Ran) -> None:
    """What the callback is for; when a release of accelerate or transformers mends it, this says so."""
    stock = result(ran, "stock")
    assert BF16 in stock["gathered"]
    assert stock["reduced"] == [BF16]
    if ran[0] == 2:
        output = BF16 if ROUNDS_OUTPUT else None
        assert stock["autocast"] == ["off"]
        assert stock["loss"] == [BF16 if ROUNDS_OUTPUT else "torch.float32"]
        assert stock["units"] == [f"{BF16} {BF16} {output} None"]
    else:
        assert stock["units"] == [f"{BF16} {BF16} None {BF16}"]


def test_trains_and_evaluates_under_autocast(ran: Ran) -> None:
    train = result(ran, "train")
    assert train["patched"]
    assert train["autocast"] == [BF16]
    assert train["eval_autocast"] == [BF16]
    assert train["loss"] == [FP32]
    assert train["units"] == AMP_UNITS[ran[0]]
    assert {BF16, MIXED} & set(train["gathered"])
    assert train["reduced"] == [FP32]


def test_loss_is_close_to_ddp(ran: Ran) -> None:
    only(2, ran)
    ddp, ours, stock = (result(ran, name)["losses"] for name in ("ddp", "train", "stock"))
    assert not result(ran, "ddp")["patched"]
    assert result(ran, "ddp")["autocast"] == [BF16]
    error = [max(abs(a - b) for a, b in zip(run, ddp, strict=True)) for run in (ours, stock)]
    assert error[0] < 1e-3
    if ROUNDS_OUTPUT:
        assert error[1] > 1e-3


def test_fsdp_preset_has_no_autocast(ran: Ran) -> None:
    fsdp = result(ran, "fsdp_preset")
    assert fsdp["autocast"] == ["off"]
    assert fsdp["loss"] == [FP32]


def test_predict_and_metrics_get_fp32(ran: Ran) -> None:
    predict = result(ran, "predict")
    assert set(predict["dtypes"]) == {"float32"}
    assert predict["eval_autocast"] == [BF16]
    assert predict["rows"] == 8
    assert predict["metrics"]["test_rows"] == 8


def test_gradient_accumulation(ran: Ran) -> None:
    accumulation = result(ran, "accumulation")
    assert accumulation["autocast"] == [BF16]
    assert accumulation["gradients"] == [FP32]


@pytest.mark.parametrize("name", ["label_smoothing", "outer_loss"])
def test_logits_are_fp32_for_a_loss_outside_the_model(ran: Ran, name: str) -> None:
    outside = result(ran, name)
    assert outside["logits"] == [FP32]
    assert outside["loss"] == [FP32]
    assert outside["autocast"] == [BF16]


@pytest.mark.parametrize("name", ["checkpointing_reentrant", "checkpointing", "checkpointing_fsdp"])
def test_recompute_runs_in_the_same_autocast(ran: Ran, name: str) -> None:
    checkpointing = result(ran, name)
    assert checkpointing["calls"] == 2 * 3  # forward and recompute of 3 steps
    assert checkpointing["all_autocast"]
    assert checkpointing["autocast"] == [BF16]


def test_recompute_changes_no_loss(ran: Ran) -> None:
    runs = [result(ran, n)["losses"] for n in ("checkpointing_reentrant", "checkpointing", "checkpointing_fsdp")]
    assert runs[0] == runs[1] == runs[2]


def test_compile_has_no_more_breaks_and_no_recompiles(ran: Ran) -> None:
    ours, stock = result(ran, "compiled"), result(ran, "compiled_stock")
    assert 0 < ours["breaks"] <= stock["breaks"], (ours["why"], stock["why"])
    assert 0 < ours["compiles"][1] == ours["compiles"][-1]  # the audited first step runs eagerly
    assert ours["autocast"] == [BF16]
    assert ours["loss"] == [FP32]


def test_saved_model_has_the_trained_weights(ran: Ran) -> None:
    save = result(ran, "save")
    assert save["before"] == save["after"]
    assert save["dtype"] == FP32


def test_resume_full_state_dict_is_bit_identical(ran: Ran) -> None:
    resume = result(ran, "resume_full")
    assert resume["whole"] == resume["resumed"]
    assert resume["autocast"] == [BF16]


def test_resume_sharded_state_dict_is_bit_identical(ran: Ran) -> None:
    """FSDP2 only: FSDP1's sharded resume silently restores no optimizer state (transformers 5.24)."""
    only(2, ran)
    resume = result(ran, "resume_sharded")
    assert resume["whole"] == resume["resumed"]
    assert resume["autocast"] == [BF16]


def test_best_model_is_loaded_and_evaluates_the_same(ran: Ran) -> None:
    best = result(ran, "best_model")
    assert best["now"] == best["best"]
    assert best["eval_autocast"] == [BF16]


def test_second_train_call(ran: Ran) -> None:
    twice = result(ran, "train_twice")
    assert twice["autocast"] == [BF16]
    assert twice["loss"] == [FP32]
    assert twice["losses"] != twice["first"]
    assert twice["units"] == AMP_UNITS[ran[0]]


def test_two_trainers_in_one_process(ran: Ran) -> None:
    two = result(ran, "two_trainers")
    assert two["first"]["loss"] == [FP32]
    assert two["first"]["autocast"] == [BF16]
    assert two["units"] == AMP_UNITS[ran[0]]
    assert two["first"]["losses"] == result(ran, "train")["losses"]
    assert two["second"]["losses"] == result(ran, "stock")["losses"]


def test_evaluate_before_train(ran: Ran) -> None:
    if ran[0] == 2 and not EVALUATES_FIRST:  # stock raises; its own message stays the one that is shown
        assert all("must be passed together" in error for error in errors(ran, "evaluate_first"))
        return
    assert result(ran, "evaluate_first")["eval_autocast"] == [BF16]
    if ran[0] == 2:
        assert result(ran, "evaluate_then_train")["losses"] == result(ran, "train")["losses"]
        assert result(ran, "evaluate_then_train_exact")["losses"] == result(ran, "ddp")["losses"]
        return
    repaired = result(ran, "evaluate_then_train_repaired")
    assert repaired["losses"] == result(ran, "train")["losses"]


def test_users_own_policy_stands(ran: Ran) -> None:
    own = result(ran, "own_policy")
    assert own["units"] == [f"{BF16} {BF16} {FP32 if ran[0] == 2 else None} None"]
    assert own["autocast"] == [BF16]
    assert sum("your own FSDP mixed-precision policy stands" in line for line in own["lines"]) == 1
    assert ran[1]["own_policy"][1].result["lines"] == []  # rank 0 speaks


def test_callback_added_late_mends_the_units(ran: Ran) -> None:
    late = result(ran, "late_callback")
    assert late["units"] == AMP_UNITS[ran[0]]
    assert {BF16, MIXED} & set(late["gathered"])
    assert late["reduced"] == [FP32]
    assert late["losses"] == result(ran, "train")["losses"]
    assert any("had another policy" in line for line in late["lines"])


def test_callback_added_after_training(ran: Ran) -> None:
    """FSDP2's gather dtype is stock's, so that it can be mended; FSDP1 has rounded its buffers for good."""
    if ran[0] == 1:
        assert all(
            "already ran" in error and "constructor" in error for error in errors(ran, "late_callback_after_training")
        )
        return
    late = result(ran, "late_callback_after_training")
    assert late["units"] == AMP_UNITS[2]
    assert late["autocast"] == [BF16]
    assert late["loss"] == [FP32]


@pytest.mark.parametrize("name", ["environment", "plugin_object"])
def test_however_fsdp_was_chosen(ran: Ran, name: str) -> None:
    chosen = result(ran, name)
    assert chosen["units"] == AMP_UNITS[ran[0]]
    assert chosen["losses"] == result(ran, "train")["losses"]
    assert chosen["autocast"] == [BF16]


def test_model_sharded_at_load(ran: Ran) -> None:
    only(2, ran)
    loaded = result(ran, "sharded_at_load")
    assert loaded["units"] == AMP_UNITS[2]
    assert loaded["autocast"] == [BF16]
    assert loaded["loss"] == [FP32]


def test_fp16_trains_and_reports_the_missing_scaler(ran: Ran) -> None:
    fp16 = result(ran, "fp16")
    assert fp16["autocast"] == [FP16]
    assert fp16["loss"] == [FP32]
    assert all(0 < loss < 10 for loss in fp16["losses"])
    assert sum("without a gradient scaler" in line for line in fp16["lines"]) == 1


def test_lora_on_a_bf16_base(ran: Ran) -> None:
    lora = result(ran, "lora")
    assert lora["patched"]
    assert lora["stored"] == {"True": FP32, "False": BF16}
    assert lora["autocast"] == [BF16]
    assert lora["loss"] == [FP32]


def test_master_weights_of_a_bf16_model_are_fp32(ran: Ran) -> None:
    assert result(ran, "master_weights")["master"] == [FP32]


def test_generate(ran: Ran) -> None:
    """FSDP2 only: FSDP1's `generate` fails in stock ("'weight' must be 2-D", transformers 5.24)."""
    only(2, ran)
    generate = result(ran, "generate")
    assert generate["length"] == 7
    assert generate["eval_autocast"] == [BF16]


def test_cpu_without_enable_cpu_fsdp_says_it_trains_ddp(ran: Ran) -> None:
    """FSDP2 only: FSDP1's plugin already refuses to be built without an accelerator."""
    only(2, ran)
    without = result(ran, "cpu_without_shim")
    assert without["wrapper"] == "DistributedDataParallel"
    assert len(without["lines"]) == 1
    assert "DDP instead" in without["lines"][0]
    assert "enable_cpu_fsdp()" in without["lines"][0]


def test_contradicting_precision_is_refused(ran: Ran) -> None:
    for error in errors(ran, "contradiction"):
        assert error.startswith("ValueError: mixed precision is contradictory: TrainingArguments says bf16")
        assert "says fp16" in error
        assert "\n" not in error


def test_patch_model_without_a_trainer(ran: Ran) -> None:
    plain = result(ran, "without_trainer")
    assert plain["states"] == [BF16, "off"]
    assert plain["loss"] == FP32
    assert plain["logits"] == BF16
