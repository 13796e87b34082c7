"""A device that isn't there: autocast's rules for it, and the answers that code asking for it gets meanwhile.

Everything set here is process-wide for the length of a block, and put back at its end, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.cuda.amp import common as cuda_amp
from transformers.utils import import_utils

HOPPER = (9, 0)
"""Compute capability that is assumed where there is no GPU to ask."""


def missing_support(device_type: str) -> str | None:
    """Why fake tensors of this device type cannot be had in this torch build, in one line; None where they can."""
    if device_type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA, whose autocast rules cannot be followed then: install "
            "a CUDA build of torch (it needs no GPU), or ask for CPU's rules with device_type='cpu' (--device cpu)."
        )
    try:
        torch.is_autocast_enabled(device_type)
    except RuntimeError as error:
        return f"device_type={device_type!r} is not one that autocast knows: {str(error).splitlines()[0]}"
    return None


@contextlib.contextmanager
def answers_as_if_present(device_type: str, *, as_real: bool) -> Iterator[None]:
    """Model code that asks for the GPU before it chooses a kernel gets a Hopper's answers, where there is no GPU.

    Args:
        device_type: the device type that need not be there.
        as_real: transformers 5 takes fake tensors for a `torch.export`, which has other masks than a run and asks
            less of their data (5.0 to 5.25, ``is_tracing`` asks ``is_fake_tensor``); tell it that they are none.
    """
    with contextlib.ExitStack() as stack:
        if as_real and hasattr(import_utils, "is_fake_tensor"):
            stack.enter_context(_replaced(import_utils, "is_fake_tensor", lambda tensor: False))
        if device_type == "cuda" and not torch.cuda.is_available():
            stack.enter_context(_replaced(torch.cuda, "get_device_capability", lambda device=None: HOPPER))
            stack.enter_context(_replaced(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True))
            # `torch.autocast("cuda")` asks this one, and would switch itself off (torch 2.4 to 2.14)
            stack.enter_context(_replaced(cuda_amp, "amp_definitely_not_available", lambda: False))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Whatever happens to a model's modules inside (hooks, caches, parameters replaced) is taken back, and the RNG's.

    The model is in training mode inside.
    """
    kept = []
    for module in model.modules():
        containers = {k: v for k, v in module.__dict__.items() if isinstance(v, dict)}
        kept.append((module, dict(module.__dict__), {k: dict(v) for k, v in containers.items()}))
    model.train()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, attributes, inner in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, value in inner.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(value)


@contextlib.contextmanager
def autocast_rules(
    device_type: str, dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool = True
) -> Iterator[None]:
    """Autocast as `torch.autocast` has it, also where that would want the device; all state is put back at the end.

    Args:
        device_type: whose op lists apply.
        dtype: what it casts to.
        enabled: whether it is on.
        cache_enabled: whether it may cache its copies of fp32 leaves.
    """
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A step makes a hundred thousand objects that live to its end: looking through them again and again finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
