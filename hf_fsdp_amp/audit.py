"""Trace a live training step: `record_precision`, and `LiveRecording` for callers that are no `with` block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .compiled import KEEPS_COMPILED, compile_notes, compile_stands_aside, compiled_inside, is_compiled
from .model_records import find_logits, find_loss, read_buffers, read_parameters
from .policy import dtype_name
from .recorder import Recorder, RecordingMode
from .trace import (
    LogitsRecord,
    LossRecord,
    OptimizerStateRecord,
    ScalerRecord,
    Trace,
)


@contextlib.contextmanager
def record_precision(
    model: nn.Module,
    *,
    device_type: str | None = None,
    optimizer: Any = None,
    sequence: bool = False,
    compiled: bool = False,
) -> Iterator[Trace]:
    """Record what one training step really computes in which dtype, forward and backward.

    Run the step inside: forward, backward, optimizer. The trace is complete when the block is left. Works on one
    device, under DDP, FSDP1 and FSDP2, and through gradient checkpointing of both kinds. Everything it puts on the
    model is removed at the end. Don't use it around a step whose time matters: it costs a Python call per op.

    Args:
        model: the model, sharded or wrapped as it is trained.
        device_type: device type the model computes on; default is where its parameters are.
        optimizer: the optimizer, for the gradient scaler that accelerate keeps on it; its state is found without.
        sequence: keep the order of the ops in `Trace.sequence`.
        compiled: the step runs ``torch.compile(model)``, and `model` is the module inside, which bears no trace of it.

    Yields:
        The trace, empty until the block is left.
    """
    audit = LiveRecording(model, device_type=device_type, sequence=sequence, compiled=compiled)
    trace = Trace(device_type=audit.device_type)
    audit.start()
    try:
        yield trace
    finally:
        audit.stop(trace, optimizer)


class LiveRecording:
    """The parts of `record_precision` with a start and a stop of their own, for callers that are no `with` block.

    One recording runs at a time: starting one stops another that was left open (a step that raised).
    """

    _open: weakref.ref[LiveRecording] | None = None

    def __init__(
        self, model: nn.Module, *, device_type: str | None = None, sequence: bool = False, compiled: bool = False
    ) -> None:
        self.model = model
        self.device_type = device_type or next((p.device.type for p in model.parameters()), "cpu")
        self.recorder = Recorder(model, self.device_type, sequence)
        self._names, self._parameters = read_parameters(model, self.recorder)
        self._buffer_names, self._buffers = read_buffers(model, self.recorder)
        self._compiled = {self.recorder.path_of(m) for m in model.modules() if is_compiled(m)}
        if compiled:  # by a wrapper around it, of which the model itself bears no trace
            self._compiled.add("")
        self._handles: list[RemovableHandle] = []
        self._mode = RecordingMode(self.recorder)
        self._stack = contextlib.ExitStack()
        self._optimizers: list[Optimizer] = []
        self._loss: torch.Tensor | None = None
        self._logits: LogitsRecord | None = None
        self.running = False

    def start(self) -> None:
        """Put hooks on every module and enter the dispatch mode."""
        stale = LiveRecording._open() if LiveRecording._open is not None else None
        if stale is not None and stale.running:
            stale.abandon()
        LiveRecording._open = weakref.ref(self)
        keep = self._handles.append
        for module in self.model.modules():
            keep(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            keep(module.register_forward_pre_hook(self._see_inputs, with_kwargs=True))
            keep(module.register_forward_hook(self._see_outputs, prepend=True))
            keep(module.register_forward_hook(self._leave, always_call=True))
        keep(register_optimizer_step_pre_hook(self._before_optimizer))
        keep(register_optimizer_step_post_hook(self._after_optimizer))
        if self._compiled or not KEEPS_COMPILED:
            self._stack.enter_context(compile_stands_aside())
        self._stack.enter_context(self._mode)
        self.running = True

    def abandon(self) -> None:
        """Remove every hook and leave the mode; nothing happens where it is not running."""
        if not self.running:
            return
        self.running = False
        self._stack.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def stop(self, trace: Trace, optimizer: Any = None) -> Trace:
        """Remove everything and fill the trace."""
        self.abandon()
        self._read_gradients()
        recorder = self.recorder
        trace.ops = list(recorder.ops.values())
        trace.modules = recorder.called_modules()
        trace.parameters = list(self._parameters.values())
        trace.buffers = list(self._buffers.values())
        trace.collectives = list(recorder.collectives.values())
        trace.autocast = list(recorder.autocast.values())
        trace.accumulation = list(recorder.accumulation.values())
        trace.optimizer = [record for opt in self._optimizers for record in _read_state(opt)]
        trace.sequence = recorder.sequence or []
        trace.micro_batches = recorder.modules[""].calls
        trace.loss = self._read_loss()
        trace.logits = self._logits
        trace.scaler = _read_scaler(optimizer)
        trace.compiled = sorted(self._compiled | compiled_inside(trace))
        trace.notes.extend(compile_notes(trace, self._compiled))
        if not any(p.unit is not None for p in trace.parameters):
            for parameter in trace.parameters:
                parameter.compute = parameter.compute or parameter.storage
        return trace

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recorder.enter(module, args, kwargs)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recorder.see_inputs(module, args, kwargs)
        for local, name in self._names.get(id(module), ()):
            tensor, record = getattr(module, local), self._parameters[name]
            record.compute, record.shape, record.numel = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.numel()
        for local, name in self._buffer_names.get(id(module), ()):
            self._buffers[name].compute = dtype_name(getattr(module, local).dtype)

    def _see_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        self.recorder.see_outputs(module, output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.recorder.leave(module, output)
        if module is not self.model:
            return
        if output is None:  # the forward raised: whoever started this may never come to stop it
            self.abandon()
        elif self._loss is None:
            self._loss = find_loss(output)
            self._logits = find_logits(output, self.recorder)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.in_optimizer = True
        self._read_gradients()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.in_optimizer = False
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def _read_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            record = self._parameters.get(self.recorder.clean(name))
            if record is not None and record.gradient is None and parameter.grad is not None:
                record.gradient = dtype_name(parameter.grad.dtype)

    def _read_loss(self) -> LossRecord:
        started = self.recorder.backward_start
        record = LossRecord(backward_dtype=None if started is None else dtype_name(started.dtype))
        if self._loss is not None:
            record.dtype = dtype_name(self._loss.dtype)
            record.value = float(self._loss)
        return record


def _read_state(optimizer: Optimizer) -> list[OptimizerStateRecord]:
    records: dict[tuple[str, str], OptimizerStateRecord] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                dtype = dtype_name(value.dtype)
                record = records.setdefault((key, dtype), OptimizerStateRecord(key, dtype, 0, 0))
                record.tensors += 1
                record.numel += _local_numel(value)
    return list(records.values())


def _local_numel(tensor: torch.Tensor) -> int:
    to_local = getattr(tensor, "to_local", None)  # a DTensor's own share
    return int((to_local() if to_local is not None else tensor).numel())


def _read_scaler(optimizer: Any) -> ScalerRecord | None:
    """The gradient scaler on accelerate's optimizer wrapper; None where no optimizer was given."""
    if optimizer is None:
        return None
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return ScalerRecord(present=False)
    enabled = bool(scaler.is_enabled())
    return ScalerRecord(True, enabled, float(scaler.get_scale()) if enabled else None)
