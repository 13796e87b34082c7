"""The backward walked in Python against torch's engine, on real tensors, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_amp.autograd import in_backward
from hf_fsdp_amp.python_backward import walk_backward
from tests.architectures import build, loss_of, names


@pytest.mark.parametrize("name", ["mpt", "llama", "t5", "mixtral", "resnet", "mamba", "whisper"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_equal_the_engines(name: str, autocast: bool) -> None:
    tiny = build(name, dict(names())[name])
    other = copy.deepcopy(tiny.model)
    for model, backward in ((tiny.model, torch.Tensor.backward), (other, walk_backward)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, tiny.inputs)
        backward(loss)
    expected = {n: p.grad for n, p in tiny.model.named_parameters()}
    assert sum(g is not None for g in expected.values()) > 5
    for parameter_name, parameter in other.named_parameters():
        mine, engines = parameter.grad, expected[parameter_name]
        assert (mine is None) == (engines is None), parameter_name
        assert mine is None or torch.equal(mine, engines), parameter_name
    assert not in_backward()


class _Two(torch.autograd.Function):
    """Two results, of which one may go unused: its gradient then is zeros, not None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        assert in_backward()
        return 2 * first + 3 * second


def test_own_functions_and_broadcasting() -> None:
    weight = nn.Parameter(torch.randn(3))
    gradients = []
    for backward in (torch.Tensor.backward, walk_backward):
        weight.grad = None
        first, _ = _Two.apply(weight)
        loss = (first + torch.ones(4, 3) * weight.to(torch.bfloat16)).sum()
        backward(loss)
        backward((weight * 1).sum())  # added to what is there
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_what_cannot_be_walked_is_refused() -> None:
    for bad in (torch.ones(2, requires_grad=True) * 2, torch.ones(())):
        with pytest.raises(ValueError, match="scalar that has a history"):
            walk_backward(bad)
