"""Autocast around a model's forward: `patch_model`, its exact undo, and the unwrapping they need.

The wrapper is a plain function bound with `MethodType`, so that a deep copy runs the copy's weights, a pickle
loads as an unpatched model, and `inspect.signature` (by which the Trainer drops unused dataset columns) still
shows the model's own parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .dynamo import skip_own_frame
from .outputs import finish_output
from .policy import parse_dtype
from .sharding import UnitPolicy, read_units

OUTPUT_DTYPES = ("auto", "fp32", "none")
_RECORD = "_hf_fsdp_amp_record"
_ACCELERATE_ORIGINAL = "_original_forward"


@dataclass(frozen=True)
class _Settings:
    dtype: torch.dtype
    device_type: str
    cache_enabled: bool
    output_dtype: str
    sharded: bool


@dataclass(frozen=True)
class _Previous:
    """An instance attribute as it was before the patch: absent, any value, or a method to bind anew."""

    name: str
    present: bool
    value: Any = None
    bound: bool = False


@dataclass
class _Record:
    """Kept on the wrapper function; `owner` tells it from a third party's wrapper that copied our attributes."""

    settings: _Settings
    inner: Callable[..., Any]
    previous: tuple[_Previous, ...]
    owner: Any = None


def patch_model(
    model: nn.Module,
    dtype: str | torch.dtype,
    *,
    device_type: str | None = None,
    cache_enabled: bool | None = None,
    output_dtype: str = "auto",
) -> nn.Module:
    """Run `model.forward` under autocast of `dtype`, in place of whatever accelerate put around it.

    Works on the innermost Hugging Face model: under FSDP1's and DDP's wrappers, FSDP2's `fully_shard`,
    `torch.compile` and PEFT (whose prompt-learning methods compute outside the base model and are patched too).
    accelerate's own wrapper is removed at every level, right or wrong (0.23 opened autocast in the device's
    default dtype; every release copies all floating outputs to fp32). Calling it again replaces the settings
    and never stacks.

    Args:
        model: the model, wrapped or not; patched in place.
        dtype: ``"bf16"``, ``"fp16"`` or their `torch.dtype`; ``"fp32"`` runs the forward with autocast off.
        device_type: device type autocast is entered for; by default the one the model computes on.
        cache_enabled: autocast's cache of low-precision weight copies. Default: off where an FSDP unit gathers
            fp32 parameters (the cache would hold a copy of every weight through the forward), else on.
        output_dtype: ``"auto"``: the loss is fp32; other half-precision outputs stay as computed while training
            when the model made the loss itself, and are fp32 otherwise. ``"fp32"``: all of them are fp32.
            ``"none"``: outputs are left alone. Key/value caches are always left alone.

    Returns:
        `model` itself.

    Raises:
        ValueError: unknown dtype or output_dtype, a model without parameters, or one still on the meta device
            when no `device_type` is given. Nothing is patched then.
    """
    if output_dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"output_dtype={output_dtype!r} is not known: use one of {', '.join(map(repr, OUTPUT_DTYPES))}."
        )
    units = read_units(model)
    settings = _Settings(
        dtype=parse_dtype(dtype),
        device_type=device_type or compute_device_type(model),
        cache_enabled=not gathers_fp32(units) if cache_enabled is None else cache_enabled,
        output_dtype=output_dtype,
        sharded=bool(units),
    )
    targets = patch_targets(model)
    for level in _wrapper_levels(model):
        if any(level is target for target in targets):
            _patch_one(level, settings)
        else:
            _strip_accelerate(level)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Put back what was there before the first `patch_model`: the class's forward, or accelerate's wrapper.

    Args:
        model: a model that `patch_model` has seen, wrapped or not; one that it has not seen is left as it is.

    Returns:
        `model` itself.
    """
    for level in _wrapper_levels(model):
        record = _find_record(level)
        if record is None:
            continue
        for name in ("forward", _ACCELERATE_ORIGINAL):
            level.__dict__.pop(name, None)
        for previous in record.previous:
            if previous.present:
                level.__dict__[previous.name] = MethodType(previous.value, level) if previous.bound else previous.value
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` is in force on the model, wrapped or not."""
    return any(_find_record(level) is not None for level in _wrapper_levels(model))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model under FSDP1, DDP, `torch.compile` and PEFT wrappers."""
    return _wrapper_levels(model)[-1]


def patch_targets(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward `patch_model` wraps: the innermost model, and a PEFT wrapper that computes itself."""
    levels = _wrapper_levels(model)
    prompt_learning = [m for m in levels[:-1] if getattr(m, "active_peft_config", None) and _is_prompt_learning(m)]
    return [*prompt_learning, levels[-1]]


def compute_device_type(model: nn.Module) -> str:
    """Device type the model computes on: the mesh's under FSDP (parameters may be offloaded), else its parameters'.

    Raises:
        ValueError: the model has no parameters, or they are on the meta device.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return torch.device(module.compute_device).type  # type: ignore[arg-type]
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to run in mixed precision.")
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.device_type
    if parameter.device.type == "meta":
        raise ValueError("the model is on the meta device: pass device_type= to say where it will compute.")
    return parameter.device.type


def gathers_fp32(units: list[UnitPolicy]) -> bool:
    """Whether one of a model's FSDP units gathers its parameters in fp32."""
    return any(unit.param_dtype in (None, torch.float32) for unit in units)


def _patch_one(module: nn.Module, settings: _Settings) -> None:
    record = _find_record(module)
    previous = record.previous if record else _remember(module)
    _strip_accelerate(module)
    inner = record.inner if record else _as_function(module)
    module.__dict__["forward"] = MethodType(_autocast_forward(inner, settings, previous), module)


def _as_function(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of self; one set on the instance as a plain callable gets a self to drop."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__
    plain: Callable[..., Any] = forward

    @functools.wraps(plain)
    def with_self(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    # Bound as a method, its first parameter disappears from the signature: say that there is one more.
    signature = inspect.signature(plain)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_parameter, *signature.parameters.values()]
    with_self.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_self


def _autocast_forward(
    inner: Callable[..., Any], settings: _Settings, previous: tuple[_Previous, ...]
) -> Callable[..., Any]:
    device_type, dtype = settings.device_type, settings.dtype
    enabled = dtype is not torch.float32
    autocast_dtype = dtype if enabled else None
    cache_enabled, output_dtype = settings.cache_enabled, settings.output_dtype
    autocast = torch.autocast

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast(device_type, autocast_dtype, enabled, cache_enabled):
            output = inner(self, *args, **kwargs)
        return finish_output(output, output_dtype, self.training)

    wrapper: Any = skip_own_frame(forward) if settings.sharded else forward  # type: ignore[arg-type]
    setattr(wrapper, _RECORD, _Record(settings, inner, previous, owner=wrapper))
    return wrapper


def _wrapper_levels(model: nn.Module) -> list[nn.Module]:
    """The model and what it wraps, outermost first; the last one is the Hugging Face model."""
    levels: list[Any] = [model]
    while True:
        current = levels[-1]
        compiled = getattr(current, "_orig_mod", None)  # torch.compile's OptimizedModule, torch 2.0 to 2.14
        if isinstance(compiled, nn.Module):
            levels.append(compiled)
        elif isinstance(current, (FullyShardedDataParallel, DistributedDataParallel)):
            levels.append(current.module)
        elif callable(getattr(current, "get_base_model", None)) and current.get_base_model() is not current:
            levels.append(current.get_base_model())
        else:
            return levels


def _is_prompt_learning(peft_model: Any) -> bool:
    return bool(getattr(peft_model.active_peft_config, "is_prompt_learning", False))


def _find_record(module: nn.Module) -> _Record | None:
    """The record of our wrapper on `module`, also where accelerate has wrapped it again since."""
    forward: Any = module.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        record = getattr(function, _RECORD, None)
        if record is not None and record.owner is function:
            return record
        forward = _under_accelerate(forward)
    return None


def _remember(module: nn.Module) -> tuple[_Previous, ...]:
    remembered = []
    value: Any
    for name in ("forward", _ACCELERATE_ORIGINAL):
        value = module.__dict__.get(name)
        bound = isinstance(value, MethodType) and value.__self__ is module
        value = value.__func__ if bound else value
        remembered.append(_Previous(name, name in module.__dict__, value, bound))
    return tuple(remembered)


def _strip_accelerate(module: nn.Module) -> None:
    """Take accelerate's forward wrapper off `module`, however often it was applied.

    `Accelerator.prepare_model` (0.23 to 1.15) sets ``forward = convert_outputs_to_fp32(autocast(forward))`` and
    keeps the bound original as ``_original_forward``; transformers 4.34 prepares twice under FSDP1. Only those two
    layers are peeled: following ``__wrapped__`` to the end would strip the model's own decorators too.
    """
    module.__dict__.pop(_ACCELERATE_ORIGINAL, None)
    forward: Any = module.__dict__.get("forward")
    peeled = False
    while forward is not None and (under := _under_accelerate(forward)) is not None:
        forward, peeled = under, True
    if not peeled:
        return
    if getattr(forward, "__func__", forward) is getattr(type(module), "forward", None):
        del module.__dict__["forward"]
    else:
        rebind = isinstance(forward, FunctionType) and isinstance(module.__dict__["forward"], MethodType)
        module.__dict__["forward"] = MethodType(forward, module) if rebind else forward


def _under_accelerate(forward: Any) -> Any | None:
    """What accelerate's wrapper was put around; None where `forward` is not such a wrapper."""
    converter = getattr(getattr(forward, "__func__", forward), "__wrapped__", None)
    if not isinstance(converter, ConvertOutputsToFp32):
        return None
    inner = converter.model_forward
    # torch.autocast used as a decorator (torch 2.4 to 2.14) leaves this mark on the function it returns
    return inner.__wrapped__ if hasattr(inner, "__script_unsupported") else inner
