"""Which parameters are gathered in fp32 although their FSDP2 unit gathers in the training dtype."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from .consumption import Consumption, describe_experts, read_consumption
from .costs import gathered_bytes
from .param_dtypes import canonical_name
from .policy import PrecisionPolicy, dtype_name
from .sharding import read_units


@dataclass
class Fp32Choice:
    """The parameters to pin with `hf_fsdp_amp.param_dtypes.pin_fp32`, and what to tell the user.

    Args:
        names: names as in `named_parameters()`, a shared parameter under each of its names.
        lines: how it was decided and what it costs, one line each.
        consumption: what the decision rests on; None where no trace was asked for.
    """

    names: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    consumption: Consumption | None = None


def choose_fp32(model: nn.Module, policy: PrecisionPolicy, world_size: int = 1) -> Fp32Choice:
    """Decide for a policy which parameters stay in fp32.

    Preset ``exact`` keeps all that plain autocast does not cast at every use. Preset ``amp`` keeps what would make a
    norm's kernel fail, see `norms_that_need_fp32`. `PrecisionPolicy.keep_fp32` adds parameters by name in every preset.

    Args:
        model: the model before it is sharded; left as it is.
        policy: a policy for FSDP2; for FSDP1, whose flat parameters have one dtype per unit, nothing is chosen.
        world_size: ranks, for the bytes in the lines.

    Raises:
        ValueError: a `keep_fp32` pattern that matches no parameter (the message lists near ones), or that is no
            regular expression, or `keep_fp32` under FSDP1.
    """
    if policy.fsdp_version != 2:
        if policy.keep_fp32:
            raise ValueError("keep_fp32 needs FSDP2: FSDP1's flat parameters have one dtype per unit.")
        return Fp32Choice()
    choice = Fp32Choice(match_names(model, policy.keep_fp32))
    if policy.preset == "exact":
        choice.consumption = consumption = read_consumption(model, policy.dtype, policy.device_type)
        choice.names |= consumption.fp32
        choice.lines.append(_how(consumption, policy))
        if experts := describe_experts(consumption, policy.dtype):
            choice.lines.append(experts)
    if policy.preset == "amp" and (norms := norms_that_need_fp32(model, policy)):
        choice.names |= norms
        choice.lines.append(
            f"{len(norms)} norm parameters stay in fp32: their kernels take no {dtype_name(policy.dtype)}."
        )
    if choice.names:
        low = gathered_bytes(model, policy.dtype, (), world_size)
        mixed = gathered_bytes(model, policy.dtype, choice.names, world_size)
        choice.lines.append(
            f"all-gather of {mixed / 2**20:.1f} MiB a pass, {mixed / low:.3f} times that of all parameters in "
            f"{dtype_name(policy.dtype)}, in the same number of collectives."
        )
    return choice


def norms_that_need_fp32(model: nn.Module, policy: PrecisionPolicy) -> set[str]:
    """Norm parameters that must not be gathered low for the forward to run at all.

    Batch norms keep fp32 running statistics, which no kernel mixes with low weights. On CPU, layer and group norms
    reject low weights with fp32 activations, and CPU's autocast leaves them alone; CUDA's runs them in fp32
    (torch 2.4 to 2.14).
    """
    if any(unit.has_run for unit in read_units(model)):  # it runs as it is, and a gathered dtype can't change any more
        return set()
    on_cpu = policy.device_type == "cpu"
    if not on_cpu and not any(getattr(m, "running_mean", None) is not None for m in model.modules()):
        return set()
    consumption = read_consumption(model, policy.dtype, policy.device_type)
    if not consumption.traced:
        return _norms_by_class(model, on_cpu)
    kinds = ("batch_norm", "layer_norm", "group_norm") if on_cpu else ("batch_norm",)
    return {name for name, op in consumption.evidence.items() if any(kind in op for kind in kinds)}


def _norms_by_class(model: nn.Module, on_cpu: bool) -> set[str]:
    return {
        canonical_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        if hasattr(module, "running_mean") or (on_cpu and isinstance(module, (nn.LayerNorm, nn.GroupNorm)))
        for name, _ in module.named_parameters(recurse=False)
    }


def match_names(model: nn.Module, patterns: Collection[str]) -> set[str]:
    """Names of the parameters that one of the regular expressions matches (`re.search`).

    Raises:
        ValueError: a pattern that matches none, with near names, or that is no regular expression.
    """
    by_parameter: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), set()).add(canonical_name(name))
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"keep_fp32={pattern!r} is no regular expression: {error}.") from error
        found = [names for names in by_parameter.values() if any(expression.search(name) for name in names)]
        if not found:
            near = _near(pattern, sorted(set().union(*by_parameter.values())))
            raise ValueError(f"keep_fp32={pattern!r} matches no parameter. Near ones: {', '.join(near)}.")
        chosen.update(*found)
    return chosen


def _near(pattern: str, names: list[str]) -> list[str]:
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", pattern).strip(".")

    def likeness(name: str) -> float:
        parts = [name, *name.split("."), ".".join(name.split(".")[-2:])]
        return max(difflib.SequenceMatcher(None, plain, part).ratio() for part in parts)

    return sorted(names, key=likeness, reverse=True)[:3]


def _how(consumption: Consumption, policy: PrecisionPolicy) -> str:
    counts = (
        f"{len(consumption.low)} parameters gathered in {dtype_name(policy.dtype)}, {len(consumption.fp32)} in fp32"
    )
    if consumption.traced:
        return f"{counts}, as seen in a forward on fake {policy.device_type} tensors under autocast."
    return f"{counts}, by the class of the owning module, for the forward could not be traced: {consumption.reason}"
