"""What the Trainer, accelerate, FSDP and the device are set to. Reads only; decides nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from accelerate.state import AcceleratorState, DistributedType
from torch import nn

from .sharding import read_units

_LOW = ("bf16", "fp16")


@dataclass(frozen=True)
class RunFacts:
    """How a run is set up, as found.

    Args:
        fsdp_version: 0 where accelerate will not shard and the model is not sharded; else 1 or 2.
        fsdp_requested: FSDP was asked for by `TrainingArguments` or the launcher's environment.
        sharded_at_load: the model came sharded (transformers' `DistributedConfig`, an own `fully_shard`).
        mixed_precision: accelerate's own setting: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        arguments_precision: what `TrainingArguments` asks for: ``"bf16"``, ``"fp16"`` or ``"no"``.
        launcher_precision: what `accelerate launch` or the environment asks for, or ``"no"``.
        device_type: device type of the run.
        world_size: number of processes.
        is_main_process: whether this is rank 0.
        distributed_type: accelerate's name for what it will do (``"FSDP"``, ``"MULTI_CPU"``, ...).
        plugin: accelerate's FSDP plugin, or None.
    """

    fsdp_version: int
    fsdp_requested: bool
    sharded_at_load: bool
    mixed_precision: str
    arguments_precision: str
    launcher_precision: str
    device_type: str
    world_size: int
    is_main_process: bool
    distributed_type: str
    plugin: Any = None


def read_facts(args: Any, model: nn.Module | None) -> RunFacts:
    """The facts of a Trainer's run, from its arguments, accelerate's state and the model.

    Args:
        args: the Trainer's `TrainingArguments`.
        model: the model as it stands, sharded or not; None where the Trainer has none yet.

    Returns:
        The facts. Where accelerate has no state at all (reset by a second `TrainingArguments`), FSDP is judged
        by the model alone.
    """
    state = _accelerate_state()
    plugin = getattr(state, "fsdp_plugin", None) if state is not None else None
    distributed_type = str(getattr(state, "distributed_type", DistributedType.NO)).rsplit(".", 1)[-1]
    units = read_units(model) if model is not None else []
    accelerate_shards = plugin is not None and distributed_type == "FSDP"
    fsdp_version = units[0].fsdp_version if units else 0
    if accelerate_shards:
        fsdp_version = plugin_version(plugin)
    return RunFacts(
        fsdp_version=fsdp_version,
        fsdp_requested=is_fsdp_requested(args),
        sharded_at_load=bool(units) and not accelerate_shards,
        mixed_precision=str(getattr(state, "mixed_precision", "no")) if state is not None else "no",
        arguments_precision=_arguments_precision(args),
        launcher_precision=launcher_precision(),
        device_type=args.device.type,
        world_size=args.world_size,
        is_main_process=args.process_index == 0,
        distributed_type=distributed_type,
        plugin=plugin if accelerate_shards else None,
    )


def plugin_version(plugin: Any) -> int:
    """FSDP version of accelerate's plugin; the field came with accelerate 1.6, before that there was FSDP1 only."""
    return int(getattr(plugin, "fsdp_version", 1))


def is_fsdp_requested(args: Any) -> bool:
    """Whether `TrainingArguments` (``fsdp=``: a bool, string or list, by release) or the launcher asks for FSDP."""
    return bool(getattr(args, "fsdp", None)) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def launcher_precision() -> str:
    """The mixed precision that `accelerate launch` puts into the environment; ``"no"`` where it says nothing."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def is_gradient_scaler_missing(optimizer: Any) -> bool:
    """Whether accelerate's optimizer wrapper has no gradient scaler (it makes none for fp16 on CPU)."""
    return getattr(optimizer, "scaler", None) is None


def find_disagreement(facts: RunFacts) -> str | None:
    """One line for settings of the training dtype that contradict each other; None where they agree.

    transformers 5.x silently lets ``bf16=True`` win over a launcher's fp16; 4.x hands the arguments' choice to the
    launcher's variable. An `Accelerator` configured before the Trainer keeps its own.
    """
    low = {
        "TrainingArguments": facts.arguments_precision,
        "accelerate launch (mixed_precision, ACCELERATE_MIXED_PRECISION)": facts.launcher_precision,
        "accelerate's state": facts.mixed_precision,
    }
    asked = {who: what for who, what in low.items() if what in _LOW}
    if facts.arguments_precision in _LOW and facts.mixed_precision not in (facts.arguments_precision, "fp8"):
        asked["accelerate's state"] = facts.mixed_precision
    if len(set(asked.values())) <= 1:
        return None
    said = ", ".join(f"{who} says {what}" for who, what in asked.items())
    return f"mixed precision is contradictory: {said}. Set the same one everywhere, or leave it out of the launcher."


def _accelerate_state() -> Any | None:
    if not AcceleratorState._shared_state:
        return None
    try:
        return AcceleratorState()
    except ValueError:  # only the partial state is there: no Accelerator has been built
        return None


def _arguments_precision(args: Any) -> str:
    if getattr(args, "bf16", False):
        return "bf16"
    return "fp16" if getattr(args, "fp16", False) else "no"
