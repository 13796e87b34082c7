"""Scenarios of the audit on 2 ranks; `test_audit.py` asserts on what they return."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from hf_fsdp_amp import FSDPAutocast
from hf_fsdp_amp.audit import record_precision
from hf_fsdp_amp.audit_callback import PrecisionAudit
from hf_fsdp_amp.contract import Contract
from hf_fsdp_amp.cpu import disable_cpu_fsdp, enable_cpu_fsdp
from hf_fsdp_amp.findings import find_faults
from hf_fsdp_amp.report import PrecisionReport
from hf_fsdp_amp.report_table import aspects

from ..audit_models import Block, Toy, autocast
from .scenarios import build
from .training import LookingTrainer, arguments, tiny_llama, tiny_mpt, tokens

Result = dict[str, Any]
LOW, FP32 = torch.bfloat16, torch.float32


def outcome(report: PrecisionReport | None) -> Result:
    """What a test needs of a report, as plain data."""
    assert report is not None
    trace = report.trace
    return {
        "findings": [[f.code, f.severity, f.module] for f in report.findings],
        "evidence": {f.code: f.evidence for f in report.findings},
        "aspects": aspects(trace),
        "phases": sorted({op.phase for op in trace.ops}),
        "backward_modules": sorted({op.module for op in trace.ops if op.phase == "backward" and op.node}),
        "parameters": sorted({f"{p.storage} {p.compute} {p.gradient}" for p in trace.parameters if p.gradient}),
        "collectives": sorted({f"{c.kind} {c.dtype} {c.phase}" for c in trace.collectives if c.phase != "outside"}),
        "gathered": trace.gathered_bytes("forward"),
        "micro_batches": trace.micro_batches,
        "text_lines": report.to_text().count("\n"),
        "widest": max(map(len, report.to_text().splitlines())),
    }


def stock(folder: Path, version: int) -> Result:
    """FSDP as accelerate sets it up, DDP for version 0; audited, not mended."""
    audit = PrecisionAudit()
    build(folder, version, amp=False, callbacks=[audit]).train()
    return outcome(audit.report)


def accumulating(folder: Path, version: int) -> Result:
    audit = PrecisionAudit()
    build(folder, version, amp=False, callbacks=[audit], gradient_accumulation_steps=2).train()
    return outcome(audit.report)


def inactive(folder: Path, version: int) -> Result:
    """FSDP asked for on CPU without the shim: accelerate silently trains DDP."""
    disable_cpu_fsdp()
    try:
        audit = PrecisionAudit()
        args = arguments(folder, version)
        LookingTrainer(model=tiny_mpt(), args=args, train_dataset=tokens(), callbacks=[audit]).train()
    finally:
        enable_cpu_fsdp()
    return outcome(audit.report)


def plant(
    version: int,
    param: torch.dtype | None = LOW,
    reduce: torch.dtype | None = FP32,
    output: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
    cache: bool = True,
    accumulate: int = 1,
    contract: Contract | None = None,
) -> Result:
    """One step of the toy, sharded by hand with one policy, under bf16 autocast."""
    torch.manual_seed(0)
    model: nn.Module = Toy()
    if version == 2:
        policy = MixedPrecisionPolicy(param, reduce, output_dtype=output, cast_forward_inputs=False)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        mixed = MixedPrecision(param, reduce, buffers, cast_forward_inputs=False)
        wrap = ModuleWrapPolicy({Block})
        device = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=wrap, mixed_precision=mixed, device_id=device, use_orig_params=True
        )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16).reshape(2, 8)
    with record_precision(model) as trace:
        for number in range(accumulate):
            last = number == accumulate - 1
            with _unsynchronised(model, version, last), autocast(LOW):
                torch.set_autocast_cache_enabled(cache)
                loss = model(ids)["loss"]
                torch.set_autocast_cache_enabled(True)
                loss.backward()
        optimizer.step()
    contract = contract or Contract(preset="amp", fsdp_version=version, fsdp_requested=True)
    return outcome(PrecisionReport(trace, find_faults(trace, contract)))


def _unsynchronised(model: Any, version: int, last: bool) -> Any:
    if version == 2:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def clean(folder: Path, version: int) -> Result:
    return plant(version)


def clean_accumulation(folder: Path, version: int) -> Result:
    """Without a low-precision gather FSDP1 accumulates in fp32; FSDP2 always does in its reduction dtype."""
    return plant(version, param=LOW if version == 2 else None, cache=False, accumulate=2)


def output_half(folder: Path, version: int) -> Result:
    return plant(version, output=LOW)


def reduce_half(folder: Path, version: int) -> Result:
    return plant(version, reduce=LOW)


def reduce_half_by_choice(folder: Path, version: int) -> Result:
    contract = Contract(preset="amp", fsdp_version=version, reduce_dtype="bf16", fsdp_requested=True)
    return plant(version, reduce=LOW, contract=contract)


def accumulate_half(folder: Path, version: int) -> Result:
    contract = Contract(preset="exact", fsdp_version=version, fsdp_requested=True)
    return plant(version, reduce=LOW if version == 2 else FP32, accumulate=2, contract=contract)


def buffer_half(folder: Path, version: int) -> Result:
    return plant(version, buffers=LOW)


def cache_over_fp32_gather(folder: Path, version: int) -> Result:
    return plant(version, param=None)


def fp32_gather_without_cache(folder: Path, version: int) -> Result:
    return plant(version, param=None, cache=False)


def checkpointed(folder: Path, version: int) -> Result:
    return _checkpointed(folder, version, reentrant=False)


def checkpointed_reentrant(folder: Path, version: int) -> Result:
    return _checkpointed(folder, version, reentrant=True)


def _checkpointed(folder: Path, version: int, reentrant: bool) -> Result:
    fix = FSDPAutocast()
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    build(folder, version, model=tiny_llama(), callbacks=[fix], **options).train()
    return outcome(fix.report)


def amp(folder: Path, version: int) -> Result:
    fix = FSDPAutocast(strict=True)
    build(folder, version, callbacks=[fix]).train()
    return outcome(fix.report)


def exact(folder: Path, version: int) -> Result:
    fix = FSDPAutocast("exact", strict=True)
    build(folder, version, callbacks=[fix]).train()
    return outcome(fix.report)


def exact_llama_accumulating(folder: Path, version: int) -> Result:
    fix = FSDPAutocast("exact", strict=True)
    build(folder, version, model=tiny_llama(), callbacks=[fix], gradient_accumulation_steps=2).train()
    return outcome(fix.report)


def amp_accumulating(folder: Path, version: int) -> Result:
    fix = FSDPAutocast()
    build(folder, version, callbacks=[fix], gradient_accumulation_steps=2).train()
    return outcome(fix.report)


def amp_lora(folder: Path, version: int) -> Result:
    """A bf16 base that is frozen, and fp32 adapters."""
    from peft import LoraConfig, get_peft_model

    base = tiny_llama().to(torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    fix = FSDPAutocast()
    build(folder, version, model=model, callbacks=[fix]).train()
    return outcome(fix.report)


def stock_strict(folder: Path, version: int) -> Result:
    """The report is there on both ranks, and training stopped after one step."""
    fix = FSDPAutocast("stock", strict=True)
    trainer = build(folder, version, callbacks=[fix])
    try:
        trainer.train()
    except RuntimeError as error:
        return {**outcome(fix.report), "error": str(error), "steps": trainer.state.global_step}
    return {"error": None}


def second_run(folder: Path, version: int) -> Result:
    """One callback in two Trainers audits the first step of each; a second train() of one is not audited again."""
    fix = FSDPAutocast()
    seen = []
    for name in ("a", "b"):
        trainer = build(folder / name, version, callbacks=[fix])
        for _ in range(2):
            trainer.train()
            seen.append(id(fix.report))
    return {
        "reports": [seen.index(i) for i in seen],
        "files": sorted(p.parent.name for p in folder.rglob("precision.json")),
    }


def losses(folder: Path, version: int) -> Result:
    """The audit changes no number: losses with and without it."""
    audited = build(folder, version)
    audited.train()
    bare = build(folder / "bare", version, callbacks=[FSDPAutocast(audit=False)])
    bare.train()
    return {"audited": audited.report()["losses"], "bare": bare.report()["losses"]}
