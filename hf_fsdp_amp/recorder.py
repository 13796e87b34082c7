"""Record ops and module calls as they run: a dispatch mode for the ops, hooks on every module for the paths.

Used by the live audit and, over fake tensors, by a dry run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # documented for extending torch; its module is private

from .autograd import current_node, in_backward, label_nodes, label_of
from .collectives import read_collective
from .policy import dtype_name
from .trace import AccumulationRecord, AutocastRecord, CollectiveRecord, ModuleRecord, OpRecord, Phase

try:  # public since torch 2.6
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_IGNORED_NAMESPACES = ("profiler", "prim")
_IN_PLACE_SUMS = ("aten.add_.Tensor", "aten._foreach_add_.List")
_NUMBERS = itertools.count(1)


def clean_path(name: str) -> str:
    """A module or parameter name without the parts that FSDP1, checkpoint wrappers and torch.compile insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order."""
    found: list[torch.Tensor] = []
    _collect(value, depth, found)
    return found


def _collect(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            if item is not None:
                _collect(item, depth - 1, found)
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            _collect(item, depth - 1, found)


def floating_dtypes(value: Any) -> tuple[str, ...]:
    """Short names of the floating dtypes in nested containers, each once, in order."""
    return tuple(dict.fromkeys(dtype_name(t.dtype) for t in tensors_in(value) if t.is_floating_point()))


def read_autocast(device_type: str) -> tuple[bool, str, bool]:
    """Autocast's state here: enabled, dtype, cache enabled. Not to be read inside a dispatch mode: it is off there."""
    dtype = dtype_name(torch.get_autocast_dtype(device_type))
    return torch.is_autocast_enabled(device_type), dtype, torch.is_autocast_cache_enabled()


class Recorder:
    """Collects the records of a step.

    Args:
        model: the model, sharded or wrapped as it may be.
        device_type: whose autocast state to read.
        keep_sequence: keep the order of the ops too (one integer per op run).
    """

    def __init__(self, model: nn.Module, device_type: str, keep_sequence: bool = False) -> None:
        self.device_type = device_type
        self.ops: dict[tuple[Any, ...], OpRecord] = {}
        self.modules: dict[str, ModuleRecord] = {}
        self.autocast: dict[tuple[Any, ...], AutocastRecord] = {}
        self.collectives: dict[tuple[Any, ...], CollectiveRecord] = {}
        self.accumulation: dict[tuple[str, str, str], AccumulationRecord] = {}
        self.sequence: list[int] | None = [] if keep_sequence else None
        self.gradient_shapes: set[tuple[int, ...]] = {tuple(p.shape) for p in model.parameters()}
        self.in_optimizer = False
        self.backward_start: torch.Tensor | None = None
        self._number = next(_NUMBERS)
        self._index: dict[tuple[Any, ...], int] = {}
        self._stack: list[tuple[int, str]] = []
        self._recomputed = ""  # module whose forward is being recomputed without its hooks having run
        self._called: dict[str, None] = {}
        self._paths: dict[int, str] = {}
        self._outermost: set[int] = set()
        self._innermost: set[int] = set()
        self._prefix = "module" if isinstance(model, DistributedDataParallel) else ""
        self._read_modules(model)

    def _read_modules(self, model: nn.Module) -> None:
        chain: dict[str, list[nn.Module]] = {}
        for name, module in model.named_modules():
            chain.setdefault(self.clean(name), []).append(module)
        for path, modules in chain.items():
            self._outermost.add(id(modules[0]))
            self._innermost.add(id(modules[-1]))
            is_unit = any(isinstance(m, FullyShardedDataParallel | FSDPModule) for m in modules)
            self.modules[path] = ModuleRecord(path, class_name(modules[-1]), is_unit)
            for module in modules:
                self._paths[id(module)] = path

    def clean(self, name: str) -> str:
        """A name in the model as handed in, as it was before anything wrapped the model."""
        return clean_path(name.removeprefix(self._prefix).removeprefix("."))

    def path_of(self, module: nn.Module) -> str:
        """The clean path of one of the model's modules."""
        return self._paths[id(module)]

    def called_modules(self) -> list[ModuleRecord]:
        """The modules that ran, in order of their first call."""
        return [self.modules[path] for path in self._called]

    @property
    def phase(self) -> Phase:
        """What is running now."""
        if in_backward():  # between two calls of a recompute gradients are on, as they are in FSDP1's own hooks
            recomputing = self._stack or (self._recomputed and torch.is_grad_enabled())
            return "recompute" if recomputing else "backward"
        if self._stack:
            return "forward"
        return "optimizer" if self.in_optimizer else "outside"

    # Module calls. A module that FSDP1 or a checkpoint wrapper wraps shares its path with the wrapper; what the caller
    # gives and gets is read at the outermost of them, what the forward sees and makes at the innermost.

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before everything else a module's call does, FSDP's hooks included."""
        path = self._paths[id(module)]
        if not self._stack and in_backward():  # transformers >= 5.2x checkpoints forward, not the call: no hooks run
            self._recomputed = path.rpartition(".")[0]
        label_nodes(tensors_in((args, kwargs)), self._number, self._running(None))
        self._stack.append((id(module), path))
        record = self.modules[path]
        self._called.setdefault(path)
        if id(module) in self._outermost:
            record.inputs_given = _merge(record.inputs_given, floating_dtypes((args, kwargs)))
            if in_backward():
                record.recomputes += 1
            else:
                record.calls += 1

    def see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """After FSDP's hooks, right before the forward."""
        path = self._paths[id(module)]
        if id(module) not in self._innermost:
            return
        record = self.modules[path]
        record.inputs_seen = _merge(record.inputs_seen, floating_dtypes((args, kwargs)))
        if path or len(self.modules) == 1:  # autocast wrapped around the root's forward begins after its hooks
            self._note_autocast(path, record)

    def _note_autocast(self, path: str, record: ModuleRecord) -> None:
        enabled, dtype, cache = read_autocast(self.device_type)
        phase: Phase = "recompute" if in_backward() else "forward"
        state = dtype if enabled else "off"
        if phase == "forward":
            record.autocast = state
        else:
            record.recompute_autocast = state
        key = (enabled, dtype, cache, phase)
        if key not in self.autocast:
            self.autocast[key] = AutocastRecord(self.device_type, enabled, dtype, cache, phase, module=path)
        self.autocast[key].count += 1

    def see_outputs(self, module: nn.Module, output: Any) -> None:
        """Right after the forward, before FSDP's hooks."""
        if id(module) not in self._innermost:
            return
        record = self.modules[self._paths[id(module)]]
        record.outputs_made = _merge(record.outputs_made, floating_dtypes(output))
        if (largest := largest_floating(output)) is not None:
            record.output_shape = tuple(largest.shape)

    def leave(self, module: nn.Module, output: Any) -> None:
        """After everything else, also where the forward raised (`output` is None then)."""
        path = self._paths[id(module)]
        label_nodes(tensors_in(output), self._number, path)
        if id(module) in self._outermost:
            record = self.modules[path]
            record.outputs_given = _merge(record.outputs_given, floating_dtypes(output))
        while self._stack and self._stack.pop()[0] != id(module):
            pass  # calls below it that an exception left open

    # Ops

    def running_module(self) -> str:
        """Path of the module whose code runs now."""
        return self._running(current_node() if in_backward() else None)

    def _running(self, node: Any) -> str:
        """Path of the module whose code runs: the innermost call, else what is recomputed, else who made the node."""
        return self._stack[-1][1] if self._stack else self._recomputed or label_of(node, self._number) or ""

    def note_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One op has run."""
        if getattr(func, "namespace", "") in _IGNORED_NAMESPACES:
            return
        phase = self.phase
        node = current_node() if phase in ("backward", "recompute") else None
        if phase == "backward":
            self._recomputed = ""
        path = self._running(node)
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        name = str(func)
        if (collective := read_collective(name, args)) is not None:
            self._note_collective(collective, path, phase)
            if collective.kind == "reduce_scatter":
                self.gradient_shapes.update(tuple(t.shape) for t in inputs)
            return
        node_name = node.name() if node is not None and phase == "backward" else None
        self._count(name, path, phase, inputs, outputs, node_name)
        if phase == "outside" and name == "aten.ones_like.default" and inputs[0].numel() == 1:
            self.backward_start = inputs[0].detach()  # how torch.autograd.backward makes its first gradient
        if phase == "backward" and name in _IN_PLACE_SUMS:
            self._note_sum(inputs[0], path, node_name)

    def _count(
        self,
        name: str,
        path: str,
        phase: Phase,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        node: str | None,
    ) -> None:
        in_dtypes = tuple(dtype_name(t.dtype) for t in inputs)
        out_dtypes = tuple(dtype_name(t.dtype) for t in outputs)
        key = (name, path, phase, in_dtypes, out_dtypes, node)
        record = self.ops.get(key)
        if record is None:
            record = self.ops[key] = OpRecord(name, path, phase, in_dtypes, out_dtypes, 0, node=node)
            self._index[key] = len(self._index)
        record.count += 1
        for tensor in outputs:
            size = tensor.numel() * tensor.element_size()
            if size > record.max_bytes:
                record.max_bytes, record.shape = size, tuple(tensor.shape)
        if self.sequence is not None:
            self.sequence.append(self._index[key])

    def _note_collective(self, found: CollectiveRecord, path: str, phase: Phase) -> None:
        key = (found.op, found.dtype, path, phase, found.group_size)
        record = self.collectives.get(key)
        if record is None:
            found.module, found.phase = path, phase
            self.collectives[key] = found
        else:
            record.count += found.count
            record.bytes += found.bytes

    def _note_sum(self, into: torch.Tensor, path: str, node: str | None) -> None:
        """Gradient accumulation: by AccumulateGrad, by FSDP's backward hooks, or before a weight's AccumulateGrad."""
        by_hook = node is None or "AccumulateGrad" in node or "PostBackward" in node
        if not by_hook or tuple(into.shape) not in self.gradient_shapes:
            return
        dtype = dtype_name(into.dtype)
        by: Literal["parameter", "graph"] = "graph" if node is None else "parameter"
        record = self.accumulation.setdefault((dtype, path, by), AccumulationRecord(dtype, path, by))
        record.count += 1


class RecordingMode(TorchDispatchMode):
    """Hands every op to a recorder, forward and backward; runs it unchanged.

    Functions that are compiled by themselves inside the model (flex attention) stay compiled, where torch lets a
    mode allow that (`ignore_compile_internals`; 2.13 and 2.14 do): run eagerly, flex attention would build its whole
    score matrix.
    """

    supports_higher_order_operators = True  # else torch refuses to run cond, flex_attention, ... under the mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch: dynamo compiles and runs compiled code under this mode as without it."""
        return True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.recorder.note_op(func, args, kwargs, result)
        return result


def class_name(module: nn.Module) -> str:
    """Class name of a module as the user knows it: FSDP2 puts ``FSDP`` in front of the name of what it shards."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def largest_floating(value: Any) -> torch.Tensor | None:
    """The largest floating tensor in nested containers."""
    return max((t for t in tensors_in(value) if t.is_floating_point()), key=torch.Tensor.numel, default=None)


def _merge(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    return old if not new or new == old else tuple(dict.fromkeys((*old, *new)))
