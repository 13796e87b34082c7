"""`sharding`: policies to and from FSDP1 and FSDP2, on a process group of one rank.

Fails when one of the private attributes that `hf_fsdp_amp/sharding.py` reads or sets moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

from hf_fsdp_amp import cpu, resolve_policy
from hf_fsdp_amp.sharding import (
    custom_policy,
    mend_units,
    read_units,
    set_plugin_policy,
    stock_policy,
    to_torch_policy,
    users_unit_policy,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def _cpu_fsdp() -> Iterator[None]:
    cpu.enable_cpu_fsdp()
    yield
    cpu.disable_cpu_fsdp()


class Scale(nn.Module):
    """Has a floating buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def sharded(version: int, torch_policy: Any = None) -> nn.Module:
    """Two linear layers in a unit of their own each, and a root with a buffer."""
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Scale())
    if version == 2:
        extra = {} if torch_policy is None else {"mp_policy": torch_policy}
        for layer in model[:2]:  # type: ignore[index]
            fully_shard(layer, **extra)
        return fully_shard(model, **extra)
    device = torch.device("cpu")
    for i in range(2):
        model[i] = FullyShardedDataParallel(model[i], mixed_precision=torch_policy, device_id=device)  # type: ignore[index,operator]
    return FullyShardedDataParallel(model, mixed_precision=torch_policy, device_id=device)


@pytest.mark.parametrize("version", [1, 2])
def test_units_have_the_policy_they_were_given(version: int) -> None:
    policy = resolve_policy("amp", "bf16", fsdp_version=version)
    units = read_units(sharded(version, to_torch_policy(policy)))
    assert len(units) == 3
    assert units[0].name == ""
    for unit in units:
        assert unit.fsdp_version == version
        assert (unit.param_dtype, unit.reduce_dtype, unit.output_dtype) == (BF16, FP32, None)
        assert not unit.cast_forward_inputs
        assert not unit.has_run


def test_nothing_sharded_has_no_units() -> None:
    assert read_units(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("run_first", [False, True])
def test_mended_units_compute_and_reduce_as_asked(version: int, run_first: bool) -> None:
    """Stock's gather dtype is ours, so that even a model that has run can be mended."""
    stock = stock_policy(version, BF16)
    if version == 1:
        stock.buffer_dtype = None  # buffers that were rounded cannot be mended; see the next test
    model = sharded(version, stock)
    x = torch.randn(3, 4)
    if run_first:
        model(x).sum().backward()
        model.zero_grad()
    policy = resolve_policy("amp", "bf16", fsdp_version=version)
    assert len(mend_units(model, policy)) == 3
    assert mend_units(model, policy) == []
    assert {u.reduce_dtype for u in read_units(model)} == {FP32}
    assert {u.has_run for u in read_units(model)} == {run_first}
    with torch.autocast("cpu", BF16):
        output = model(x)
    assert output.dtype is FP32  # bf16 activations times the fp32 buffer
    output.float().sum().backward()
    assert all(p.grad.dtype is FP32 for p in model.parameters() if p.grad is not None)


def test_fsdp1_buffers_that_were_rounded_are_refused() -> None:
    model = sharded(1, stock_policy(1, BF16))
    model(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="already ran with parameters in bf16 and buffers in bf16"):
        mend_units(model, resolve_policy("amp", "bf16", fsdp_version=1))
    assert {u.reduce_dtype for u in read_units(model)} == {BF16}


def test_fsdp2_gather_dtype_cannot_change_after_a_forward() -> None:
    model = sharded(2)
    model(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="already ran with parameters in none"):
        mend_units(model, resolve_policy("amp", "bf16"))


@pytest.mark.parametrize("version", [1, 2])
def test_plugin_policy(version: int, _cpu_fsdp: None) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    policy = resolve_policy("amp", "bf16", fsdp_version=version)
    assert set_plugin_policy(plugin, policy)
    plugin.mixed_precision_policy = None
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == stock_policy(version, BF16), "accelerate's stock policy has changed"
    assert set_plugin_policy(plugin, policy)
    assert plugin.mixed_precision_policy == to_torch_policy(policy)
    assert set_plugin_policy(plugin, resolve_policy("fsdp", "bf16", fsdp_version=version))  # ours may be replaced
    own = MixedPrecision(param_dtype=BF16) if version == 1 else MixedPrecisionPolicy(param_dtype=BF16)
    plugin.mixed_precision_policy = own
    assert not set_plugin_policy(plugin, policy)
    assert plugin.mixed_precision_policy is own


def test_custom_policy() -> None:
    policy = resolve_policy("amp", "bf16")
    custom = custom_policy(MixedPrecisionPolicy(reduce_dtype=FP32, output_dtype=BF16), policy)
    assert (custom.preset, custom.param_dtype, custom.output_dtype, custom.autocast) == ("custom", None, BF16, True)
    assert not custom.cache_enabled  # fp32 gather: the cache would hold a copy of every weight
    assert custom_policy(MixedPrecision(param_dtype=BF16), policy).cache_enabled


def test_users_unit_policy() -> None:
    policy = resolve_policy("amp", "bf16")
    assert users_unit_policy(sharded(2), policy) is None
    assert users_unit_policy(sharded(2, stock_policy(2, BF16)), policy) is None
    assert users_unit_policy(sharded(2, MixedPrecisionPolicy(BF16, FP32)), policy) is None  # transformers' own
    own = users_unit_policy(sharded(2, MixedPrecisionPolicy(BF16, BF16, output_dtype=FP32)), policy)
    assert own is not None
    assert own.reduce_dtype is BF16
