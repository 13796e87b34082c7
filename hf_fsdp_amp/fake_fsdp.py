"""What FSDP does to a model's numbers, on fake tensors: parameter dtypes, casts at unit boundaries, collectives.

Nothing is sharded: gathered parameters and what is sent are what dtypes depend on, and both follow from the units
(`planned_units`). `tests/distributed/test_dryrun.py` holds it against real FSDP1 and FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from .costs import padded_numel
from .fake_parameters import FakeParameters
from .param_dtypes import canonical_name
from .planned_units import PlannedUnit
from .policy import PrecisionPolicy, dtype_name
from .trace import CollectiveRecord

_BUCKET = 25 * 2**20  # DDP's `bucket_cap_mb` (torch 2.4 to 2.14)


def training_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What a parameter is stored in: accelerate keeps trainable ones in fp32 in mixed precision, frozen as loaded."""
    return torch.float32 if parameter.requires_grad and parameter.is_floating_point() else parameter.dtype


def compute_dtypes(model: nn.Module, policy: PrecisionPolicy, fp32_names: Collection[str]) -> dict[int, torch.dtype]:
    """Dtype of every parameter inside its module's forward, by the parameter's id.

    Args:
        model: the model before sharding.
        policy: the policy; `fsdp_version` 0 shards nothing.
        fp32_names: parameters that FSDP2 gathers as they are stored.
    """
    dtypes = {id(p): training_dtype(p) for p in model.parameters()}
    if policy.fsdp_version == 0 or policy.param_dtype is None:
        return dtypes
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if canonical_name(name) in fp32_names}
    if policy.fsdp_version == 1:  # FSDP1 wraps batch norms alone, without mixed precision
        kept |= {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
    floating = (p for p in model.parameters() if p.is_floating_point() and id(p) not in kept)
    return {**dtypes, **{id(p): policy.param_dtype for p in floating}}


class Boundaries:
    """The casts that FSDP makes where units begin and end, as hooks.

    FSDP2 (torch 2.4 to 2.14): each unit casts floating inputs to its `param_dtype` where `cast_forward_inputs` is set,
    and outputs to `output_dtype`, every module of a unit that several share (2.14; before, its first and last).
    FSDP1: the root casts its inputs to `param_dtype` (`cast_root_forward_inputs`, on by default), others only where
    `cast_forward_inputs` is set; batch norms run in fp32, with casts around them.

    Args:
        model: the model.
        policy: the policy.
        units: where FSDP shards.
        fakes: gathered where a unit begins, and released where a unit ends that is resharded.
    """

    def __init__(
        self, model: nn.Module, policy: PrecisionPolicy, units: list[PlannedUnit], fakes: FakeParameters
    ) -> None:
        self._handles: list[RemovableHandle] = []
        self._fakes = fakes
        for unit in units:
            self._unit(unit, policy)
        if policy.fsdp_version == 1 and policy.param_dtype is not None:
            self._fsdp1(model, policy, units)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _unit(self, unit: PlannedUnit, policy: PrecisionPolicy) -> None:
        waiting: set[nn.Module] = set()
        is_fsdp2 = policy.fsdp_version == 2
        cast_inputs = policy.param_dtype if is_fsdp2 and policy.cast_forward_inputs else None
        cast_output = policy.output_dtype if is_fsdp2 else None

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not waiting:
                waiting.update(unit.modules)
                self._fakes.gather(unit.parameters.values())
            return (args, kwargs) if cast_inputs is None else _cast_all((args, kwargs), cast_inputs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            waiting.discard(module)
            if not waiting and unit.resharded:
                self._fakes.release(unit.parameters.values())
            return output if cast_output is None else _cast_all(output, cast_output)

        for module in unit.modules:
            self._hook(module, before, after)

    def _fsdp1(self, model: nn.Module, policy: PrecisionPolicy, units: list[PlannedUnit]) -> None:
        low: Any = policy.param_dtype

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return _cast_all((args, kwargs), low)

        everywhere = policy.cast_forward_inputs and policy.preset != "stock"
        if policy.cast_forward_inputs:
            self._hook(model, before, None)
        for unit in units:
            for module in unit.modules:
                if everywhere and module is not model:
                    self._hook(module, before, None)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                self._batch_norm(module)

    def _batch_norm(self, module: nn.Module) -> None:
        came_in: list[torch.dtype] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            came_in[:] = [args[0].dtype]
            return _cast_all((args, kwargs), torch.float32)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return _cast_all(output, came_in[0])

        self._hook(module, before, after)

    def _hook(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            self._handles.append(module.register_forward_hook(after))


def _cast_all(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(partial(_cast, dtype), value)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not dtype
    return value.to(dtype) if floating else value


def collectives_of_step(
    model: nn.Module,
    policy: PrecisionPolicy,
    units: list[PlannedUnit],
    dtypes: dict[int, torch.dtype],
    world_size: int,
    backward: bool = True,
) -> list[CollectiveRecord]:
    """What one training step sends, by formula: all-gathers and reductions, unit by unit.

    Args:
        model: the model before sharding.
        policy: the policy; version 0 with more than one rank is DDP.
        units: where FSDP shards.
        dtypes: as `compute_dtypes` gives them.
        world_size: ranks.
        backward: whether the step has one.
    """
    if policy.fsdp_version == 0:
        return _ddp_collectives(model, world_size) if backward and world_size > 1 else []
    records = []
    for unit in units:
        if unit.parameters:
            records += _unit_collectives(unit, policy, dtypes, world_size, backward)
    return records


def _unit_collectives(
    unit: PlannedUnit, policy: PrecisionPolicy, dtypes: dict[int, torch.dtype], ranks: int, backward: bool
) -> list[CollectiveRecord]:
    path = unit.paths[0]
    numels = {id(p): _numel(p, policy, ranks) for p in unit.parameters.values()}
    size = sum(numels[key] * dtypes[key].itemsize for key in numels)
    kinds = {dtype_name(dtypes[key]) for key in numels}
    wire = kinds.pop() if len(kinds) == 1 else "uint8"
    gather = "c10d._allgather_base_.default"
    records = [CollectiveRecord("all_gather", gather, wire, path, "forward", 1, size, ranks)]
    trained = [p for p in unit.parameters.values() if p.requires_grad]
    if not backward:
        return records
    if unit.resharded:
        records.append(CollectiveRecord("all_gather", gather, wire, path, "backward", 1, size, ranks))
    if trained:
        dtype = policy.reduce_dtype or dtypes[id(trained[0])]
        size = sum(numels[id(p)] for p in trained) * dtype.itemsize
        op = "c10d._reduce_scatter_base_.default"
        records.append(CollectiveRecord("reduce_scatter", op, dtype_name(dtype), path, "backward", 1, size, ranks))
    return records


def _numel(parameter: torch.Tensor, policy: PrecisionPolicy, ranks: int) -> int:
    """FSDP2 pads dimension 0; FSDP1 the unit's flat parameter, by less than an element a rank, which is left out."""
    return padded_numel(parameter.shape, ranks) if policy.fsdp_version == 2 else parameter.numel()


def _ddp_collectives(model: nn.Module, ranks: int) -> list[CollectiveRecord]:
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            dtype = training_dtype(parameter)
            sizes[dtype_name(dtype)] = sizes.get(dtype_name(dtype), 0) + parameter.numel() * dtype.itemsize
    op = "c10d.allreduce_.default"
    return [
        CollectiveRecord("all_reduce", op, dtype, "", "backward", -(-size // _BUCKET), size, ranks)
        for dtype, size in sizes.items()
    ]
