"""`finish_output`: which outputs become fp32, and that structure, types, aliasing and gradients survive it."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_fsdp_amp.outputs import find_loss, finish_output, to_fp32

HALF = torch.bfloat16


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=HALF)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Any
    hidden: Any = None


def test_training_with_own_loss_keeps_everything_else() -> None:
    output = CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=half(2, 3))
    assert finish_output(output, "auto", training=True) is output


def test_half_loss_becomes_fp32_alone() -> None:
    output = CausalLMOutputWithPast(loss=half(), logits=half(2, 3))
    finished = finish_output(output, "auto", training=True)
    assert type(finished) is CausalLMOutputWithPast
    assert finished.loss.dtype is finished["loss"].dtype is torch.float32
    assert finished.logits is output.logits
    assert output.loss.dtype is HALF  # nobody else's reference changes


@pytest.mark.parametrize("training", [True, False])
def test_without_a_loss_everything_is_fp32(training: bool) -> None:
    output = CausalLMOutputWithPast(logits=half(2, 3), hidden_states=(half(1), half(2)))
    finished = finish_output(output, "auto", training)
    assert finished.logits.dtype is torch.float32
    assert [h.dtype for h in finished.hidden_states] == [torch.float32] * 2
    assert finished.loss is None


def test_evaluation_is_fp32_even_with_a_loss() -> None:
    finished = finish_output(CausalLMOutputWithPast(loss=half(), logits=half(2)), "auto", training=False)
    assert finished.loss.dtype is finished.logits.dtype is torch.float32


def test_explicit_output_dtypes() -> None:
    output = CausalLMOutputWithPast(loss=half(), logits=half(2))
    assert finish_output(output, "none", training=False) is output
    assert finish_output(output, "fp32", training=True).logits.dtype is torch.float32


def test_decoding_caches_are_left_alone() -> None:
    cache = DynamicCache()
    legacy = ((half(1), half(1)),)
    finished = to_fp32(CausalLMOutputWithPast(logits=half(2), past_key_values=cache))
    assert finished.past_key_values is cache
    assert to_fp32({"logits": half(1), "past_key_values": legacy})["past_key_values"] is legacy


def test_tuple_output_with_a_loss_first() -> None:
    finished = finish_output((half(), half(2, 3)), "auto", training=True)
    assert [x.dtype for x in finished] == [torch.float32, HALF]
    assert all(x.dtype is torch.float32 for x in finish_output((half(2, 3), half(2)), "auto", training=True))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ({"loss": half(4)}, True),
        ({"loss": None, "logits": half(2)}, False),
        ((half(), half(2)), True),
        ((half(2),), False),
        ((torch.tensor(1),), False),
        ((), False),
        (Frozen(half()), True),
        (half(), False),
        (None, False),
    ],
)
def test_find_loss(output: Any, found: bool) -> None:
    assert (find_loss(output)[1] is not None) is found


def test_bare_scalar_is_fp32() -> None:
    assert finish_output(half(), "auto", training=True).dtype is torch.float32


def test_integers_doubles_and_objects_pass() -> None:
    output = {
        "ids": torch.ones(2, dtype=torch.int64),
        "double": torch.ones(2, dtype=torch.float64),
        "x": object(),
        "n": None,
    }
    assert to_fp32(output) is output


def test_types_of_containers() -> None:
    ordered = collections.OrderedDict(a=half(1), b=1)
    finished = to_fp32([ordered, Pair(half(1), 2), MappingProxyType({"a": half(1)}), Frozen(half(1)), [half(1)]])
    assert [type(x) for x in finished] == [collections.OrderedDict, Pair, MappingProxyType, Frozen, list]
    assert finished[0]["a"].dtype is finished[1].a.dtype is finished[2]["a"].dtype is torch.float32
    assert finished[3].loss.dtype is finished[4][0].dtype is torch.float32
    assert ordered["a"].dtype is HALF


def test_struct_sequence() -> None:
    finished = to_fp32(torch.max(half(2, 3), dim=1))
    assert type(finished) is torch.return_types.max
    assert finished.values.dtype is torch.float32


def test_gradients_flow_back_in_the_models_dtype() -> None:
    leaf = half(3).requires_grad_()
    to_fp32((leaf * 2,))[0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype is HALF
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def leaves() -> st.SearchStrategy[Any]:
    shared = half(2)
    tensors = [shared, half(1), torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.float16)]
    return st.sampled_from([*tensors, None, 3, "text"])


nested = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Frozen(*pair)),
        inner.map(lambda x: CausalLMOutputWithPast(logits=x)),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(nested)
def test_any_nested_output_keeps_structure_and_aliasing(output: Any) -> None:
    seen: dict[int, Any] = {}
    check_same(output, to_fp32(output), seen)


def check_same(before: Any, after: Any, seen: dict[int, Any]) -> None:
    assert type(before) is type(after)
    if isinstance(before, torch.Tensor):
        low = before.dtype in (torch.bfloat16, torch.float16)
        assert after.dtype is (torch.float32 if low else before.dtype)
        assert torch.equal(before.to(after.dtype), after)
        assert seen.setdefault(id(before), after) is after
    elif isinstance(before, dict):
        assert list(before) == list(after)
        for key in before:
            check_same(before[key], after[key], seen)
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            check_same(a, b, seen)
    elif dataclasses.is_dataclass(before):
        for f in dataclasses.fields(before):
            check_same(getattr(before, f.name), getattr(after, f.name), seen)
    else:
        assert before is after
