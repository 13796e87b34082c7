"""Results of ops on fake tensors, remembered: a model's layers ask for the same shapes again and again.

`FakeTensorMode` has a cache of its own, whose keys cost more than most results (torch 2.14: two thirds of a dry run).
This one serves the plain cases alone: strided tensors in, and out of it new ones or one view of the first argument.
Private names: `FakeTensor`'s constructor and ``.constant``, `unset_fake_temporarily`, read in torch 2.4 to 2.14;
`tests/test_fake_results.py` holds the results against the mode's own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True)
class _Known:
    """What to make next time: the tensors, whether in a tuple, and for a view of the first argument its
    offset in the storage (else -1)."""

    shapes: list[_Shape]
    several: bool = False
    offset: int = -1


class FakeResults:
    """The results of one dry run."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known | None] = {}
        self._kinds: dict[Any, str] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func(*args, **kwargs)`` gives; the op itself runs where that is not known or not plain."""
        kind = self._kind_of(func)
        if kind == "other":
            return func(*args, **kwargs)
        key: list[Any] = [func]
        modes: list[Any] = []
        if not (_add(args, key, modes) and (not kwargs or _add(sorted(kwargs.items()), key, modes)) and modes):
            return func(*args, **kwargs)
        if kind == "view":
            key.append(args[0].storage_offset() if type(args[0]) is FakeTensor else None)
        whole = tuple(key)
        if whole in self._known:
            known = self._known[whole]
            return func(*args, **kwargs) if known is None else _make(modes[0], known, args[0])
        result = func(*args, **kwargs)
        self._known[whole] = _view(result, args[0]) if kind == "view" else _new(result)
        return result

    def _kind_of(self, func: Any) -> str:
        """``new``: makes tensors; ``view``: returns one view of its first argument; ``other``: writes, or anything."""
        kind = self._kinds.get(func)
        if kind is None:
            schema = func._schema
            aliases = [r.alias_info for r in schema.returns]
            if func.namespace != "aten" or schema.is_mutable:
                kind = "other"
            elif not any(aliases):
                kind = "new"
            else:
                one = len(aliases) == 1 and str(schema.returns[0].type) == "Tensor"
                kind = "view" if one and schema.arguments[0].alias_info is not None else "other"
            self._kinds[func] = kind
        return kind


def _add(values: Any, key: list[Any], modes: list[Any]) -> bool:
    """Add to the key everything of these arguments that a result depends on; False where one is not plain."""
    for value in values:
        if type(value) is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return False
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
            modes.append(value.fake_mode)
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            if not _add(value, key, modes):
                return False
        elif isinstance(value, _PLAIN):
            key.extend((type(value), value))  # 1, 1.0 and True are one key, and three results
        else:
            return False
    return True


def _shape(t: FakeTensor) -> _Shape:
    return t.shape, t.stride(), t.dtype, t.fake_device


def _is_plain(t: Any) -> bool:
    return type(t) is FakeTensor and t.layout is torch.strided and t.constant is None


def _new(result: Any) -> _Known | None:
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(_is_plain(t) and not t.storage_offset() for t in tensors):
        return None
    return _Known([_shape(t) for t in tensors], isinstance(result, tuple))


def _view(result: Any, source: Any) -> _Known | None:
    same = _is_plain(result) and result.untyped_storage()._cdata == source.untyped_storage()._cdata
    return _Known([_shape(result)], offset=result.storage_offset()) if same else None


def _make(mode: Any, known: _Known, source: Any) -> Any:
    storage = None if known.offset < 0 else source.untyped_storage()
    with unset_fake_temporarily():
        metas = []
        for shape, stride, dtype, _ in known.shapes:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            metas.append(meta if storage is None else meta.set_(storage, known.offset, shape, stride))
    made = tuple(FakeTensor(mode, meta, shape[3]) for meta, shape in zip(metas, known.shapes, strict=True))
    return made if known.several else made[0]
