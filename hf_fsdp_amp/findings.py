"""Judge a trace: every fault with its place, its evidence and its fix."""

from __future__ import annotations

from collections.abc import Sequence

from . import rules_model, rules_run
from .contract import Contract, Finding
from .trace import Trace

_ORDER = ("error", "warning", "note")


def find_faults(trace: Trace, contract: Contract, reference: Trace | None = None) -> list[Finding]:
    """Everything wrong or worth knowing about a step.

    Args:
        trace: the step.
        contract: what the run's settings promise.
        reference: a trace of the same model under plain AMP (fp32 parameters, autocast of the same dtype, same device
            type), e.g. a dry run's; sharpens the judgement of norms, softmax and routers.

    Returns:
        Findings: errors, then warnings, then notes; within each in the order of the rules.
    """
    found = [finding for rule in rules_run.RULES for finding in rule(trace, contract)]
    case = rules_model.Case(trace, contract, reference)
    found += [finding for rule in rules_model.RULES for finding in rule(case)]
    return sort_findings(found)


def sort_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; within each in the order given."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def describe_findings(findings: Sequence[Finding]) -> str:
    """All findings, one line each; ``no findings`` where there are none."""
    return "\n".join(finding.line() for finding in findings) or "no findings"


__all__ = ["Contract", "Finding", "describe_findings", "find_faults", "sort_findings"]
