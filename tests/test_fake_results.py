"""Remembered results against `FakeTensorMode`'s own: shapes, strides, dtypes, devices, aliasing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_fsdp_amp.fake_results import FakeResults

aten = torch.ops.aten


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as fake:
        yield fake


def facts(result: Any) -> list[Any]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in tensors]


CASES = [
    (aten.mm.default, lambda x: (x, x.t()), {}),
    (aten.add.Tensor, lambda x: (x, 1), {}),
    (aten.add.Tensor, lambda x: (x, 1.5), {"alpha": 2}),
    (aten._to_copy.default, lambda x: (x,), {"dtype": torch.float16}),
    (aten.native_layer_norm.default, lambda x: (x, [4], None, None, 1e-5), {}),
    (aten.cat.default, lambda x: ([x, x], 1), {}),
    (aten.t.default, lambda x: (x,), {}),
    (aten.slice.Tensor, lambda x: (x, 0, 1, 3), {}),
    (aten.view.default, lambda x: (x, [2, 6]), {}),
    (aten.split.Tensor, lambda x: (x, 2), {}),
    (aten.max.dim, lambda x: (x, 1), {}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_are_the_modes_own(mode: FakeTensorMode, case: int) -> None:
    func, arguments, kwargs = CASES[case]
    results = FakeResults()
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32):
        x = torch.empty(3, 4, dtype=dtype)
        args = arguments(x)
        found, own = results.run(func, args, kwargs), func(*args, **kwargs)
        if isinstance(own, list):
            found, own = tuple(found), tuple(own)
        assert facts(found) == facts(own)
        first = found[0] if isinstance(found, tuple) else found
        expected = own[0] if isinstance(own, tuple) else own
        aliases = [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in (first, expected)]
        assert aliases[0] == aliases[1]


def test_equal_numbers_of_other_types_are_other_arguments(mode: FakeTensorMode) -> None:
    results = FakeResults()
    x = torch.empty(2, dtype=torch.int64)
    assert [results.run(aten.mul.Tensor, (x, n), {}).dtype for n in (2, 2.0, True, 2)] == [
        *(torch.int64, torch.float32, torch.int64, torch.int64)
    ]


def test_writing_ops_are_never_remembered(mode: FakeTensorMode) -> None:
    results = FakeResults()
    x = torch.empty(2)
    for _ in range(2):
        assert results.run(aten.add_.Tensor, (x, x), {}) is x


def test_a_view_is_of_its_own_source(mode: FakeTensorMode) -> None:
    results = FakeResults()
    for _ in range(3):
        x = torch.empty(4, 4)
        view = results.run(aten.select.int, (x, 0, 2), {})
        assert isinstance(view, FakeTensor)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view.storage_offset() == 8
