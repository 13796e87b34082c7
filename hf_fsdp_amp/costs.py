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
    return sum(_bytes(name, p, dtype, fp32_names, world_size) for name, p in model.named_parameters())


def gathered_bytes_per_step(
    model: nn.Module, dtype: torch.dtype, fp32_names: Collection[str], world_size: int = 1
) -> int:
    """Bytes that each rank receives from all-gathers in one training step, sharded as accelerate does it.

    accelerate 1.15 (`fsdp2_prepare_model`): each class in the model's ``_no_split_modules`` is a unit that is
    resharded after the forward and so gathered twice; an embedding that is not tied to the head is another; the
    final norm, the head and a tied embedding, and what is left in the root, stay gathered from forward to backward.

    Args:
        model, dtype, fp32_names, world_size: as in `gathered_bytes`.
    """
    twice = {id(p) for module in _resharded_units(model) for p in module.parameters()}
    extra = [p for p in model.parameters() if id(p) in twice]
    once = gathered_bytes(model, dtype, fp32_names, world_size)
    names = {id(p): name for name, p in model.named_parameters()}
    return once + sum(_bytes(names[id(p)], p, dtype, fp32_names, world_size) for p in extra)


def _resharded_units(model: nn.Module) -> list[nn.Module]:
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in blocks]
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if embedding is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        units.append(embedding)
    return units


def _bytes(name: str, parameter: nn.Parameter, dtype: torch.dtype, fp32_names: Collection[str], world_size: int) -> int:
    stored = torch.float32 if parameter.requires_grad and parameter.is_floating_point() else parameter.dtype
    kept = canonical_name(name) in fp32_names or not parameter.is_floating_point()
    return padded_numel(parameter.shape, world_size) * (stored if kept else dtype).itemsize


def padded_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of a parameter sharded on dimension 0 over `world_size` ranks, with the padding."""
    if not shape:
        return world_size
    return math.ceil(shape[0] / world_size) * world_size * math.prod(shape[1:])
