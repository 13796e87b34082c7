"""Rules about the run as a whole: autocast, loss, gradients, master weights, scaler, FSDP, launcher."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .contract import Contract, Finding, Severity
from .summary import MATMULS, op_name
from .trace import HALF, ParameterRecord, Trace, kind_of

USE_CALLBACK = "Trainer(..., callbacks=[FSDPAutocast()])."


def autocast_missing(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """The forward runs outside autocast. A model's own regions without autocast don't count: the rest is inside."""
    if contract.dtype not in HALF or _ran_under_autocast(trace) or not trace.autocast:
        return
    calls = sum(a.count for a in trace.autocast if a.phase == "forward")
    evidence = f"{contract.dtype} was asked for and autocast is off in all {calls} module calls of the forward."
    if contract.wants_autocast:
        yield Finding("autocast-missing", "error", "", evidence, USE_CALLBACK)
    else:
        fix = "preset 'amp', unless FSDP's own casts are what you want."
        yield Finding("autocast-missing", "note", "", evidence, fix)


def autocast_wrong_dtype(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Autocast is on, in another dtype than asked for (accelerate 0.23 under FSDP: the device's default, fp16)."""
    if contract.dtype not in HALF:
        return
    for state in trace.autocast:
        if state.enabled and state.dtype != contract.dtype and state.phase == "forward":
            evidence = f"autocast is {state.dtype} in {state.count} module calls, {contract.dtype} was asked for."
            yield Finding("autocast-wrong-dtype", "error", kind_of(state.module), evidence, USE_CALLBACK)


def loss_half(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """The loss is rounded to half precision: by FSDP2's output cast, or by a model that computes it so."""
    loss = trace.loss
    if loss is None or contract.dtype not in HALF:
        return
    dtype = next((d for d in (loss.backward_dtype, loss.dtype) if d in HALF), None)
    if dtype is None:
        return
    value = "" if loss.value is None else f", value {loss.value:.6g}"
    root = next((m for m in trace.modules if m.path == ""), None)
    cast = root is not None and "fp32" in root.outputs_made and "fp32" not in root.outputs_given
    cause = " (computed in fp32, then cast by FSDP's output_dtype)" if cast else ""
    evidence = f"the loss is {dtype}{value}{cause}{_spacing(loss.value, dtype)}."
    yield Finding("loss-half", "error", "", evidence, "set FSDP's output_dtype to None, or " + USE_CALLBACK)


def _spacing(value: float | None, dtype: str) -> str:
    """How far apart the numbers of a half dtype are at a value."""
    if not value or not math.isfinite(value):
        return ""
    bits = {"bf16": 7, "fp16": 10}[dtype]  # stored bits of the fraction
    return f": the next {dtype} number is {2.0 ** (math.floor(math.log2(abs(value))) - bits):.2g} away"


def reduce_half(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Gradients are summed over ranks in half precision; plain AMP reduces fp32 gradients in fp32."""
    found = [c for c in trace.gradient_reductions() if c.dtype in HALF]
    if not found:
        return
    dtype, ranks = found[0].dtype, max(c.group_size for c in found)
    count, total = sum(c.count for c in found), sum(c.bytes for c in found)
    evidence = f"{count} gradient reductions ({total:,} bytes) over {ranks} ranks in {dtype}."
    severity: Severity = "note" if contract.reduce_dtype == dtype else "error"
    fix = "reduce_dtype='fp32' (MixedPrecision, MixedPrecisionPolicy or FSDPAutocast)."
    yield Finding("reduce-half", severity, _unit_kind(trace, found[0].module), evidence, fix)


def accumulate_half(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Gradients of several micro-batches are summed in half precision.

    Sums made between two autograd nodes are judged under FSDP2 only, which accumulates there in its reduction dtype;
    elsewhere they add up the uses of one weight, as plain AMP does.
    """
    reduces_half = any(c.kind == "reduce_scatter" and c.dtype in HALF for c in trace.collectives)
    between = contract.fsdp_version == 2 and reduces_half
    found = [a for a in trace.accumulation if a.dtype in HALF and (a.by == "parameter" or between)]
    if trace.micro_batches < 2 or not found:
        return
    count, dtype = sum(a.count for a in found), found[0].dtype
    evidence = f"{trace.micro_batches} micro-batches, {count} sums of gradients in {dtype}."
    if contract.fsdp_version == 1:
        fix = (
            "FSDP1 keeps unsynchronised gradients in the gather dtype: use FSDP2, preset 'exact', or "
            "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}."
        )
    else:
        fix = "reduce_dtype='fp32': FSDP2 accumulates in it; without FSDP keep master weights in fp32."
    severity: Severity = "error"
    if contract.accepts_low_gather:
        severity = "note" if contract.reduce_dtype == dtype else "warning"
    yield Finding("accumulate-half", severity, _unit_kind(trace, found[0].module), evidence, fix)


def master_half(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Trained parameters are stored in half precision: updates below 1/256 of a weight are lost (bf16)."""
    for kind, group in _by_kind([(p.name, p) for p in trace.parameters if p.requires_grad and p.storage in HALF]):
        numel = sum(p.numel for p in group)
        evidence = f"{len(group)} trained parameters ({numel:,} elements) stored in {group[0].storage}."
        fix = "load the model with dtype=torch.float32, or cast the trained parameters to fp32 before the Trainer."
        yield Finding("master-half", "error", kind, evidence, fix)


def optimizer_half(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """The optimizer keeps its moments in half precision."""
    found = [s for s in trace.optimizer if s.dtype in HALF and s.numel > s.tensors]
    if found:
        keys = ", ".join(sorted({s.key for s in found}))
        evidence = f"{keys} in {found[0].dtype}, {sum(s.numel for s in found):,} elements on this rank."
        yield Finding("optimizer-half", "warning", "", evidence, "keep trained parameters in fp32.")


def scaler_missing(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """fp16 gradients below 6e-8 become zero without loss scaling."""
    if contract.dtype == "fp16" and trace.scaler is not None and not (trace.scaler.present and trace.scaler.enabled):
        state = "disabled" if trace.scaler.present else "absent"
        fix = "bf16=True, or a device that accelerate scales gradients on (it makes no scaler on CPU)."
        yield Finding("scaler-missing", "error", "", f"training in fp16 and the gradient scaler is {state}.", fix)


def logits_upcast(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Half-precision logits are copied to fp32 on their way out, for a caller that only wants the loss."""
    logits = trace.logits
    if logits is None or logits.dtype != "fp32" or logits.made_dtype not in HALF:
        return
    numel = 1
    for length in logits.shape:
        numel *= length
    evidence = f"logits {list(logits.shape)} come out of {logits.module or 'the model'} in {logits.made_dtype} and "
    evidence += f"reach the caller as fp32: a copy of {numel * 4:,} bytes."
    fix = "patch_model(model, dtype) strips accelerate's convert_outputs_to_fp32 (FSDPAutocast does so under FSDP); "
    fix += "where the model itself casts its logits, a loss over chunks of them."
    yield Finding("logits-upcast", "warning", kind_of(logits.module), evidence, fix)


def autocast_cache_holds_weights(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """Autocast's cache keeps a half-precision copy of weights gathered in fp32 until the forward ends."""
    cached = any(a.enabled and a.cache_enabled and a.phase == "forward" for a in trace.autocast)
    if not cached or contract.fsdp_version == 0:
        return
    casts = {
        op.module
        for op in trace.ops
        if op.phase == "forward" and op_name(op.op) in MATMULS and op.inputs and all(d in HALF for d in op.inputs)
    }
    held = [
        (p.name, p)
        for p in trace.parameters
        if p.compute == "fp32" and p.requires_grad and p.unit is not None and p.name.rpartition(".")[0] in casts
    ]
    everything = sum(p.numel for p in trace.parameters)
    total = sum(p.numel for _, p in held)
    if not total:
        return
    severity: Severity = "warning" if total > everything / 4 else "note"
    kind = _by_kind(held)[0][0]
    evidence = f"{len(held)} weights gathered in fp32 and cast by autocast: {2 * total:,} bytes of copies are held "
    evidence += "through the whole forward, resharded or not."
    fix = "autocast with cache_enabled=False, or gather these weights in half precision (presets 'amp', 'exact')."
    yield Finding("autocast-cache-holds-weights", severity, kind, evidence, fix)


def fsdp_inactive(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """FSDP was asked for, and nothing is sharded."""
    sharded = any(m.is_unit for m in trace.modules)
    if not contract.fsdp_requested or sharded:
        return
    evidence = f"FSDP was asked for, no module is sharded (accelerate trains {contract.distributed_type})."
    fix = "launch on the devices meant; to rehearse on CPU call enable_cpu_fsdp() before building the Trainer."
    yield Finding("fsdp-inactive", "error", "", evidence, fix)


def launcher_disagrees(trace: Trace, contract: Contract) -> Iterator[Finding]:
    """The launcher and the arguments ask for different dtypes."""
    if contract.disagreement:
        fix = "ask for one dtype: in TrainingArguments alone."
        yield Finding("launcher-disagrees", "error", "", contract.disagreement, fix)


def _ran_under_autocast(trace: Trace) -> bool:
    return any(a.enabled for a in trace.autocast if a.phase == "forward")


def _unit_kind(trace: Trace, path: str) -> str:
    """Kind of the FSDP unit around a module; the module's own kind where nothing is sharded."""
    units = {m.path for m in trace.modules if m.is_unit}
    unit = path
    while units and unit and unit not in units:
        unit = unit.rpartition(".")[0]
    return kind_of(unit)


def _by_kind(named: list[tuple[str, ParameterRecord]]) -> list[tuple[str, list[ParameterRecord]]]:
    """Parameters by kind of the module that owns them, in order."""
    groups: dict[str, list[ParameterRecord]] = {}
    for name, item in named:
        groups.setdefault(kind_of(name.rpartition(".")[0]), []).append(item)
    return list(groups.items())


RULES = (
    autocast_missing,
    autocast_wrong_dtype,
    loss_half,
    reduce_half,
    accumulate_half,
    master_half,
    optimizer_half,
    scaler_missing,
    logits_upcast,
    autocast_cache_holds_weights,
    fsdp_inactive,
    launcher_disagrees,
)
