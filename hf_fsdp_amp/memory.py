"""Bytes that a step holds on each rank, by formula and from its trace."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .costs import padded_numel
from .fake_fsdp import training_dtype
from .policy import PrecisionPolicy
from .trace import LogitsRecord, MemoryRecord

_MOMENTS = 2  # AdamW's


def memory_of_step(
    parameters: Iterable[torch.Tensor],
    logits: LogitsRecord | None,
    policy: PrecisionPolicy,
    world_size: int,
    saved: int,
    residual: int,
) -> MemoryRecord:
    """What one rank holds, in bytes.

    Args:
        parameters: the model's, each once.
        logits: the trace's record of them.
        policy: the policy.
        world_size: ranks that share the parameters.
        saved: held when the forward ended.
        residual: outputs of all blocks.
    """
    record = MemoryRecord(saved=saved, residual=residual, logits=logits.bytes if logits is not None else 0)
    for parameter in parameters:
        numel = parameter.numel()
        if policy.fsdp_version:
            numel = padded_numel(parameter.shape, world_size) // world_size
        size = numel * training_dtype(parameter).itemsize
        record.parameters += size
        if parameter.requires_grad:
            record.gradients += size
            record.optimizer += _MOMENTS * size
    return record
