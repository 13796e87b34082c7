"""What is read off a model and its output: records of its parameters and buffers, the loss, the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .policy import dtype_name
from .recorder import Recorder, largest_floating, tensors_in
from .trace import BufferRecord, LogitsRecord, ParameterRecord


def read_parameters(
    model: nn.Module, recorder: Recorder
) -> tuple[dict[int, list[tuple[str, str]]], dict[str, ParameterRecord]]:
    """Records of all parameters by clean name, and per module (by id) the local and clean names of its own."""
    names: dict[int, list[tuple[str, str]]] = {}
    records: dict[str, ParameterRecord] = {}
    first_name: dict[int, str] = {}
    units = {path for path, module in recorder.modules.items() if module.is_unit}
    for module in model.modules():
        path = recorder.path_of(module)
        for local, parameter in module.named_parameters(recurse=False):
            name = first_name.setdefault(id(parameter), f"{path}.{local}".lstrip("."))
            names.setdefault(id(module), []).append((local, name))
            if name not in records:
                records[name] = ParameterRecord(
                    name,
                    recorder.modules[path].cls,
                    tuple(parameter.shape),
                    parameter.numel(),
                    parameter.requires_grad,
                    dtype_name(parameter.dtype),
                    unit=_unit_of(path, units),
                )
    return names, records


def _unit_of(path: str, units: set[str]) -> str | None:
    while path not in units:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def read_buffers(
    model: nn.Module, recorder: Recorder
) -> tuple[dict[int, list[tuple[str, str]]], dict[str, BufferRecord]]:
    names: dict[int, list[tuple[str, str]]] = {}
    records: dict[str, BufferRecord] = {}
    for module in model.modules():
        path = recorder.path_of(module)
        for local, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{local}".lstrip(".")
            names.setdefault(id(module), []).append((local, name))
            record = BufferRecord(name, recorder.modules[path].cls, tuple(buffer.shape), dtype_name(buffer.dtype))
            records.setdefault(name, record)
    return names, records


def find_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        candidates = [output] if isinstance(output, torch.Tensor) else tensors_in(output)[:1]
        loss = next((t for t in candidates if t.dim() == 0 and t.is_floating_point()), None)
    # a copy: the Trainer scales its loss in place afterwards (by the ranks, for num_items_in_batch; 4.46 to 5.24)
    return loss.detach().clone() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def find_logits(output: Any, recorder: Recorder) -> LogitsRecord | None:
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    logits = named if isinstance(named, torch.Tensor) else largest_floating(output)
    if logits is None or logits.dim() < 2:
        return None
    shape, given = tuple(logits.shape), dtype_name(logits.dtype)
    makers = [m for m in recorder.modules.values() if m.path and m.output_shape == shape and m.outputs_made]
    maker = makers[-1] if makers else recorder.modules[""]
    made = maker.outputs_made[0] if maker.outputs_made else given
    copies = {made, given}
    size = sum(logits.numel() * (2 if dtype in ("bf16", "fp16") else logits.element_size()) for dtype in copies)
    return LogitsRecord(given, made, maker.path, shape, size)
