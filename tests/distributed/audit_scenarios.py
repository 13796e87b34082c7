"""Scenarios of the audit in the real Trainer on 2 ranks; `test_audit.py` asserts on what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_fsdp_amp.audit_callback import PrecisionAudit

from .scenarios import build

Result = dict[str, Any]


def outcome(audit: PrecisionAudit) -> Result:
    """What a test needs of a report, as plain data."""
    assert audit.report is not None
    report = audit.report
    return {
        "findings": [[f.code, f.severity, f.module, f.evidence] for f in report.findings],
        "facts": dict(__import__("hf_fsdp_amp.report_table").report_table.aspects(report.trace)),
        "text": report.to_text(),
    }


def stock(folder: Path, version: int) -> Result:
    """FSDP as accelerate sets it up, DDP for version 0; audited, not mended."""
    audit = PrecisionAudit()
    build(folder, version, amp=False, callbacks=[audit]).train()
    return outcome(audit)


def amp(folder: Path, version: int) -> Result:
    from hf_fsdp_amp import FSDPAutocast

    fix = FSDPAutocast()
    audit = PrecisionAudit(policy=lambda args: fix._runs[id(args)].policy)
    build(folder, version, callbacks=[fix, audit]).train()
    return outcome(audit)
