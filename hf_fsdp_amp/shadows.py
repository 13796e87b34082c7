"""Real values beside fake tensors: small tensors that are no parameters keep a CPU twin, which answers `.item()`.

Masks, positions, lengths and loop bounds are computed for real on the CPU while the model runs on fake tensors. What
rests on data that nobody has (an argmax of activations) is invented, and everything derived from it is marked so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily  # no public name, torch 2.4 to 2.14
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MAX_NUMEL = 2**16
"""Elements above which no twin is kept: 64k cost 0.1 ms an op, the masks that decide control flow are smaller."""

_PICKS = frozenset(
    ("topk", "argmax", "argmin", "sort", "argsort", "max", "min", "median", "mode", "multinomial", "kthvalue")
)


@dataclass
class _Twin:
    value: torch.Tensor
    invented: bool


class Shadows:
    """The twins of one run. In-place ops through views reach the base, for twins alias as their tensors do."""

    def __init__(self) -> None:
        self._twins: Any = WeakIdKeyDictionary()
        self._lost: set[int] = set()  # storages that an op with unknown data wrote to
        self._invented: set[int] = set()

    def set(self, tensor: torch.Tensor, value: torch.Tensor, invented: bool = False) -> None:
        """Give a fake tensor its twin, a CPU tensor of its shape."""
        if value.numel() <= MAX_NUMEL and not value.is_meta:
            self._twins[tensor] = _Twin(value, invented)

    def copy(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Give a fake tensor a copy of a real one as its twin; nothing happens where that has no data."""
        if source.numel() <= MAX_NUMEL and not source.is_meta and not isinstance(source, FakeTensor):
            with unset_fake_temporarily():
                self.set(tensor, source.detach().to("cpu", tensor.dtype, copy=True))

    def get(self, tensor: Any) -> torch.Tensor | None:
        """The twin of a tensor; a real CPU tensor is its own; None where its data is unknown."""
        twin = self._find(tensor)
        return None if twin is None else twin.value

    def is_invented(self, tensor: Any) -> bool:
        """Whether the twin rests on data that was made up."""
        twin = self._find(tensor)
        return twin is not None and twin.invented

    def _find(self, tensor: torch.Tensor) -> _Twin | None:
        if not isinstance(tensor, FakeTensor):
            real = tensor.device.type == "cpu" and tensor.numel() <= MAX_NUMEL
            return _Twin(tensor, False) if real else None
        twin = self._twins.get(tensor)
        if twin is None:
            return None
        storage = _storage(twin.value)
        if storage in self._lost:
            return None
        return _Twin(twin.value, twin.invented or storage in self._invented)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """After an op ran on the fakes: run it on the twins, where all are known and the result is small."""
        results = [result] if isinstance(result, FakeTensor) else _fakes(result)
        if not results or any(t.numel() > MAX_NUMEL for t in results):
            self._forget_written(func, args, kwargs)
            return
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        twins = [self._find(t) for t in given]
        if any(t is None for t in twins) or torch.Tag.nondeterministic_seeded in func.tags:
            self._forget_written(func, args, kwargs)
            self._invent(func, args, kwargs, results)
            return
        if not given and _bare_name(func).startswith(("empty", "rand")):
            return
        invented = any(t is not None and t.invented for t in twins)
        values = self._run(func, args, kwargs)
        if len(values) != len(results):
            self._forget_written(func, args, kwargs)
            return
        for fake, value in zip(results, values, strict=True):
            if invented:
                self._invented.add(_storage(value))
            if not any(fake is t for t in given):
                self.set(fake, value, invented)

    def _run(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """What the op gives for the twins; nothing where CPU cannot run it."""

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.get(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        with unset_fake_temporarily(), torch.no_grad():
            try:
                made = func(*tree_map(real, args), **{k: real(v) for k, v in kwargs.items() if k != "pin_memory"})
            except (RuntimeError, NotImplementedError, IndexError):  # no such kernel on CPU, or made-up positions
                return []
        return [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op wrote unknown data: the twins of what it wrote to say nothing any more."""
        if not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    if isinstance(tensor, FakeTensor) and tensor in self._twins:
                        self._lost.add(_storage(self._twins[tensor].value))

    def _invent(self, func: Any, args: Any, kwargs: Any, results: list[FakeTensor]) -> None:
        """Positions that an op picks out of unknown data: some that are valid, different ones in a row."""
        if _bare_name(func) not in _PICKS:
            return
        bound = _positions(func, args, kwargs)
        for tensor in results:
            if tensor.dtype is torch.int64 and bound:
                with unset_fake_temporarily():
                    value = torch.arange(tensor.numel()).remainder(bound).reshape(tensor.shape)
                self.set(tensor, value, invented=True)


def _positions(func: Any, args: Any, kwargs: Any) -> int:
    """How many positions a picking op chooses from: the length of its dimension, or all elements."""
    source = args[0]
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = given.get("dim", -1 if "dim" in names else None)
    return source.numel() if dim is None or not source.dim() else source.shape[dim]


def _fakes(result: Any) -> list[FakeTensor]:
    return [t for t in tree_leaves(result) if isinstance(t, FakeTensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bare_name(func: Any) -> str:
    return func._schema.name.partition("::")[2]
