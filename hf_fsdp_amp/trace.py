"""The record of one training step: which op ran in which dtype in which module, and what was sent between ranks.

Plain data, no torch calls: `audit` fills it from a live step, a dry run fills the same records from fake tensors.
Dtypes are short names throughout (``"bf16"``, ``"fp16"``, ``"fp32"``, torch's own name for others, as `dtype_name`
gives them), module paths are those of the model before FSDP, DDP, checkpoint wrappers or torch.compile wrapped it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["forward", "recompute", "backward", "optimizer", "outside"]
"""When an op ran. `recompute`: a forward that gradient checkpointing runs again inside the backward. `outside`: none
of the others, e.g. gradient clipping, or a loss computed outside the model."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "other"]

HALF = ("bf16", "fp16")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def kind_of(path: str) -> str:
    """A module path with its layer and expert numbers folded: ``model.layers.3.mlp`` gives ``model.layers.*.mlp``."""
    return _INDEX.sub("*", path)


@dataclass
class OpRecord:
    """All runs of one op with one set of dtypes in one module and phase.

    Args:
        op: overload's name as torch prints it, e.g. ``aten.addmm.default``.
        module: path of the innermost module it ran in; in the backward, of the module whose forward made the node.
        phase: see `Phase`.
        inputs: dtypes of the tensor arguments in order, of integer and bool tensors too.
        outputs: dtypes of the tensor results in order.
        count: number of runs.
        max_bytes: size in bytes of the largest result.
        shape: shape of that result.
        node: class of the autograd node that ran it; None outside the backward.
    """

    op: str
    module: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    count: int = 1
    max_bytes: int = 0
    shape: tuple[int, ...] = ()
    node: str | None = None


@dataclass
class ModuleRecord:
    """A module that ran: floating dtypes at its boundary. Repeated dtypes are kept once, in order.

    Args:
        path: module path, ``""`` for the root.
        cls: class name, without FSDP2's ``FSDP`` prefix.
        is_unit: whether FSDP shards here.
        calls: forwards run (all micro-batches); `recomputes` counts those inside the backward.
        inputs_given: what the caller passed; `inputs_seen`: what the forward got after FSDP's casts.
        outputs_made: what the forward returned; `outputs_given`: what the caller got after FSDP's casts.
        output_shape: shape of the largest floating output.
        autocast: dtype of autocast inside the forward on the trace's device type, ``"off"`` where disabled.
        recompute_autocast: the same in the recompute; None where there was none.
    """

    path: str
    cls: str
    is_unit: bool = False
    calls: int = 0
    recomputes: int = 0
    inputs_given: tuple[str, ...] = ()
    inputs_seen: tuple[str, ...] = ()
    outputs_made: tuple[str, ...] = ()
    outputs_given: tuple[str, ...] = ()
    output_shape: tuple[int, ...] = ()
    autocast: str | None = None
    recompute_autocast: str | None = None


@dataclass
class ParameterRecord:
    """A parameter's three dtypes.

    Args:
        name: path of the parameter; under FSDP1 without `use_orig_params`, of the unit's flat parameter.
        cls: class of the module that owns it.
        shape, numel: unsharded where that could be seen, else as stored on this rank.
        requires_grad: whether it is trained.
        storage: dtype of the master copy, which the optimizer updates.
        compute: dtype inside the owning module's forward (after the all-gather); None where that was never seen.
        gradient: dtype of `.grad` before the optimizer step; None where there was none.
        unit: path of the FSDP unit that gathers it; None where nothing is sharded.
    """

    name: str
    cls: str
    shape: tuple[int, ...]
    numel: int
    requires_grad: bool
    storage: str
    compute: str | None = None
    gradient: str | None = None
    unit: str | None = None


@dataclass
class BufferRecord:
    """A buffer: dtype as stored before the step and as the owning module's forward saw it (None: not seen)."""

    name: str
    cls: str
    shape: tuple[int, ...]
    storage: str
    compute: str | None = None


@dataclass
class CollectiveRecord:
    """All runs of one collective with one dtype in one unit and phase.

    Args:
        kind: see `CollectiveKind`.
        op: the c10d op, e.g. ``c10d._allgather_base_.default``.
        dtype: what is on the wire; ``uint8`` where FSDP2 packs parameters of several dtypes into one all-gather.
        module: path of the module during whose call (or backward) it was issued: with prefetching, not the owner.
        phase: see `Phase`.
        count: number of runs.
        bytes: all runs together: whole gathered size, whole size before the scatter, or whole reduced size.
        group_size: ranks in the process group.
    """

    kind: CollectiveKind
    op: str
    dtype: str
    module: str
    phase: Phase
    count: int = 0
    bytes: int = 0
    group_size: int = 0


@dataclass
class AutocastRecord:
    """One autocast state as seen inside modules' forwards, on the trace's device type.

    Args:
        enabled, dtype, cache_enabled: the state; `dtype` is what it would cast to, even where it is disabled.
        phase: forward or recompute.
        count: module calls that saw it.
        module: the first of them.
    """

    device_type: str
    enabled: bool
    dtype: str
    cache_enabled: bool
    phase: Phase
    count: int = 0
    module: str = ""


@dataclass
class AccumulationRecord:
    """In-place sums of a parameter's gradient, by dtype.

    Args:
        dtype: dtype of the sum.
        module: module whose parameter it is, where known.
        by: ``parameter``: into `.grad` or FSDP's own store, so over micro-batches; ``graph``: between two autograd
            nodes, over the uses of one weight, or (FSDP2's root) over micro-batches.
        count: number of sums.
    """

    dtype: str
    module: str
    by: Literal["parameter", "graph"] = "parameter"
    count: int = 0


@dataclass
class OptimizerStateRecord:
    """The optimizer's state tensors of one key (``exp_avg``, ...) and dtype; `numel` is this rank's share."""

    key: str
    dtype: str
    tensors: int
    numel: int


@dataclass
class LossRecord:
    """The loss.

    Args:
        dtype: as the model returned it; None where the model made none.
        value: the first micro-batch's, on this rank; None on fake tensors.
        backward_dtype: of the scalar the backward started from.
    """

    dtype: str | None = None
    value: float | None = None
    backward_dtype: str | None = None


@dataclass
class LogitsRecord:
    """The model's largest floating output.

    Args:
        dtype: as the caller got it.
        made_dtype: as the module that computed it made it.
        module: path of that module.
        shape: of the output.
        bytes: size of all copies seen of it: as made, and as given where that is another dtype.
    """

    dtype: str
    made_dtype: str
    module: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class MemoryRecord:
    """Bytes on one rank, as a dry run computes them.

    Args:
        parameters: the rank's share as stored; `gradients` and `optimizer` (AdamW's two moments) likewise.
        logits: all copies of the logits, see `LogitsRecord`.
        residual: outputs of all blocks, i.e. the residual stream: what activation checkpointing of each block keeps.
        saved: what the backward needs, held when the forward ends, logits included; without checkpointing.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    logits: int = 0
    residual: int = 0
    saved: int = 0


@dataclass
class ScalerRecord:
    """The gradient scaler; `scale` is its factor, None where it is disabled or absent."""

    present: bool
    enabled: bool = False
    scale: float | None = None


@dataclass
class Trace:
    """One optimizer step.

    Args:
        device_type: device type the model computes on.
        source: ``"live"``, or ``"fake"`` for a dry run.
        micro_batches: forwards of the root.
        memory: bytes a rank, of a dry run; None for a live one.
        compiled: paths of modules that torch.compile compiles (``""``: the whole model); `notes` says what that hides.
        guesses: what a dry run had to assume; empty for a live one.
        notes: what could not be seen, in plain words.
        sequence: indices into `ops` in running order, where asked for.
    """

    device_type: str = "cpu"
    source: Literal["live", "fake"] = "live"
    micro_batches: int = 0
    ops: list[OpRecord] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    parameters: list[ParameterRecord] = field(default_factory=list)
    buffers: list[BufferRecord] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)
    autocast: list[AutocastRecord] = field(default_factory=list)
    accumulation: list[AccumulationRecord] = field(default_factory=list)
    optimizer: list[OptimizerStateRecord] = field(default_factory=list)
    loss: LossRecord | None = None
    logits: LogitsRecord | None = None
    scaler: ScalerRecord | None = None
    memory: MemoryRecord | None = None
    compiled: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """The trace that `to_dict` gave.

        Raises:
            ValueError: a field that this version doesn't know, or one that is missing.
        """
        return from_plain(cls, data)

    def gathered_bytes(self, phase: Phase | None = None) -> int:
        """Bytes of all all-gathers together, of one phase or of all."""
        return sum(c.bytes for c in self.collectives if c.kind == "all_gather" and phase in (None, c.phase))

    def gradient_reductions(self) -> list[CollectiveRecord]:
        """The collectives that sum gradients over ranks; not those of clipping, buffers or bookkeeping."""
        floating = [c for c in self.collectives if c.phase == "backward" and not c.dtype.startswith(("int", "uint"))]
        return [c for c in floating if c.kind in ("reduce_scatter", "all_reduce")]


def to_plain(record: Any) -> dict[str, Any]:
    """A record as plain data; fields that hold their default are left out."""
    plain: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if value != default:
            plain[f.name] = _plain_value(value)
    return plain


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value


def from_plain(cls: type[Any], data: dict[str, Any]) -> Any:
    """The record of class `cls` that `to_plain` made `data` from.

    Raises:
        ValueError: a field unknown to `cls`, or one missing.
    """
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}: written by another version?")
    try:
        return cls(**{name: _typed(hints[name], value) for name, value in data.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _typed(hint: Any, value: Any) -> Any:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if value is None:
        return None
    if typing.get_origin(hint) is list:
        return [_typed(arguments[0], item) for item in value]
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    for candidate in [hint, *arguments]:
        if dataclasses.is_dataclass(candidate) and isinstance(candidate, type):
            return from_plain(candidate, value)
    return value
