"""Fold a trace to one row per kind of module: what tables, the HTML page and comparisons show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .trace import HALF, OpRecord, Trace, kind_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that move, view, make or cast data, but compute nothing.
_MOVES = _names(
    "view _unsafe_view reshape t transpose permute expand slice select split split_with_sizes chunk unbind unsqueeze "
    "squeeze as_strided detach alias clone contiguous copy_ _to_copy empty empty_like new_empty new_zeros zeros "
    "zeros_like ones ones_like full full_like fill_ zero_ arange scalar_tensor lift_fresh cat stack narrow unfold "
    "empty_strided new_empty_strided _foreach_copy_ _local_scalar_dense is_same_size resize_ set_ index select_scatter "
    "slice_scatter slice_backward select_backward embedding index_select gather masked_fill masked_fill_ where repeat "
    "tril triu flatten movedim swapaxes roll constant_pad_nd diagonal record_stream"
)
MATMULS = _names(
    "mm addmm bmm baddbmm matmul linear addmv mv addbmm _grouped_mm grouped_mm convolution _convolution conv1d conv2d "
    "_scaled_mm mkldnn_linear _mkl_linear einsum"
)
ATTENTIONS = _names(
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable "
    "scaled_dot_product_attention _flash_attention_forward _efficient_attention_forward flex_attention"
)
SOFTMAXES = frozenset(["_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax"])
NORMS = _names(
    "native_layer_norm layer_norm rms_norm _fused_rms_norm native_group_norm group_norm native_batch_norm batch_norm "
    "cudnn_batch_norm _native_batch_norm_legit linalg_vector_norm"
)


def op_name(op: str) -> str:
    """An op's bare name: ``aten.addmm.default`` gives ``addmm``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def is_move(op: OpRecord) -> bool:
    """Whether an op only moves, views, makes or casts data."""
    return op_name(op.op) in _MOVES or op.op.startswith(("fsdp.", "c10d", "_c10d"))


def is_norm(cls: str) -> bool:
    """Whether a class name is a normalisation layer's (``LayerNorm``, ``LlamaRMSNorm``, ``T5LayerNorm``, ...)."""
    return "norm" in cls.lower() and "normalize" not in cls.lower()


def compute_dtypes(ops: list[OpRecord]) -> tuple[str, ...]:
    """Floating dtypes the ops compute in, matmuls' first, then by number of runs; moves and casts don't count."""
    counts: Counter[str] = Counter()
    for op in ops:
        if is_move(op):
            continue
        dtype = op_dtype(op)
        if dtype is not None:
            counts[dtype] += op.count * (1000 if op_name(op.op) in MATMULS | ATTENTIONS else 1)
    return tuple(dtype for dtype, _ in counts.most_common())


def op_dtype(op: OpRecord) -> str | None:
    """The dtype an op computes in; None where nothing floating goes in or out.

    Its inputs' where they agree, the result's where they don't: elementwise ops promote (bf16 + fp32 is fp32).
    """
    given = dict.fromkeys(d for d in op.inputs if is_floating(d))
    made = [d for d in op.outputs if is_floating(d)]
    if len(given) == 1 or not made:
        return next(iter(given), None)
    return made[0]


def is_floating(dtype: str) -> bool:
    """Whether a short dtype name is a floating one."""
    return dtype in ("bf16", "fp16", "fp32", "float64") or dtype.startswith("float8")


@dataclass
class KindSummary:
    """One kind of module, e.g. ``transformer.blocks.*.attn.Wqkv``.

    Args:
        kind: folded path, ``""`` for the root itself.
        cls: class name; members: number of modules; calls: forwards of all of them.
        storage, compute, gradient: dtypes of their own parameters; numel: of all members together.
        inputs, outputs: floating dtypes at their boundary, as given by and to the caller.
        runs: dtypes their own ops compute in, in the forward; backward: the same in the backward.
        autocast: autocast's state inside.
        is_unit: whether FSDP shards here.
        casts: casts between floating dtypes by its own ops in the forward, as ``"bf16>fp32"``, with their number.
    """

    kind: str
    cls: str
    members: int = 0
    calls: int = 0
    storage: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    numel: int = 0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    autocast: tuple[str, ...] = ()
    is_unit: bool = False
    casts: dict[str, int] = field(default_factory=dict)

    @property
    def is_half(self) -> bool:
        """Whether anything of it computes in half precision."""
        return any(dtype in HALF for dtype in self.runs)


def summarize(trace: Trace) -> list[KindSummary]:
    """One summary per kind of module that ran, in order of first call."""
    kinds: dict[str, KindSummary] = {}
    for module in trace.modules:
        kind = kinds.setdefault(kind_of(module.path), KindSummary(kind_of(module.path), module.cls))
        kind.members += 1
        kind.calls += module.calls
        kind.is_unit |= module.is_unit
        kind.inputs = _join(kind.inputs, module.inputs_given)
        kind.outputs = _join(kind.outputs, module.outputs_given)
        kind.autocast = _join(kind.autocast, (module.autocast,) if module.autocast else ())
    for parameter in trace.parameters:
        found = kinds.get(kind_of(parameter.name.rpartition(".")[0]))
        if found is not None:
            found.storage = _join(found.storage, (parameter.storage,))
            found.compute = _join(found.compute, (parameter.compute,) if parameter.compute else ())
            found.gradient = _join(found.gradient, (parameter.gradient,) if parameter.gradient else ())
            found.numel += parameter.numel
    by_phase = {phase: _ops_by_kind(trace, phase) for phase in ("forward", "backward")}
    for name, kind in kinds.items():
        forward = by_phase["forward"].get(name, [])
        kind.runs = compute_dtypes(forward)
        kind.backward = compute_dtypes(by_phase["backward"].get(name, []))
        kind.casts = _casts(forward)
    return list(kinds.values())


def forward_dtypes(trace: Trace, names: frozenset[str]) -> tuple[str, ...]:
    """Dtypes that ops of these bare names compute in, in the forward, by number of runs."""
    return compute_dtypes([o for o in trace.ops if o.phase == "forward" and op_name(o.op) in names])


def _ops_by_kind(trace: Trace, phase: str) -> dict[str, list[OpRecord]]:
    ops: dict[str, list[OpRecord]] = {}
    for op in trace.ops:
        if op.phase == phase:
            ops.setdefault(kind_of(op.module), []).append(op)
    return ops


def _casts(ops: list[OpRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for op in ops:
        if op_name(op.op) == "_to_copy" and op.inputs and op.outputs and op.inputs[0] != op.outputs[0]:
            source, target = op.inputs[0], op.outputs[0]
            if is_floating(source) and is_floating(target):
                counts[f"{source}>{target}"] += op.count
    return dict(counts)


def _join(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*old, *new)))
