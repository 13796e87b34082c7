"""Each fault, planted for real on one device: its code at its module, and none in the clean counterpart.

Faults of FSDP itself are planted on 2 ranks in `distributed/test_audit.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from hf_fsdp_amp import patch_model
from hf_fsdp_amp.audit_callback import PrecisionAudit
from hf_fsdp_amp.findings import Contract, Finding, describe_findings, find_faults
from hf_fsdp_amp.trace import Trace

from .audit_models import ForgetfulCheckpoint, LowPrecisionNorm, Toy, train_step
from .distributed.training import arguments, tiny_llama, tiny_mpt, tokens

BF16 = Contract(dtype="bf16")


def judge(trace: Trace, reference: Trace | None = None, contract: Contract = BF16) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in find_faults(trace, contract, reference):
        found.setdefault(finding.code, []).append(finding)
    return found


def places(found: dict[str, list[Finding]], code: str) -> list[tuple[str, str]]:
    return [(f.severity, f.module) for f in found.get(code, [])]


@pytest.fixture(scope="module")
def plain() -> Trace:
    """The toy under plain AMP: the reference and the clean counterpart of most faults."""
    torch.manual_seed(0)
    return train_step(Toy())


def test_plain_amp_has_no_findings(plain: Trace) -> None:
    assert describe_findings(find_faults(plain, BF16, plain)) == "no findings"
    assert {f.severity for f in find_faults(plain, BF16)} <= {"note"}


def test_autocast_left_out(plain: Trace) -> None:
    assert places(judge(train_step(Toy(), dtype=None)), "autocast-missing") == [("error", "")]
    assert "autocast-missing" not in judge(plain)


def test_autocast_left_out_by_choice_is_a_note() -> None:
    contract = Contract(dtype="bf16", preset="fsdp", fsdp_version=2)
    assert places(judge(train_step(Toy(), dtype=None), contract=contract), "autocast-missing") == [("note", "")]


def test_autocast_in_the_default_dtype(plain: Trace) -> None:
    """What accelerate 0.23 did under FSDP: `torch.autocast(device_type)` with CUDA's default, fp16."""
    default = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        trace = train_step(Toy(), dtype=torch.get_autocast_dtype("cpu"))
    finally:
        torch.set_autocast_dtype("cpu", default)
    assert places(judge(trace), "autocast-wrong-dtype") == [("error", "wte")]
    assert "autocast-wrong-dtype" not in judge(plain)


def test_loss_computed_in_half() -> None:
    class Rounding(Toy):
        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            output = super().forward(ids)
            return {**output, "loss": output["loss"].bfloat16()}

    found = judge(train_step(Rounding()))
    assert places(found, "loss-half") == [("error", "")]
    assert "bf16" in found["loss-half"][0].evidence


def test_master_weights_in_half(plain: Trace) -> None:
    model = Toy()
    model.blocks[1].attn.to(torch.bfloat16)
    found = judge(train_step(model))
    assert places(found, "master-half") == [("error", "blocks.*.attn.qkv")]
    assert places(found, "optimizer-half") == [("warning", "")]
    assert not {"master-half", "optimizer-half"} & set(judge(plain))


def test_accumulation_in_half() -> None:
    """Two micro-batches into the bf16 gradients of a bf16 head; the same with fp32 weights has none."""
    model = Toy()
    model.head.to(torch.bfloat16)
    assert places(judge(train_step(model, micro_batches=2)), "accumulate-half") == [("error", "head")]
    assert "accumulate-half" not in judge(train_step(model, micro_batches=1))
    assert "accumulate-half" not in judge(train_step(Toy(), micro_batches=2))


def test_accumulation_in_half_is_not_a_tied_weights_sum() -> None:
    """Under plain AMP with autocast's cache, the two uses of a tied weight add up in bf16: no fault."""
    model = Toy()
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    assert "accumulate-half" not in judge(train_step(model, micro_batches=2))


def test_norm_in_half(plain: Trace) -> None:
    model = tiny_llama()
    model.model.norm.to(torch.bfloat16)
    assert places(judge(_llama_step(model)), "norm-half") == [("error", "model.norm")]
    assert "norm-half" not in judge(_llama_step(tiny_llama()))
    assert "norm-half" not in judge(plain)


def test_softmax_in_half(plain: Trace) -> None:
    """The position bias in bf16 no longer promotes the scores to fp32."""
    model = Toy()
    model.blocks[0].attn.bias = model.blocks[0].attn.bias.bfloat16()
    found = judge(train_step(model), plain)
    assert places(found, "softmax-half") == [("error", "blocks.*.attn")]
    assert places(found, "buffer-half") == [("error", "blocks.*.attn")]
    assert not {"softmax-half", "buffer-half"} & set(judge(plain, plain))


def test_rotary_buffer_in_half() -> None:
    model = tiny_llama()
    model.model.rotary_emb.to(torch.bfloat16)
    found = judge(_llama_step(model))
    assert places(found, "buffer-half") == [("error", "model.rotary_emb")]
    assert "inv_freq" in found["buffer-half"][0].evidence
    assert "buffer-half" not in judge(_llama_step(tiny_llama()))


def test_router_in_half(plain: Trace) -> None:
    model = Toy()
    model.blocks[0].moe.router.to(torch.bfloat16)
    found = judge(train_step(model), plain)
    assert places(found, "router-half") == [("error", "blocks.*.moe.router")]
    assert "router-half" not in judge(plain, plain)
    assert "router-half" not in judge(plain)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scaler_missing(tmp_path: Path, dtype: str) -> None:
    """accelerate makes no gradient scaler on CPU."""
    audit = PrecisionAudit()
    _train(tmp_path, audit, bf16=dtype == "bf16", fp16=dtype == "fp16", model=tiny_llama(attn_implementation="eager"))
    assert audit.report is not None
    expected = [("error", "")] if dtype == "fp16" else []
    assert [(f.severity, f.module) for f in audit.report.findings if f.code == "scaler-missing"] == expected


def test_logits_copied_to_fp32(tmp_path: Path) -> None:
    """accelerate's wrapper copies them; `patch_model` strips it."""
    stock, mended = PrecisionAudit(), PrecisionAudit()
    _train(tmp_path, stock)

    class Mend(type(mended)):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            patch_model(kwargs["model"], "bf16", device_type="cpu")

    mended = Mend()
    _train(tmp_path, mended)
    assert stock.report is not None
    assert mended.report is not None
    assert [(f.code, f.severity, f.module) for f in stock.report.findings] == [("logits-upcast", "warning", "lm_head")]
    assert mended.report.findings == []


def test_recompute_in_another_dtype() -> None:
    forgetful = judge(train_step(Toy(wrap=lambda block, x: ForgetfulCheckpoint.apply(block, x))))
    assert ("error", "blocks.*.attn") in places(forgetful, "recompute-dtype")
    for reentrant in (True, False):
        clean = train_step(Toy(wrap=lambda block, x, r=reentrant: checkpoint(block, x, use_reentrant=r)))
        assert any(op.phase == "recompute" for op in clean.ops)
        assert "recompute-dtype" not in judge(clean)


def test_dtype_changes_across_low_precision_norm() -> None:
    found = judge(train_step(Toy(LowPrecisionNorm), dtype=torch.float16))
    expected = [("error", "blocks.*.norm_1"), ("error", "blocks.*.norm_2")]
    assert places(found, "dtype-changes-across-norm") == expected
    assert "autocast-wrong-dtype" in found
    clean = judge(train_step(Toy(LowPrecisionNorm)))
    assert not {"dtype-changes-across-norm", "norm-half", "autocast-wrong-dtype"} & set(clean)


def test_launcher_disagrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = PrecisionAudit()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    _train(tmp_path, audit)
    assert audit.report is not None
    found = [f for f in audit.report.findings if f.code == "launcher-disagrees"]
    assert [f.severity for f in found] == ["error"]
    assert "fp16" in found[0].evidence


def test_strict_stops_before_the_second_step(tmp_path: Path) -> None:
    audit = PrecisionAudit(strict=True)
    trainer = _trainer(tmp_path, audit, model=tiny_llama(), fp16=True, bf16=False)
    with pytest.raises(RuntimeError, match=r"scaler-missing"):
        trainer.train()
    assert trainer.state.global_step <= 1


def test_errors_come_first() -> None:
    model = Toy(LowPrecisionNorm)
    severities = [f.severity for f in find_faults(train_step(model, dtype=torch.float16), BF16)]
    assert severities == sorted(severities, key=("error", "warning", "note").index)
    assert severities


def _llama_step(model: torch.nn.Module) -> Trace:
    return train_step(model, call=lambda ids: model(input_ids=ids, labels=ids, use_cache=False))


def _trainer(folder: Path, audit: PrecisionAudit, model: Any = None, **changes: Any) -> Trainer:
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Trainer(
        model=tiny_mpt() if model is None else model,
        args=arguments(folder, 0, **changes),
        train_dataset=tokens(),
        callbacks=[audit],
    )


def _train(folder: Path, audit: PrecisionAudit, **changes: Any) -> None:
    _trainer(folder, audit, **changes).train()
