"""Answers for ops whose result, or its shape, depends on data that fake tensors don't have.

Where the data is known after all (`Shadows`), the answer is the real one. Where it is not, the answer is a guess, and
every guess is handed to `note`: the report lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily  # no public name, torch 2.4 to 2.14

from .shadows import Shadows

NOT_HANDLED = object()
Note = Callable[[str], None]


def answer(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    """The result of a data-dependent op, or `NOT_HANDLED` for any other.

    Args:
        func: the op.
        args, kwargs: what it is called with, fake tensors among them.
        shadows: the data that is known.
        note: gets one line per guess.
    """
    name = func._schema.name.partition("::")[2]
    handler = _HANDLERS.get(name)
    return NOT_HANDLED if handler is None else handler(func, args, kwargs, shadows, note)


def _scalar(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    tensor = args[0]
    value = shadows.get(tensor)
    if value is not None:
        if shadows.is_invented(tensor):
            note(f"a value that depends on what the model computes was taken as {_item(value)}")
        return _item(value)
    if tensor.dtype is torch.bool:
        note("a condition on what the model computes was taken as false")
        return False
    guess: float | int = 1.0 if tensor.is_floating_point() else 1
    note(f"a number that depends on what the model computes was taken as {guess}")
    return guess


def _equal(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> bool:
    first, second = shadows.get(args[0]), shadows.get(args[1])
    if first is None or second is None:
        note("two tensors that the model computes were taken as equal")
        return True
    with unset_fake_temporarily():
        return bool(torch.equal(first, second))


def _item(value: torch.Tensor) -> Any:
    with unset_fake_temporarily():
        return value.item()


def _nonzero(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> torch.Tensor:
    mask = args[0]
    return _positions_of(mask, shadows, note)


def _positions_of(mask: torch.Tensor, shadows: Shadows, note: Note) -> torch.Tensor:
    """What `nonzero` gives, int64 of shape (count, dims), with a twin of its own where the mask is known."""
    value = shadows.get(mask)
    if value is None:
        note(f"{mask.numel()} positions, the most there can be, were taken for a mask that the model computes")
        return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)
    if shadows.is_invented(mask):
        note("positions that depend on what the model computes (a router's choice, a sampling) were made up")
    real = _real_nonzero(value)
    result = torch.empty(real.shape, dtype=torch.int64, device=mask.device)
    shadows.set(result, real, shadows.is_invented(mask))
    return result


def _real_nonzero(value: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():
        return value.nonzero()


def _masked_select(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> torch.Tensor:
    source, mask = args[0], args[1]
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    count = _positions_of(mask.expand(shape) if mask.shape != shape else mask, shadows, note).shape[0]
    return torch.empty(count, dtype=source.dtype, device=source.device)


def _unique(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    """The unknown case alone: as many different values as there are elements. What is known, runs on its twin."""
    source = args[0]
    value = shadows.get(source)
    count = source.numel()
    if value is None:
        note("all values that a `unique` gets were taken as different")
    else:
        with unset_fake_temporarily():
            count = value.unique().numel()
    indices = torch.empty(source.shape, dtype=torch.int64, device=source.device)
    counts = torch.empty(count, dtype=torch.int64, device=source.device)
    return torch.empty(count, dtype=source.dtype, device=source.device), indices, counts


def _repeat_interleave(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> torch.Tensor:
    repeats = args[0]
    size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
    value = shadows.get(repeats)
    if size is None and value is None:
        note("every element of a `repeat_interleave` was taken to be repeated once")
        size = repeats.numel()
    elif size is None and value is not None:
        with unset_fake_temporarily():
            size = int(value.sum())
    result = torch.empty(size, dtype=torch.int64, device=repeats.device)
    if value is not None:
        with unset_fake_temporarily():
            shadows.set(result, torch.repeat_interleave(value), shadows.is_invented(repeats))
    return result


def _bincount(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> torch.Tensor:
    source = args[0]
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    value = shadows.get(source)
    if value is None:
        note(f"a `bincount` was taken to count {max(least, 1)} values")
        return torch.empty(max(least, 1), dtype=torch.int64, device=source.device)
    with unset_fake_temporarily():
        real = torch.bincount(value, minlength=least)
    result = torch.empty(real.shape, dtype=torch.int64, device=source.device)
    shadows.set(result, real, shadows.is_invented(source))
    return result


def _index(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    """Indexing with a mask: the mask's positions in its place, as the kernels do it."""
    indices = args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NOT_HANDLED
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            expanded.extend(_positions_of(index, shadows, note).unbind(1))
        else:
            expanded.append(index)
    return func(args[0], expanded, *args[2:], **kwargs)


def _ctc_loss(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    """Loss per example and its alignment table, (examples, frames, 2 * targets + 1)."""
    scores, targets = args[0], args[1]
    longest = targets.shape[1] if targets.dim() == 2 else targets.shape[0]
    table = torch.empty(scores.shape[1], scores.shape[0], 2 * longest + 1, dtype=scores.dtype, device=scores.device)
    return torch.empty(scores.shape[1], dtype=scores.dtype, device=scores.device), table


def _grouped_mm(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> torch.Tensor:
    """A grouped matmul: its fake kernel takes bf16 alone (torch 2.13, 2.14).

    2-D by 3-D and 3-D by 2-D: groups of rows by one matrix each. 2-D by 2-D: one result per group.
    """
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    shape = (*a.shape[:-1], b.shape[-1])
    if a.dim() == 2 and b.dim() == 2 and offsets is not None:
        shape = (offsets.shape[0], *shape)
    elif a.dim() == 3 and b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or a.dtype, device=a.device)


def _norm(func: Any, args: Any, kwargs: Any, shadows: Shadows, note: Note) -> Any:
    """CPU's norms keep their statistics in fp32 where weights and input differ; fake ones don't."""
    source, weight = args[0], args[2] if func._schema.name.endswith("layer_norm") else args[1]
    if source.device.type != "cpu" or weight is None or weight.dtype == source.dtype:
        return NOT_HANDLED
    result = func(*args, **kwargs)
    return result[0], *(t.to(torch.float32) for t in result[1:])


_HANDLERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _scalar,
    "equal": _equal,
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "_unique2": _unique,
    "unique_consecutive": _unique,
    "unique_dim": _unique,
    "repeat_interleave": _repeat_interleave,
    "bincount": _bincount,
    "index": _index,
    "index_put": _index,
    "index_put_": _index,
    "_index_put_impl_": _index,
    "_ctc_loss": _ctc_loss,
    "_use_cudnn_ctc_loss": lambda *_: False,
    "_grouped_mm": _grouped_mm,
    "native_layer_norm": _norm,
    "native_group_norm": _norm,
    "native_batch_norm": _norm,
    "_native_batch_norm_legit": _norm,
}
