"""How each parameter is really consumed under autocast: cast to the low dtype first at every use, or used in fp32.

The model's forward runs once on fake tensors, which have no data, under the autocast rules of the device type it
will train on. Nothing is computed and nothing of the model changes. Where no such run is possible, the class of the
owning module decides.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from .dummy_inputs import candidate_inputs
from .fake_device import answers_as_if_present, autocast_rules, left_as_it_is, without_collector
from .fake_results import FakeResults
from .param_dtypes import canonical_name
from .policy import dtype_name
from .sharding import read_units

_LOW = (torch.bfloat16, torch.float16)
# One element in, one element out, and back: rounding before or after them gives the same bits, forward and backward.
_MOVES = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "squeeze", "unsqueeze", "alias", "detach"),
        *("t", "transpose", "permute", "movedim", "swapaxes", "clone", "contiguous", "cat", "stack"),
        *("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"),
    )
)
_CAST_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, Conv1D)
_GROUPED = ("_grouped_mm", "grouped_mm_fallback", "bmm", "baddbmm")


@dataclass
class Consumption:
    """What autocast does to each parameter of a model.

    Args:
        low: names of the parameters that every use casts to the low dtype first.
        fp32: names of all others: used in fp32 somewhere, or not at all.
        traced: whether this was seen in a run; else the class of the owning module decided.
        reason: why there was no run to see, in one line; empty where there was.
        evidence: by name, the op that used the parameter in fp32.
        fp32_experts: names and element counts of stacked expert weights that a grouped matmul uses in fp32.
    """

    low: set[str] = field(default_factory=set)
    fp32: set[str] = field(default_factory=set)
    traced: bool = True
    reason: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    fp32_experts: dict[str, int] = field(default_factory=dict)


def read_consumption(model: nn.Module, dtype: torch.dtype, device_type: str) -> Consumption:
    """Decide for every parameter whether gathering it in `dtype` changes nothing that plain autocast computes.

    Args:
        model: the model as it is before sharding; parameters on any device, meta included. It is left as it is.
        dtype: what autocast casts to.
        device_type: whose autocast rules apply, ``"cuda"``, ``"cpu"``, ...; fake tensors of another type than
            ``"cpu"`` need a torch build for it, but no such device.

    Returns:
        The verdicts by name, a shared parameter under each of its names. Names are those of `named_parameters()`.
    """
    if read_units(model):
        return _by_class(model, "the model is sharded already")
    reason = "no inputs could be made for it"
    for index in range(3):  # labels per token, per example, none
        try:
            return _trace(model, dtype, device_type, index)
        except IndexError:
            break
        except Exception as error:  # any model code may fail on fake tensors; the last failure is told
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return _by_class(model, reason[:200])


def _trace(model: nn.Module, dtype: torch.dtype, device_type: str, index: int) -> Consumption:
    names = _names_by_parameter(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_as_it_is(model))
        stack.enter_context(without_collector())
        stack.enter_context(answers_as_if_present(device_type, as_real=False))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        twins = {
            id(p): torch.empty(p.shape, dtype=_training_dtype(p), device=device_type, requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        values: dict[str, torch.Tensor] = {
            name: twins[id(p)] for name, p in model.named_parameters(remove_duplicate=False)
        }
        for name, buffer in model.named_buffers(remove_duplicate=False):
            values[name] = fake.from_tensor(buffer.detach()).to(device_type)
        inputs = list(candidate_inputs(model, device_type))[index]
        follow = _Follow(dtype)
        for key, twin in twins.items():
            follow.track(twin, names[key][0])
        stack.enter_context(autocast_rules(device_type, dtype, cache_enabled=False))
        stack.enter_context(follow)
        torch.func.functional_call(model, values, kwargs=inputs, tie_weights=False)
    return _verdicts(model, names, follow)


def _verdicts(model: nn.Module, names: dict[int, list[str]], follow: _Follow) -> Consumption:
    found = Consumption()
    for parameter in model.parameters():
        same = names[id(parameter)]
        used_fp32 = follow.fp32_use.get(same[0])
        if same[0] in follow.low_use and used_fp32 is None:
            found.low.update(same)
            continue
        found.fp32.update(same)
        found.evidence[same[0]] = used_fp32 or "unused"
        if used_fp32 in _GROUPED and parameter.dim() >= 3:
            found.fp32_experts[same[0]] = parameter.numel()
    return found


def _by_class(model: nn.Module, reason: str) -> Consumption:
    found = Consumption(traced=False, reason=reason)
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        classes = [type(m) for m in owners[id(parameter)]]
        cast = all(issubclass(c, _CAST_CLASSES) for c in classes)
        (found.low if cast else found.fp32).add(canonical_name(name))
        if not cast:
            found.evidence[canonical_name(name)] = f"owned by {classes[0].__name__}"
    return found


class _Follow(TorchDispatchMode):
    """Follows parameters through moves and casts to the first op that computes with them.

    It runs below autocast, so that autocast's casts are ops here.
    """

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self._results = FakeResults()
        self.names: Any = WeakIdKeyDictionary()  # tensor -> (parameter names, whether cast to the low dtype)
        self.low_use: set[str] = set()
        self.fp32_use: dict[str, str] = {}

    def track(self, tensor: torch.Tensor, name: str) -> None:
        self.names[tensor] = (frozenset([name]), tensor.dtype in _LOW)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        followed = [self.names[t] for t in tree_leaves((args, kwargs)) if _is_in(t, self.names)]
        result = _grouped_mm(args) if name == "_grouped_mm" else self._results.run(func, args, kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not followed or not made:  # a question (prim::device, sym_size) is no use
            return result
        names = frozenset().union(*(f[0] for f in followed))
        cast = all(f[1] for f in followed)
        if name == "_to_copy" or name in _MOVES or (name == "expand" and _same_numel(args[0], result)):
            for tensor in made:
                self.names[tensor] = (names, cast or tensor.dtype is self.low)
            return result
        for which, was_cast in followed:
            if was_cast:
                self.low_use |= which
            else:
                self.fp32_use.update({n: name for n in which if n not in self.fp32_use})
        return result


def _is_in(tensor: Any, names: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor in names


def _same_numel(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.numel() == after.numel()


def _grouped_mm(args: Any) -> torch.Tensor:
    """Shape of a grouped matmul of tokens (2-D) by stacked weights (3-D): its fake kernel takes bf16 alone."""
    a, b = args[0], args[1]
    return torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)


def _training_dtype(parameter: torch.Tensor) -> torch.dtype:
    """accelerate keeps trainable parameters in fp32 under mixed precision, and frozen ones as they are."""
    return torch.float32 if parameter.requires_grad and parameter.is_floating_point() else parameter.dtype


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    return names


def describe_experts(consumption: Consumption, dtype: torch.dtype) -> str | None:
    """One line on experts that plain AMP computes in fp32, with the cost of gathering them so; None without any."""
    numel = sum(consumption.fp32_experts.values())
    if not numel:
        return None
    gib = 2**30
    return (
        f"the experts' grouped matmul is no autocast op: plain AMP computes them in fp32, and so does preset 'exact', "
        f"which gathers {numel * 4 / gib:.2f} GiB of expert weights a pass instead of {numel * 2 / gib:.2f}. "
        f"experts_implementation='eager' (or 'batched_mm') computes and gathers them in {dtype_name(dtype)}."
    )
