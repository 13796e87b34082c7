"""Judge a trace: every fault with its place, its evidence and its fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Args:
        code: fixed kebab-case name.
        severity: ``error`` (the run computes what its settings don't say), ``warning`` or ``note``.
        module: kind of module or parameter it is about, ``""`` for the run or the whole model.
        evidence: numbers and dtypes it rests on.
        fix: what to do.
    """

    code: str
    severity: Severity
    module: str
    evidence: str
    fix: str
