"""Rules about modules: norms, softmax, embeddings, buffers, routers, experts, recompute.

Each compares with what plain AMP (fp32 parameters and autocast) computes on the same device type. With a reference
trace of plain AMP the comparison is exact, module by module. Without one it rests on what autocast does by its op
lists (torch 2.4 to 2.14): on CUDA layer_norm and softmax always run in fp32; on CPU they run in the dtype they get, so
that a half-precision softmax there is no deviation, and a norm deviates where its weights or its input were rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from .contract import Contract, Finding, Severity
from .summary import MATMULS, NORMS, SOFTMAXES, is_move, is_norm, op_dtype, op_name
from .trace import HALF, BufferRecord, ModuleRecord, OpRecord, ParameterRecord, Trace, kind_of

_SCORES = SOFTMAXES | {"sigmoid", "topk"}
_EXPERT_MATMULS = frozenset({"_grouped_mm", "grouped_mm"})


@dataclass
class Case:
    """A trace, looked up by module.

    Args:
        trace: the step.
        contract: what it is judged against.
        reference: a trace of the same model under plain AMP, or None.
    """

    trace: Trace
    contract: Contract
    reference: Trace | None = None

    @cached_property
    def parameters(self) -> dict[str, list[ParameterRecord]]:
        """Parameters by path of the module that owns them."""
        owned: dict[str, list[ParameterRecord]] = {}
        for parameter in self.trace.parameters:
            owned.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
        return owned

    @cached_property
    def ops(self) -> dict[str, list[OpRecord]]:
        """Ops of the forward by module path."""
        return _by_module(op for op in self.trace.ops if op.phase == "forward")

    @cached_property
    def plain_dtypes(self) -> dict[tuple[str, str], set[str]]:
        """Dtypes of the reference's forward by kind of module and op name."""
        found: dict[tuple[str, str], set[str]] = {}
        for op in self.reference.ops if self.reference is not None else ():
            if op.phase == "forward" and (dtype := op_dtype(op)) is not None:
                found.setdefault((kind_of(op.module), op_name(op.op)), set()).add(dtype)
        return found

    @cached_property
    def plain_outputs(self) -> dict[str, set[str]]:
        """Output dtypes of the reference's modules by kind."""
        found: dict[str, set[str]] = {}
        for module in self.reference.modules if self.reference is not None else ():
            found.setdefault(kind_of(module.path), set()).update(module.outputs_made)
        return found

    @cached_property
    def autocast_right(self) -> bool:
        """Whether the forward ran under autocast of the training dtype."""
        return any(a.enabled and a.dtype == self.contract.dtype for a in self.trace.autocast if a.phase == "forward")

    @property
    def deviation(self) -> Severity:
        """Severity of computing in half precision what plain AMP computes in fp32."""
        if self.contract.accepts_low_gather:
            return "note"
        stock = self.contract.fsdp_version > 0 and self.contract.preset == "stock"
        return "warning" if stock and self.autocast_right else "error"


def norm_half(case: Case) -> Iterator[Finding]:
    """A normalisation layer computes in half precision, or with weights rounded to it."""
    found: dict[str, list[tuple[ModuleRecord, str]]] = {}
    for module in case.trace.modules:
        if is_norm(module.cls) and (evidence := _norm_evidence(case, module)):
            found.setdefault(kind_of(module.path), []).append((module, evidence))
    stored = _stored_half_share(case.trace)
    for kind, members in found.items():
        severity = case.deviation
        weights = case.parameters.get(members[0][0].path, [])
        if any(p.storage in HALF for p in weights):
            severity = "error" if stored < 0.5 else "warning"
        evidence = f"{len(members)} {members[0][0].cls}: {members[0][1]}."
        fix = "FSDPAutocast('exact') gathers norm weights in fp32." if case.contract.fsdp_version else _KEEP_FP32
        yield Finding("norm-half", severity, kind, evidence, fix)


def _norm_evidence(case: Case, module: ModuleRecord) -> str | None:
    """What is half precision about a norm where plain AMP's is fp32; None where nothing is."""
    ops = case.ops.get(module.path, [])
    fused = next((op for op in ops if op_name(op.op) in NORMS and op.inputs and op.inputs[0] in HALF), None)
    half_out = any(d in HALF for d in module.outputs_made)
    weights = [p for p in case.parameters.get(module.path, []) if p.compute in HALF]
    if case.reference is not None:
        kind = kind_of(module.path)
        name = op_name(fused.op) if fused is not None else ""
        plain_fused = case.plain_dtypes.get((kind, name), set()) - set(HALF)
        plain_out = case.plain_outputs.get(kind, set()) - set(HALF)
        if not (fused is not None and plain_fused) and not (half_out and plain_out) and not _rounded(weights):
            return None
    elif not weights and (module.autocast != "off" or not half_out):
        return None
    parts = [f"{op_name(fused.op)} on {fused.inputs[0]}"] if fused is not None else []
    parts += [f"output {module.outputs_made[0]}"] if half_out else []
    parts += [f"weights {weights[0].storage} as stored, {weights[0].compute} in the forward"] if weights else []
    return ", ".join(parts) or None


def softmax_half(case: Case) -> Iterator[Finding]:
    """A softmax runs on half-precision scores."""
    for kind, ops in _by_kind(case, SOFTMAXES).items():
        dtype = next((op.inputs[0] for op in ops if op.inputs and op.inputs[0] in HALF), None)
        if dtype is None:
            continue
        on_cpu = case.contract.device_type == "cpu"
        severity: Severity = "note"
        if case.reference is not None:
            plain = {d for name in SOFTMAXES for d in case.plain_dtypes.get((kind, name), ())}
            if plain and plain <= set(HALF):
                continue
            severity = "error"
        elif not case.autocast_right and case.contract.wants_autocast:
            severity = "warning" if on_cpu else "error"
        why = "CPU autocast leaves softmax as it comes, CUDA's runs it in fp32" if on_cpu else "outside autocast"
        evidence = f"{sum(op.count for op in ops)} softmax runs on {dtype} ({why})."
        yield Finding("softmax-half", severity, kind, evidence, "softmax(x, dtype=torch.float32); " + _AUTOCAST_FIX)


def embedding_half(case: Case) -> Iterator[Finding]:
    """Embeddings start the residual stream in half precision, because their weights are gathered in it."""
    found: dict[str, list[ParameterRecord]] = {}
    for module in case.trace.modules:
        weights = [p for p in case.parameters.get(module.path, []) if p.compute in HALF and p.storage not in HALF]
        if "Embedding" in module.cls and weights and any(d in HALF for d in module.outputs_made):
            found.setdefault(kind_of(module.path), []).extend(weights)
    for kind, weights in found.items():
        evidence = f"output {weights[0].compute}; plain AMP's residual stream starts in {weights[0].storage}."
        yield Finding(
            "embedding-half", case.deviation, kind, evidence, "FSDPAutocast('exact') gathers embeddings in fp32."
        )


def buffer_half(case: Case) -> Iterator[Finding]:
    """A floating buffer is in half precision: rotary frequencies, position tables, running statistics."""
    found: dict[str, list[BufferRecord]] = {}
    for buffer in case.trace.buffers:
        if buffer.storage in HALF or buffer.compute in HALF:
            found.setdefault(kind_of(buffer.name.rpartition(".")[0]), []).append(buffer)
    mixed = _stored_half_share(case.trace) < 0.5
    for kind, buffers in found.items():
        cast = any(b.compute in HALF and b.storage not in HALF for b in buffers)
        first = buffers[0]
        names = sorted({b.name.rpartition(".")[2] for b in buffers})
        evidence = f"{', '.join(names)}: {first.storage} before the step, {first.compute or first.storage} in it."
        fix = "buffer_dtype=None in FSDP1's MixedPrecision; never .to(dtype) a whole model that has rotary buffers."
        yield Finding("buffer-half", "error" if cast or mixed else "warning", kind, evidence, fix)


def router_half(case: Case) -> Iterator[Finding]:
    """A mixture-of-experts router computes or scores in half precision: near ties then pick other experts."""
    routers: dict[str, list[OpRecord]] = {}
    for path in _routers(case.trace):
        inside = [op for p, ops in case.ops.items() if p == path or p.startswith(path + ".") for op in ops]
        routers.setdefault(kind_of(path), []).extend(inside)
    for kind, ops in routers.items():
        half = [op for op in ops if op_name(op.op) in MATMULS | _SCORES and op_dtype(op) in HALF]
        if not half:
            continue
        if case.reference is not None:
            half = [op for op in half if case.plain_dtypes.get((kind_of(op.module), op_name(op.op)), set()) - set(HALF)]
            severity: Severity = "error"
        elif any(op_name(op.op) in _SCORES for op in half):
            severity = "warning" if case.autocast_right else "error"
        else:
            severity = "note" if case.autocast_right or not case.contract.wants_autocast else "error"
        if half:
            what = ", ".join(sorted({f"{op_name(op.op)} in {op_dtype(op)}" for op in half}))
            fix = "run the router under torch.autocast(enabled=False) on fp32 inputs and weights (keep_fp32)."
            yield Finding("router-half", severity, kind, f"{what}.", fix)


def experts_fp32(case: Case) -> Iterator[Finding]:
    """Experts computed by grouped_mm, which is no autocast op: fp32 weights are gathered and multiplied in fp32."""
    if not case.contract.wants_autocast:
        return
    for kind, ops in _by_kind(case, _EXPERT_MATMULS).items():
        if any(op.inputs and op.inputs[0] == "fp32" for op in ops):
            size = sum(p.numel for name, ps in case.parameters.items() if kind_of(name) == kind for p in ps)
            evidence = f"grouped_mm runs in fp32 under autocast ({size:,} elements gathered at {4 * size:,} bytes; "
            evidence += f"{2 * size:,} in {case.contract.dtype}). Plain AMP does the same."
            fix = "model.set_experts_implementation('eager') or 'batched_mm' to run experts under autocast."
            yield Finding("experts-fp32", "note", kind, evidence, fix)


def recompute_dtype(case: Case) -> Iterator[Finding]:
    """Gradient checkpointing recomputes the forward in another dtype than it first ran in."""
    first = _dtypes_by_op(op for op in case.trace.ops if op.phase == "forward")
    again = _dtypes_by_op(op for op in case.trace.ops if op.phase == "recompute")
    reported = set()
    for (kind, name), dtypes in again.items():
        before = first.get((kind, name), set())
        if kind not in reported and before and dtypes - before:
            reported.add(kind)
            evidence = f"{name} in {_list(before)} in the forward and in {_list(dtypes)} in its recompute."
            fix = "torch.utils.checkpoint (it restores autocast), not a checkpoint of your own that forgets it."
            yield Finding("recompute-dtype", "error", kind, evidence, fix)


def dtype_changes_across_norm(case: Case) -> Iterator[Finding]:
    """A norm hands on another half-precision dtype than it got, or than was asked for (MPT's low-precision norms)."""
    reported = set()
    for module in case.trace.modules:
        kind = kind_of(module.path)
        if not is_norm(module.cls) or kind in reported:
            continue
        before = [d for d in module.inputs_seen if d in HALF]
        after = [d for d in module.outputs_made if d in HALF]
        unasked = [d for d in after if d not in before and (before or d != case.contract.dtype)]
        if unasked:
            reported.add(kind)
            given = _list(set(module.inputs_seen)) or "nothing floating"
            evidence = f"{module.cls} gets {given} and returns {unasked[0]} (autocast inside: {module.autocast})."
            yield Finding("dtype-changes-across-norm", "error", kind, evidence, _AUTOCAST_FIX)


_KEEP_FP32 = "keep the norm's weights and input in fp32."
_AUTOCAST_FIX = "autocast in the training dtype around the forward (FSDPAutocast)."


def _routers(trace: Trace) -> list[str]:
    """Paths of routers, in models that have experts."""
    if not any("expert" in m.path.lower() or "moe" in m.path.lower() or "moe" in m.cls.lower() for m in trace.modules):
        return []
    paths = []
    for module in trace.modules:
        name = module.path.rpartition(".")[2].lower()
        if "router" in module.cls.lower() or name in ("router", "gate", "wg"):
            paths.append(module.path)
    return [p for p in paths if not any(p.startswith(q + ".") for q in paths)]


def _by_kind(case: Case, names: frozenset[str]) -> dict[str, list[OpRecord]]:
    """Ops of the forward with these bare names, by kind of module."""
    found: dict[str, list[OpRecord]] = {}
    for path, ops in case.ops.items():
        if wanted := [op for op in ops if op_name(op.op) in names]:
            found.setdefault(kind_of(path), []).extend(wanted)
    return found


def _by_module(ops: Iterable[OpRecord]) -> dict[str, list[OpRecord]]:
    found: dict[str, list[OpRecord]] = {}
    for op in ops:
        found.setdefault(op.module, []).append(op)
    return found


def _dtypes_by_op(ops: Iterable[OpRecord]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for op in ops:
        dtype = op_dtype(op)
        if dtype is not None and not is_move(op):
            found.setdefault((kind_of(op.module), op_name(op.op)), set()).add(dtype)
    return found


def _rounded(weights: list[ParameterRecord]) -> bool:
    return any(p.storage not in HALF for p in weights)


def _stored_half_share(trace: Trace) -> float:
    """Share of the parameters' elements that are stored in half precision."""
    total = sum(p.numel for p in trace.parameters)
    return sum(p.numel for p in trace.parameters if p.storage in HALF) / total if total else 0.0


def _list(dtypes: set[str]) -> str:
    return ", ".join(sorted(dtypes))


RULES = (
    norm_half,
    softmax_half,
    embedding_half,
    buffer_half,
    router_half,
    experts_fp32,
    recompute_dtype,
    dtype_changes_across_norm,
)
