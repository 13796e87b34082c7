"""`pin_fp32` on FSDP2 with one rank; fails when one of the private attributes that it uses moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_fsdp_amp.param_dtypes import canonical_name, pin_fp32

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Looking(nn.Sequential):
    """Notes the dtype of each layer's weight while the forward runs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [layer.weight.dtype for layer in self]
        return super().forward(x)


def sharded(reduce_dtype: torch.dtype = FP32) -> Looking:
    torch.manual_seed(0)
    model = Looking()
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype, cast_forward_inputs=False))


def step(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        output = model(torch.ones(3, 4))
    output.float().sum().backward()
    return output


def test_pinned_parameters_are_gathered_as_stored() -> None:
    model = sharded()
    assert pin_fp32(model, {"1.weight", "1.bias", "nowhere"}) == ["1.weight", "1.bias"]
    step(model)
    assert model.dtypes == [BF16, FP32]
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())


def test_without_pins_nothing_is_touched() -> None:
    model = sharded()
    assert pin_fp32(model, set()) == []
    step(model)
    assert model.dtypes == [BF16, BF16]


def test_pins_can_be_replaced_before_the_first_forward() -> None:
    model = sharded()
    pin_fp32(model, {"1.weight"})
    pin_fp32(model, {"0.weight"})
    step(model)
    assert model.dtypes == [FP32, BF16]


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
def test_gradients_without_sync_add_up(reduce_dtype: torch.dtype) -> None:
    model, once = sharded(reduce_dtype), sharded(reduce_dtype)
    for each in (model, once):
        pin_fp32(each, {"1.weight"})
    step(once)
    model.set_requires_gradient_sync(False)
    step(model)
    model.set_requires_gradient_sync(True)
    step(model)
    for a, b in zip(model.parameters(), once.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad.full_tensor(), 2 * b.grad.full_tensor())


def test_a_gathered_parameter_cannot_change_its_dtype() -> None:
    model = sharded()
    step(model)
    with pytest.raises(RuntimeError, match="'weight' has been gathered in another dtype already"):
        pin_fp32(model, {"1.weight"})


def test_shared_parameter_by_any_of_its_names() -> None:
    torch.manual_seed(0)
    model = Looking()
    model[1].weight = model[0].weight
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False))
    assert "1.weight" in pin_fp32(model, {"1.weight"})
    step(model)
    assert model.dtypes == [FP32, FP32]


def test_canonical_name() -> None:
    assert canonical_name("_orig_mod.a._checkpoint_wrapped_module.b._fsdp_wrapped_module.w") == "a.b.w"
