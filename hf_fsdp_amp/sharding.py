"""Apply a policy to FSDP1 and FSDP2, and read back what a sharded model really has.

The only file that touches FSDP's internals, read in torch 2.4 to 2.14: FSDP2's ``FSDPState._mp_policy`` and
``FSDPParamGroup.mp_policy``; FSDP1's ``FlatParamHandle._reduce_dtype``, ``._low_prec_reduce_dtype_specified``,
``FullyShardedDataParallel._is_root`` and ``MixedPrecision._module_classes_to_ignore``. `tests/test_sharding.py` fails
when one of them moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from .policy import PrecisionPolicy, dtype_name

try:  # public since torch 2.6
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule, MixedPrecisionPolicy

_PLUGIN_MARK = "_hf_fsdp_amp_policy"


@dataclass(frozen=True)
class UnitPolicy:
    """What one FSDP unit is set to.

    Args:
        name: module path of the unit, ``""`` for the root.
        fsdp_version: 1 or 2.
        param_dtype, reduce_dtype, output_dtype, buffer_dtype: as in `PrecisionPolicy`; None where not set.
        cast_forward_inputs: whether floating inputs are cast to `param_dtype` at this unit's boundary.
        has_run: whether the unit has run a forward, after which FSDP has fixed its dtypes and buffers.
    """

    name: str
    fsdp_version: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    cast_forward_inputs: bool
    has_run: bool


def to_torch_policy(policy: PrecisionPolicy) -> Any:
    """The policy as torch's `MixedPrecision` (FSDP1) or `MixedPrecisionPolicy` (FSDP2).

    Raises:
        ValueError: the policy is for no FSDP.
    """
    if policy.fsdp_version == 1:
        return MixedPrecision(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            buffer_dtype=policy.buffer_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
            cast_root_forward_inputs=policy.cast_forward_inputs,
        )
    if policy.fsdp_version == 2:
        return MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            output_dtype=policy.output_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
    raise ValueError("there is no FSDP policy to make for fsdp_version=0.")


def stock_policy(fsdp_version: int, dtype: torch.dtype) -> Any:
    """What the installed accelerate sets for a training dtype, as its own plugin says.

    Seen: FSDP1 (0.23 to 1.16): parameters, reduction and buffers in `dtype`. FSDP2: parameters, reduction and output
    (1.6 to 1.15), parameters and reduction (1.16).
    """
    plugin: Any = object.__new__(FullyShardedDataParallelPlugin)  # the constructor reads and sets the environment
    plugin.fsdp_version = fsdp_version
    plugin.mixed_precision_policy = None
    plugin.set_mixed_precision(dtype_name(dtype))
    return plugin.mixed_precision_policy


def set_plugin_policy(plugin: Any, policy: PrecisionPolicy) -> bool:
    """Put the policy on accelerate's FSDP plugin, before the model is sharded.

    Args:
        plugin: an accelerate `FullyShardedDataParallelPlugin`.
        policy: the policy; its `fsdp_version` must be the plugin's.

    Returns:
        False, with nothing changed, where the plugin carries a policy of the user's own. One that equals
        accelerate's stock policy cannot be told from it and counts as stock.
    """
    current = plugin.mixed_precision_policy
    ours = current is not None and current is getattr(plugin, _PLUGIN_MARK, None)
    if current is not None and not ours and current != stock_policy(policy.fsdp_version, policy.dtype):
        return False
    plugin.mixed_precision_policy = to_torch_policy(policy)
    setattr(plugin, _PLUGIN_MARK, plugin.mixed_precision_policy)
    return True


def users_unit_policy(model: nn.Module, policy: PrecisionPolicy) -> UnitPolicy | None:
    """The root unit's policy where the user chose it for a model that came sharded; None where nobody did.

    Nobody chose torch's default (all None), transformers' `fsdp_mixed_precision` (bf16, fp32 reduction; 5.24),
    accelerate's stock policy, or `policy` itself.
    """
    unit = read_units(model)[0]
    dtypes = (unit.param_dtype, unit.reduce_dtype, unit.output_dtype, unit.buffer_dtype)
    nobodys: set[tuple[Any, ...]] = {(None, None, None, None), (torch.bfloat16, torch.float32, None, None)}
    if policy.fsdp_version:
        own = custom_policy(stock_policy(policy.fsdp_version, policy.dtype), policy)
        nobodys.add((own.param_dtype, own.reduce_dtype, own.output_dtype, own.buffer_dtype))
    return None if dtypes in nobodys or _agrees(unit, policy) else unit


def custom_policy(own: Any, policy: PrecisionPolicy) -> PrecisionPolicy:
    """`policy` with its FSDP part replaced by a user's own `MixedPrecision`, `MixedPrecisionPolicy` or `UnitPolicy`."""
    low = own.param_dtype in (torch.bfloat16, torch.float16)
    return PrecisionPolicy(
        preset="custom",
        dtype=policy.dtype,
        fsdp_version=policy.fsdp_version,
        device_type=policy.device_type,
        param_dtype=own.param_dtype,
        reduce_dtype=own.reduce_dtype,
        output_dtype=getattr(own, "output_dtype", None),
        buffer_dtype=getattr(own, "buffer_dtype", None),
        cast_forward_inputs=own.cast_forward_inputs,
        autocast=policy.autocast,
        cache_enabled=low,
    )


def read_units(model: nn.Module) -> list[UnitPolicy]:
    """The policy of every FSDP unit in the model, in `named_modules` order; empty where nothing is sharded."""
    units: list[UnitPolicy] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            units.append(_read_fsdp1(name, module))
        elif isinstance(module, FSDPModule):
            state = _fsdp2_state(module)
            if id(state) not in seen:  # one state may serve a group of modules
                seen.add(id(state))
                units.append(_read_fsdp2(name, state))
    return units


def fsdp2_states(model: nn.Module) -> list[tuple[Any, list[Any]]]:
    """FSDP2's state objects in the model with the parameter groups of each, one entry per state, root first."""
    states: dict[int, tuple[Any, list[Any]]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _fsdp2_state(module)
            states.setdefault(id(state), (state, _fsdp2_groups(state)))
    return list(states.values())


def mend_units(model: nn.Module, policy: PrecisionPolicy) -> list[str]:
    """Bring the units of an already sharded model to `policy`.

    For models sharded before the policy could be set: by transformers' `DistributedConfig`, by an own
    `fully_shard`, or by a Trainer that got the callback too late.

    Args:
        model: the sharded model.
        policy: what every unit shall have.

    Returns:
        Names of the units that were changed.

    Raises:
        RuntimeError: a unit has already run a forward with another gather or buffer dtype; nothing is changed.
    """
    exempt = {name for name, module in model.named_modules() if _is_exempt(module)}
    wrong = [unit for unit in read_units(model) if unit.name not in exempt and not _agrees(unit, policy)]
    for unit in wrong:
        moved = unit.param_dtype != policy.param_dtype or (
            unit.fsdp_version == 1 and unit.buffer_dtype != policy.buffer_dtype
        )
        if unit.has_run and moved:
            name = unit.name or "(root)"
            raise RuntimeError(
                f"FSDP unit {name!r} already ran with parameters in {dtype_name(unit.param_dtype)} and buffers in "
                f"{dtype_name(unit.buffer_dtype)}, where {policy.describe()} was asked: pass "
                "callbacks=[FSDPAutocast()] to the Trainer's constructor, before the model is sharded."
            )
    torch_policy = to_torch_policy(policy) if wrong else None
    names = {unit.name for unit in wrong}
    for name, module in model.named_modules():
        if name not in names:
            continue
        if isinstance(module, FullyShardedDataParallel):
            _set_fsdp1(module, torch_policy)
        else:
            _set_fsdp2(module, torch_policy)
    return [unit.name for unit in wrong]


def _agrees(unit: UnitPolicy, policy: PrecisionPolicy) -> bool:
    same = (unit.param_dtype, unit.reduce_dtype) == (policy.param_dtype, policy.reduce_dtype)
    if unit.fsdp_version == 1:
        same = same and unit.buffer_dtype == policy.buffer_dtype
    else:
        same = same and unit.output_dtype == policy.output_dtype
    return same and unit.cast_forward_inputs == policy.cast_forward_inputs


def _is_exempt(module: nn.Module) -> bool:
    """Whether FSDP1 wrapped it alone to keep it out of mixed precision: batch norms, which no kernel runs in bf16."""
    ignored = tuple(MixedPrecision()._module_classes_to_ignore)
    return isinstance(module, FullyShardedDataParallel) and isinstance(module.module, ignored)


def _fsdp2_state(module: Any) -> Any:
    return module._get_fsdp_state()


def _fsdp2_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.13
    if groups is None:
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return groups


def _read_fsdp2(name: str, state: Any) -> UnitPolicy:
    mp = state._mp_policy
    return UnitPolicy(
        name=name,
        fsdp_version=2,
        param_dtype=mp.param_dtype,
        reduce_dtype=mp.reduce_dtype,
        output_dtype=mp.output_dtype,
        buffer_dtype=None,
        cast_forward_inputs=mp.cast_forward_inputs,
        has_run=state._is_root is not None,
    )


def _read_fsdp1(name: str, module: FullyShardedDataParallel) -> UnitPolicy:
    mp = module.mixed_precision
    return UnitPolicy(
        name=name,
        fsdp_version=1,
        param_dtype=mp.param_dtype,
        reduce_dtype=mp.reduce_dtype,
        output_dtype=None,
        buffer_dtype=mp.buffer_dtype,
        cast_forward_inputs=mp.cast_forward_inputs,
        has_run=module._is_root is not None,
    )


def _set_fsdp2(module: nn.Module, torch_policy: Any) -> None:
    state = _fsdp2_state(module)
    state._mp_policy = torch_policy
    for group in _fsdp2_groups(state):
        group.mp_policy = torch_policy
        if state._is_root is not None:  # dtypes are fixed at the first forward; do it anew
            group._init_mp_dtypes()


def _set_fsdp1(module: FullyShardedDataParallel, torch_policy: Any) -> None:
    module.mixed_precision = torch_policy
    handle = module._handle
    if handle is None:
        return
    handle._fwd_bwd_param_dtype = torch_policy.param_dtype or handle._orig_param_dtype
    handle._reduce_dtype = torch_policy.reduce_dtype or handle._orig_param_dtype
    handle._low_prec_param_dtype_specified = torch_policy.param_dtype is not None
    handle._low_prec_reduce_dtype_specified = torch_policy.reduce_dtype is not None
