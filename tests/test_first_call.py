"""`BeforeFirstCall`: once, on the sharded model, ahead of FSDP2's own hooks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules import module as modules

from hf_fsdp_amp.first_call import BeforeFirstCall
from hf_fsdp_amp.param_dtypes import pin_fp32

HOOKS = modules._global_forward_pre_hooks


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_it_runs_before_fsdp_fixes_its_dtypes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    calls: list[nn.Module] = []

    def pin(found: nn.Module) -> None:
        calls.append(found)
        pin_fp32(found, ["0.weight", "0.bias"])

    before = len(HOOKS)
    BeforeFirstCall(model, pin)
    nn.Linear(2, 2)(torch.ones(1, 2))
    model(torch.ones(1, 4))  # not sharded yet
    assert calls == []
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    model[1].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    assert calls == [model]
    assert seen[:2] == [torch.float32, torch.bfloat16]
    assert len(HOOKS) == before


def test_it_goes_with_the_model_or_when_cancelled() -> None:
    before = len(HOOKS)
    model = nn.Linear(2, 2)
    first = BeforeFirstCall(model, lambda m: None)
    first.cancel()
    assert len(HOOKS) == before
    BeforeFirstCall(model, lambda m: None)
    assert len(HOOKS) == before + 1
    del model
    gc.collect()
    assert len(HOOKS) == before
