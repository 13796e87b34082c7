"""Where FSDP will shard a model, before it does: the units that accelerate and the Trainer make.

Read in accelerate 1.15 (`fsdp2_prepare_model`) and transformers 5.24 (blocks: the model's ``_no_split_modules``).
`tests/test_planned_units.py` holds it against a model that accelerate really sharded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

_NORM = "norm"


@dataclass
class PlannedUnit:
    """One FSDP unit.

    Args:
        paths: module paths, ``""`` for the root; several where modules share one unit.
        modules: those modules.
        parameters: names and parameters that it gathers, each parameter in one unit only.
        resharded: freed after the forward, and so gathered again for the backward.
    """

    paths: list[str]
    modules: list[nn.Module]
    resharded: bool
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def plan_units(model: nn.Module, fsdp_version: int) -> list[PlannedUnit]:
    """The units in the order in which they claim parameters: blocks, then what FSDP2 carves out, then the root.

    Args:
        model: the model before sharding.
        fsdp_version: 1: blocks and the root, which stays gathered from forward to backward. 2: accelerate 1.15 also
            makes a unit of an
            untied embedding, and one of the final norm, the head and a tied embedding, which stays gathered as the
            root does.
    """
    paths = {module: path for path, module in model.named_modules()}
    units = [PlannedUnit([paths[module]], [module], True) for module in block_modules(model)]
    units = units[::-1]  # inner blocks claim before those around them
    if fsdp_version == 2:
        units += _carved(model, paths, {id(unit.modules[0]) for unit in units})
    if not any(module is model for unit in units for module in unit.modules):
        units.append(PlannedUnit([""], [model], False))
    _claim(model, units)
    return [unit for unit in units if unit.parameters or "" in unit.paths]


def block_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that accelerate wraps one by one: those of the model's ``_no_split_modules`` classes."""
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in blocks]


def _carved(model: nn.Module, paths: dict[nn.Module, str], taken: set[int]) -> list[PlannedUnit]:
    embedding, head = _ask(model, "get_input_embeddings"), _ask(model, "get_output_embeddings")
    weight = getattr(embedding, "weight", None)
    tied = weight is not None and weight is getattr(head, "weight", None)
    tail: list[nn.Module | None] = [_final_norm(model), *([embedding] if tied else []), head]
    units = []
    if embedding is not None and not tied and id(embedding) not in taken and embedding in paths:
        units.append(PlannedUnit([paths[embedding]], [embedding], True))
    present = [m for m in tail if m is not None and id(m) not in taken and m in paths]
    if present:
        units.append(PlannedUnit([paths[m] for m in present], present, False))
    return units


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError:  # transformers' way to say that the model has none; see `why_refused`
        return None


def why_refused(model: nn.Module, units: list[PlannedUnit], fsdp_version: int) -> str | None:
    """Why FSDP2 cannot be set up for these units, in one line; None where it can.

    accelerate 1.14 to 1.16 ask every model for its input embeddings, and torch (2.13, 2.14) refuses a parameter that
    two units would gather.
    """
    if fsdp_version != 2:
        return None
    try:
        getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return f"accelerate asks for the input embeddings, and {type(model).__name__} has no get_input_embeddings()"
    unit_of = {path: number for number, unit in enumerate(units) for path in unit.paths}
    owners: dict[int, tuple[str, set[int]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owner = owners.setdefault(id(parameter), (f"{path}.{name}".lstrip("."), set()))
                owner[1].add(unit_of[_innermost(path, unit_of)])
    shared = next((name for name, numbers in owners.values() if len(numbers) > 1), None)
    return None if shared is None else f"parameter {shared!r} is shared by two FSDP units, which torch refuses"


def _innermost(path: str, units: Collection[str]) -> str:
    while path not in units and path:
        path = path.rpartition(".")[0]
    return path


def _final_norm(model: nn.Module) -> nn.Module | None:
    """The last module right beside the block list whose class is a norm's, as accelerate finds it."""
    from accelerate.utils import fsdp_utils

    find = getattr(fsdp_utils, "_find_final_norm", None)  # private; accelerate 1.14 and 1.15, absent before
    return find(model) if find is not None else None


def _claim(model: nn.Module, units: list[PlannedUnit]) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    claimed: set[int] = set()
    for unit in units:
        for module in unit.modules:
            for parameter in module.parameters():
                if id(parameter) not in claimed:
                    claimed.add(id(parameter))
                    unit.parameters[names[id(parameter)]] = parameter
