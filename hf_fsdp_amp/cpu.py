"""FSDP on CPU through accelerate and the Trainer, so that a GPU job can be rehearsed on a laptop and in CI.

accelerate honours FSDP for MULTI_GPU, MULTI_XPU and their like only; on MULTI_CPU it silently trains DDP. The one
file that touches accelerate's shared state, read in accelerate 0.23 to 1.15; `tests/test_cpu.py` fails when it moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState

_WRAPPED = "_hf_fsdp_amp_cpu"
_SYNC = "FSDP_SYNC_MODULE_STATES"


def enable_cpu_fsdp() -> None:
    """Make accelerate and the Trainer honour FSDP on CPU (gloo), for FSDP1 and FSDP2.

    Call it before the `Trainer` or `Accelerator` is built, in every process, with ``use_cpu=True`` in the
    `TrainingArguments` (or ``ACCELERATE_USE_CPU=true``). It changes nothing for runs on another device, and
    calling it again does nothing.

    What it sets on a CPU run, each because torch or accelerate needs it there:
        * the state's `distributed_type` is FSDP and the plugin gets its mixed precision, as on a GPU;
        * the device carries no index (FSDP1 rejects ``cpu:0``);
        * `sync_module_states` is off (FSDP1 demands a GPU for it): every rank must load the same weights;
        * offloaded parameters are not pinned (FSDP2), or not offloaded from CPU to CPU at all (FSDP1, which always
          pins): pinning asks for a GPU driver;
        * full state dicts are not "offloaded" to the CPU (a segfault in FSDP1, torch 2.13 and 2.14).

    Raises:
        ValueError: later, when a plugin asks for FSDP1 with `cpu_ram_efficient_loading` on CPU.
    """
    for owner, name, wrap in _PATCHES:
        current = owner.__dict__[name]
        if not hasattr(current, _WRAPPED):
            wrapper = wrap(current)
            setattr(wrapper, _WRAPPED, current)
            setattr(owner, name, wrapper)


def disable_cpu_fsdp() -> None:
    """Undo `enable_cpu_fsdp` for states and plugins built from now on."""
    for owner, name, _ in _PATCHES:
        original = getattr(owner.__dict__[name], _WRAPPED, None)
        if original is not None:
            setattr(owner, name, original)


def is_cpu_fsdp_enabled() -> bool:
    """Whether `enable_cpu_fsdp` is in force."""
    return hasattr(AcceleratorState.__init__, _WRAPPED)


def _with_fsdp(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        fresh = not AcceleratorState._shared_state or AcceleratorState._shared_state == PartialState._shared_state
        init(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if fresh and plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            _take_fsdp(self, plugin)

    return __init__


def _take_fsdp(state: Any, plugin: Any) -> None:
    device = torch.device("cpu")
    for shared in (state.__dict__, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
        shared["device"] = device
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin


def _without_sync(post_init: Any) -> Any:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:  # noqa: N807
        version = int(getattr(self, "fsdp_version", None) or os.environ.get("FSDP_VERSION") or 1)
        if not _runs_on_cpu():
            post_init(self)
            return
        with _sync_off(self) if version == 1 else contextlib.nullcontext():
            post_init(self)
        for setting in ("pin_memory", "offload_params"):  # FSDP2's CPUOffloadPolicy, FSDP1's CPUOffload
            if getattr(self.cpu_offload, setting, False):
                self.cpu_offload = dataclasses.replace(self.cpu_offload, **{setting: False})

    return __post_init__


@contextlib.contextmanager
def _sync_off(plugin: Any) -> Iterator[None]:
    """Off in the plugin, and in the environment meanwhile: accelerate 0.23 to 0.33 reads it from there alone."""
    efficient = getattr(plugin, "cpu_ram_efficient_loading", None)
    if efficient is None:
        efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() in ("true", "1")
    if efficient:
        raise ValueError(
            "cpu_ram_efficient_loading needs sync_module_states, which FSDP1 cannot do on CPU: "
            "set cpu_ram_efficient_loading to false, or use FSDP2 (version 2)."
        )
    plugin.sync_module_states = False
    before = os.environ.get(_SYNC)
    os.environ[_SYNC] = "false"
    try:
        yield
    finally:
        os.environ.pop(_SYNC)
        if before is not None:
            os.environ[_SYNC] = before


def _without_offload(set_state_dict_type: Any) -> Any:
    @functools.wraps(set_state_dict_type)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        set_state_dict_type(self, *args, **kwargs)
        if not _runs_on_cpu():
            return
        for config in (self.state_dict_config, self.optim_state_dict_config):
            if getattr(config, "offload_to_cpu", False):
                config.offload_to_cpu = False

    return wrapper


def _runs_on_cpu() -> bool:
    device = PartialState._shared_state.get("device")
    if device is not None:
        return device.type == "cpu"
    asked = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    return asked or not torch.cuda.is_available()


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (AcceleratorState, "__init__", _with_fsdp),
    (FullyShardedDataParallelPlugin, "__post_init__", _without_sync),
    (FullyShardedDataParallelPlugin, "set_state_dict_type", _without_offload),
)
