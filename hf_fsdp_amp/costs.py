"""What a policy costs: bytes that are all-gathered, by formula."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from .param_dtypes import canonical_name


def gathered_bytes(model: nn.Module, dtype: torch.dtype, fp32_names: Collection[str], world_size: int = 1) -> int:
    """Bytes that each rank receives when every parameter is all-gathered once under FSDP2.

    FSDP2 shards dimension 0 and pads it to a multiple of the ranks (torch 2.4 to 2.14). A training step gathers once
    in the forward and, where units are resharded after it, once more in the backward.

    Args:
        model: the model before or after sharding.
        dtype: the unit's `param_dtype`.
        fp32_names: names of the parameters that are gathered as they are stored, trainable ones in fp32.
        world_size: ranks that share the parameters.
    """
    total = 0
    for name, parameter in model.named_parameters():
        stored = torch.float32 if parameter.requires_grad and parameter.is_floating_point() else parameter.dtype
        kept = canonical_name(name) in fp32_names or not parameter.is_floating_point()
        total += padded_numel(parameter.shape, world_size) * (stored if kept else dtype).itemsize
    return total


def padded_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of a parameter sharded on dimension 0 over `world_size` ranks, with the padding."""
    if not shape:
        return world_size
    return math.ceil(shape[0] / world_size) * world_size * math.prod(shape[1:])
