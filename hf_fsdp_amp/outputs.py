"""The dtype of what a patched forward returns: structure, types, aliasing and gradients are kept."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)
# Decoding state goes back into the model as it came out: a copy in fp32 would double it and change its dtype.
_STATE_KEYS = ("past_key_values", "cache_params", "mems", "state")


def finish_output(output: Any, output_dtype: str, training: bool) -> Any:
    """Apply `output_dtype` to a forward's output.

    Args:
        output: what the model returned: a tensor, tuple, list, mapping, dataclass, or nesting of these.
        output_dtype: ``"auto"``, ``"fp32"`` or ``"none"``; see `hf_fsdp_amp.patch_model`.
        training: whether the model is in training mode.

    Returns:
        The same object where nothing changes; else a copy of the containers that hold a changed tensor.
    """
    if output_dtype == "none":
        return output
    if output_dtype == "auto" and training:
        key, loss = find_loss(output)
        if loss is not None:
            return output if loss.dtype not in _HALF else _with_item(output, key, loss.float())
    return to_fp32(output)


def find_loss(output: Any) -> tuple[Any, torch.Tensor | None]:
    """Where the model's own loss is in its output, and the loss: key ``loss``, or a 0-dim first item of a tuple."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
        return "loss", loss if isinstance(loss, torch.Tensor) else None
    if isinstance(output, (tuple, list)):
        first = output[0] if output else None
        return 0, first if isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point() else None
    loss = getattr(output, "loss", None) if dataclasses.is_dataclass(output) else None
    return "loss", loss if isinstance(loss, torch.Tensor) else None


def to_fp32(output: Any) -> Any:
    """`output` with every bf16 and fp16 tensor in fp32, except decoding caches; one copy per distinct tensor."""
    return _to_fp32(output, {})


def _to_fp32(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype not in _HALF:
            return value
        # torch.compile cannot follow id() of a traced tensor; there, an alias costs a second copy
        if torch.compiler.is_compiling():
            return value.float()
        if id(value) not in seen:
            seen[id(value)] = value.float()
        return seen[id(value)]
    if isinstance(value, Mapping):
        items = {k: v if k in _STATE_KEYS else _to_fp32(v, seen) for k, v in value.items()}
        return value if all(items[k] is value[k] for k in items) else _rebuild_mapping(value, items)
    if isinstance(value, (tuple, list)):
        new = [_to_fp32(v, seen) for v in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else _rebuild_sequence(value, new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuild_dataclass(value, seen)
    return value


def _rebuild_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    new = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            new[key] = item  # a ModelOutput sets the attribute of that name as well
    return new


def _rebuild_sequence(value: Any, new: list[Any]) -> Any:
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _rebuild_dataclass(value: Any, seen: dict[int, Any]) -> Any:
    names = [f.name for f in dataclasses.fields(value) if f.name not in _STATE_KEYS and hasattr(value, f.name)]
    new = {name: _to_fp32(getattr(value, name), seen) for name in names}
    if all(new[name] is getattr(value, name) for name in names):
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # also where the dataclass is frozen
    return result


def _with_item(output: Any, key: Any, item: torch.Tensor) -> Any:
    """`output` with its loss replaced, shallow-copied so that nobody else's reference changes."""
    if isinstance(output, Mapping):
        return _rebuild_mapping(output, {**output, key: item})
    if isinstance(output, (tuple, list)):
        return _rebuild_sequence(output, [item, *output[1:]])
    result = copy.copy(output)
    object.__setattr__(result, key, item)
    return result
