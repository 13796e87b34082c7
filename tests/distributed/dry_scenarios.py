"""Real sharded steps of the Trainer that dry runs are held against: units, collectives, parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_amp import FSDPAutocast, PrecisionAudit
from hf_fsdp_amp.recorder import clean_path

from .scenarios import build
from .training import tiny_llama, tiny_mpt

Result = dict[str, Any]


def units_of(model: nn.Module) -> list[list[str]]:
    """Module paths of each FSDP2 unit, or of each FSDP1 wrapper."""
    if isinstance(model, FullyShardedDataParallel):
        wrapped = [name for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
        return sorted([clean_path(name)] for name in wrapped)
    units: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), []).append(name)
    return sorted(map(sorted, units.values()))


def _step(folder: Path, version: int, model: nn.Module, preset: str) -> Result:
    stock = preset == "stock"
    callback = PrecisionAudit() if stock else FSDPAutocast(preset)
    trainer = build(folder, version, model=model, callbacks=[callback], max_grad_norm=0.0, max_steps=1)
    trainer.train()
    trace = callback.report.trace
    sent: dict[str, int] = {}
    for c in trace.collectives:
        if c.phase in ("forward", "backward") and c.kind in ("all_gather", "reduce_scatter"):
            key = f"{c.kind} {c.dtype} {c.phase}"
            sent[key] = sent.get(key, 0) + c.bytes
    parameters = {p.name: [p.storage, p.compute, p.gradient] for p in trace.parameters}
    return {"units": units_of(trainer.model), "sent": sent, "parameters": parameters}


def mpt_amp(folder: Path, version: int) -> Result:
    return _step(folder, version, tiny_mpt(), "amp")


def mpt_exact(folder: Path, version: int) -> Result:
    return _step(folder, version, tiny_mpt(), "exact")


def mpt_stock(folder: Path, version: int) -> Result:
    return _step(folder, version, tiny_mpt(), "stock")


def llama_amp(folder: Path, version: int) -> Result:
    return _step(folder, version, tiny_llama(), "amp")


def llama_exact(folder: Path, version: int) -> Result:
    return _step(folder, version, tiny_llama(), "exact")
