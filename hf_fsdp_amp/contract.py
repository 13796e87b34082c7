"""What a run is held to, and what is said about it: `Contract` and `Finding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .policy import dtype_name
from .trace import HALF

if TYPE_CHECKING:
    from .facts import RunFacts
    from .policy import PrecisionPolicy

Severity = Literal["error", "warning", "note"]

DEVIATING_PRESETS = ("amp", "fsdp", "custom")
"""Presets whose user accepted that parameters are gathered in half precision."""


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Args:
        code: fixed kebab-case name.
        severity: ``error`` (the run doesn't compute what its settings say), ``warning`` or ``note``.
        module: kind of module it is about (``transformer.blocks.*.norm_1``), ``""`` for the run or the whole model.
        evidence: numbers and dtypes it rests on.
        fix: what to do.
    """

    code: str
    severity: Severity
    module: str
    evidence: str
    fix: str

    def line(self) -> str:
        """The finding in one line."""
        where = f" at {self.module}" if self.module else ""
        return f"{self.severity}: {self.code}{where}: {self.evidence} Fix: {self.fix}"


@dataclass(frozen=True)
class Contract:
    """What the settings of a run promise; a trace is judged against it.

    Args:
        dtype: training dtype, ``"bf16"`` or ``"fp16"``; ``"no"`` promises nothing about half precision.
        preset: preset in force; ``"stock"`` where none: what was promised then is plain AMP.
        fsdp_version: 0 (none), 1 or 2.
        device_type: device type it computes on.
        reduce_dtype: dtype that gradients shall be reduced in.
        fsdp_requested: FSDP was asked for.
        disagreement: settings that contradict each other, in one line; None where they agree.
        distributed_type: what accelerate trains.
    """

    dtype: str = "bf16"
    preset: str = "stock"
    fsdp_version: int = 0
    device_type: str = "cpu"
    reduce_dtype: str = "fp32"
    fsdp_requested: bool = False
    disagreement: str | None = None
    distributed_type: str = "no"

    @property
    def wants_autocast(self) -> bool:
        """Whether the forward shall run under autocast."""
        return self.dtype in HALF and self.preset != "fsdp"

    @property
    def accepts_low_gather(self) -> bool:
        """Whether parameters gathered in half precision are what was chosen (a known deviation from plain AMP)."""
        return self.fsdp_version > 0 and self.preset in DEVIATING_PRESETS


def make_contract(policy: PrecisionPolicy | None, facts: RunFacts | None = None, disagreement: str = "") -> Contract:
    """The contract of a run.

    Args:
        policy: the policy in force; None for a stock run.
        facts: how the run is set up; None for a run without the Trainer (then the policy must say enough).
        disagreement: what `find_disagreement` said.
    """
    if policy is not None:
        dtype, preset, version = dtype_name(policy.dtype), policy.preset, policy.fsdp_version
        device_type = policy.device_type
        chosen = policy.reduce_dtype is not None and preset != "stock"
        reduce = dtype_name(policy.reduce_dtype) if chosen else "fp32"
    else:
        dtype = facts.mixed_precision if facts is not None else "no"
        preset, version = "stock", facts.fsdp_version if facts is not None else 0
        device_type, reduce = facts.device_type if facts is not None else "cpu", "fp32"
    return Contract(
        dtype=dtype,
        preset=preset,
        fsdp_version=version,
        device_type=device_type,
        reduce_dtype=reduce,
        fsdp_requested=facts.fsdp_requested if facts is not None else version > 0,
        disagreement=disagreement or None,
        distributed_type=_how(facts) if facts is not None else "no",
    )


def _how(facts: RunFacts) -> str:
    """What accelerate trains: ``FSDP``, ``DDP`` for its ``MULTI_GPU``, ``MULTI_CPU``, ..., ``no`` for one device."""
    kind = facts.distributed_type
    if kind.startswith("MULTI_"):
        return "DDP" if facts.world_size > 1 else "no"
    return "no" if kind == "NO" else kind
