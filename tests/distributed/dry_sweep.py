"""Dry runs held against live steps: tiny architectures under real FSDP2, CPU's or CUDA's rules, one rank.

``python -m tests.distributed.dry_sweep OUT.json [every Nth [cpu|cuda [preset ...]]]`` writes one record per run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fsdp_amp import patch_model, record_precision, resolve_policy
from hf_fsdp_amp.dryrun import dry_run
from hf_fsdp_amp.explain import as_installed
from hf_fsdp_amp.fp32_choice import choose_fp32
from hf_fsdp_amp.param_dtypes import pin_fp32
from hf_fsdp_amp.planned_units import plan_units
from hf_fsdp_amp.policy import PrecisionPolicy
from hf_fsdp_amp.sharding import to_torch_policy
from hf_fsdp_amp.summary import is_floating, is_move
from hf_fsdp_amp.trace import Trace
from tests.architectures import Tiny, build, names

# FSDP's own bookkeeping in a live step: copies into and out of its buffers, sums of gradients, the accumulation
OWN = ("chunk_cat", "_foreach_", "fsdp.", "c10d", "mul_", "div_", "ones_like")
Step = tuple[str, str, str]


def steps_of(trace: Trace, phase: str) -> list[Step]:
    """The computing ops of a phase in running order: op, module, floating dtypes in."""
    steps = []
    for index in trace.sequence:
        op = trace.ops[index]
        if op.phase != phase or is_move(op) or any(part in op.op for part in OWN):
            continue
        floating = tuple(d for d in op.inputs if is_floating(d))
        if floating:
            steps.append((op.op, op.module, " ".join(floating)))
    return steps


def shard_as_planned(model: nn.Module, policy: PrecisionPolicy, fp32_names: set[str]) -> None:
    """Real FSDP2 in the units that the dry run plans for."""
    torch_policy = to_torch_policy(policy)
    for unit in plan_units(model, 2):
        modules: Any = unit.modules if len(unit.modules) > 1 else unit.modules[0]
        fully_shard(modules, mp_policy=torch_policy, reshard_after_forward=unit.resharded)
    pin_fp32(model, fp32_names)
    if policy.preset != "stock":
        patch_model(model, policy.dtype, device_type=policy.device_type, cache_enabled=policy.cache_enabled)


def live(tiny: Tiny, policy: PrecisionPolicy, fp32_names: set[str], inputs: dict[str, torch.Tensor]) -> Trace:
    """A real step."""
    tiny.model.to(policy.device_type)
    inputs = {name: value.to(policy.device_type) for name, value in inputs.items()}
    shard_as_planned(tiny.model, policy, fp32_names)
    with record_precision(tiny.model, sequence=True) as trace:
        output = tiny.model(**inputs)
        loss = output.get("loss")
        if loss is None:
            loss = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.is_floating_point()).float()
        (loss if loss.dim() == 0 else loss.mean()).backward()
    return trace


def compare(name: str, kind: str, preset: str, device_type: str) -> dict[str, Any]:
    """One architecture under one preset."""
    tiny = build(name, kind)
    policy = resolve_policy(preset, "bf16", device_type=device_type)
    policy = as_installed(policy) if preset == "stock" else policy
    chosen = choose_fp32(tiny.model, policy).names
    dry = dry_run(tiny.model, policy, chosen, inputs=tiny.inputs, sequence=True)
    record: dict[str, Any] = {"dry_error": None if dry.error is None else repr(dry.error)[:300]}
    record["dry_findings"] = [f.line() for f in dry.findings]
    record["guesses"] = dry.trace.guesses
    try:
        trace = live(tiny, policy, chosen, tiny.inputs)
    except Exception as error:  # told: the dry run should have foreseen it
        return {**record, "live_error": repr(error)[:300]}
    for phase in ("forward", "backward"):
        expected, found = steps_of(trace, phase), steps_of(dry.trace, phase)
        different = [f"{a} | {b}" for a, b in zip(expected, found, strict=False) if a != b]
        record[phase] = {"live": len(expected), "dry": len(found), "differ": len(different), "first": different[:2]}
        if phase == "backward":
            record[phase]["as_sets"] = sorted(map(str, set(expected) ^ set(found)))[:4]
    record["loss"] = [trace.loss.dtype if trace.loss else None, dry.trace.loss.dtype if dry.trace.loss else None]
    record["parameters"] = [
        f"{p.name}: {(p.storage, p.compute, p.gradient)} | {(q.storage, q.compute, q.gradient)}"
        for p, q in zip(trace.parameters, dry.trace.parameters, strict=True)
        if (p.storage, p.compute, p.gradient) != (q.storage, q.compute, q.gradient)
    ][:3]
    return record


def main(out: str, every: str = "1", device_type: str = "cpu", *presets: str) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    records = []
    try:
        chosen = names()
        for name, kind in (chosen[int(i * float(every))] for i in range(int(len(chosen) / float(every)))):
            try:
                build(name, kind)
            except Exception:  # not buildable by the rule; `python -m tests.architectures` tells why
                continue
            for preset in presets or ("amp", "exact", "stock"):
                records.append({"name": name, "preset": preset, **compare(name, kind, preset, device_type)})
    finally:
        dist.destroy_process_group()
    with open(out, "w") as stream:
        json.dump(records, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
