"""Per-parameter gather dtypes under FSDP2: chosen parameters stay in fp32 inside units that gather in bf16 or fp16.

`MixedPrecisionPolicy.param_dtype` speaks for a whole unit, and a unit of its own for the rest would cost a collective
each. FSDP2's all-gather itself carries mixed dtypes (as bytes, for float8), and so does its bookkeeping per
parameter; only its reduce-scatter wants one gradient dtype, the reduction's. So a parameter is pinned where FSDP2
keeps its dtypes, with the same collectives as without.

Private attributes, the only ones used here, read in torch 2.6 to 2.14 (``torch/distributed/fsdp/_fully_shard``):
``FSDPParam.init_dtype_attrs``, ``.param_dtype``, ``.reduce_dtype``, ``.accumulate_unsharded_grad_if_needed``,
``.to_accumulated_grad_if_needed``, ``.unsharded_accumulated_grad``, ``._module_info`` and ``._unsharded_param``, and
``FSDPParamGroup._init_mp_dtypes``. `tests/test_param_dtypes.py` fails when one of them moves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from torch import nn

from .sharding import fsdp2_states

_WRAPPER_NAMES = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def pin_fp32(model: nn.Module, names: Collection[str]) -> list[str]:
    """Gather the named parameters as they are stored, whatever their FSDP2 unit's `param_dtype` is.

    Call it on the sharded model, before its first forward. The gradients of a unit with pinned parameters are cast
    to the reduction's dtype one by one before its reduce-scatter, which would cast them anyway. Calling it again
    replaces the choice.

    Args:
        model: a model sharded by `fully_shard`, compiled, checkpointed or not.
        names: names of parameters as in `model.named_parameters()` before wrapping; a shared parameter may be given
            by any of its names.

    Returns:
        The names among `names` that were found under FSDP2, in the model's order.

    Raises:
        RuntimeError: a parameter whose dtype would change has been gathered already.
    """
    wanted = set(names)
    owned = _names_by_owner(model)
    pinned: list[str] = []
    for state, groups in fsdp2_states(model):
        for group in groups:
            pins = {id(p): _names_of(p, owned) & wanted for p in group.fsdp_params}
            pinned += [name for p in group.fsdp_params for name in sorted(pins[id(p)])]
            _pin_group(group, {key for key, found in pins.items() if found}, has_run=state._is_root is not None)
    return pinned


def canonical_name(name: str) -> str:
    """A parameter's name without what `torch.compile`, checkpoint wrappers and FSDP1 put into it."""
    return _WRAPPER_NAMES.sub("", name)


def _pin_group(group: Any, pinned: set[int], has_run: bool) -> None:
    mixed = bool(pinned)
    for param in group.fsdp_params:
        before = getattr(param, "param_dtype", None)
        if mixed:
            param.init_dtype_attrs = _InitDtypes(param, id(param) in pinned)
            param.accumulate_unsharded_grad_if_needed = _CastGradient(param)
        else:
            vars(param).pop("init_dtype_attrs", None)
            vars(param).pop("accumulate_unsharded_grad_if_needed", None)
        if not has_run:
            continue
        param.init_dtype_attrs(group.mp_policy)
        if param.param_dtype != before and hasattr(param, "_unsharded_param"):
            raise RuntimeError(
                f"parameter {param._module_info.param_name!r} has been gathered in another dtype already, by a forward "
                "before training began: pass FSDPAutocast to the Trainer's constructor, in callbacks before any that "
                "runs the model."
            )
    if has_run:
        group._init_mp_dtypes()


class _InitDtypes:
    """`FSDPParam.init_dtype_attrs` of a parameter in a mixed unit; FSDP2 calls it at the unit's first use."""

    def __init__(self, param: Any, pinned: bool) -> None:
        self.param = param
        self.pinned = pinned

    def __call__(self, mp_policy: Any) -> None:
        own = dataclasses.replace(mp_policy, param_dtype=None) if self.pinned else mp_policy
        type(self.param).init_dtype_attrs(self.param, own)
        # FSDP2 leaves it None where it equals this parameter's own dtype, and wants one for the whole unit
        self.param.reduce_dtype = mp_policy.reduce_dtype or mp_policy.param_dtype


class _CastGradient:
    """Runs first in a unit's post-backward: its gradients become one dtype before the reduce-scatter."""

    def __init__(self, param: Any) -> None:
        self.param = param

    def __call__(self) -> None:
        param = self.param
        type(param).accumulate_unsharded_grad_if_needed(param)
        if param.unsharded_accumulated_grad is None and hasattr(param, "_unsharded_param"):
            param.to_accumulated_grad_if_needed()


def _names_by_owner(model: nn.Module) -> dict[tuple[int, str], str]:
    return {
        (id(module), name): canonical_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._parameters
    }


def _names_of(param: Any, owned: dict[tuple[int, str], str]) -> set[str]:
    info = param._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return {owned[id(module), name] for module, name in owners if (id(module), name) in owned}
