"""Hand a report to the Trainer's loggers.

A callback gets neither the Trainer nor its other callbacks, so `TrainerCallback` offers no way to log through them.
TensorBoard merges all event files of one folder into one run: ours goes beside the Trainer's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .extras import require
from .report import PrecisionReport
from .report_table import autocast_states
from .trace import HALF


def report_scalars(report: PrecisionReport) -> dict[str, float]:
    """The report's numbers, by tag, for any logger: sizes in bytes, shares from 0 to 1, counts."""
    trace = report.trace
    forward = [op for op in trace.ops if op.phase == "forward"]
    half = sum(op.count for op in forward if any(d in HALF for d in op.inputs))
    scalars = {
        "precision/findings_error": float(sum(f.severity == "error" for f in report.findings)),
        "precision/findings_warning": float(sum(f.severity == "warning" for f in report.findings)),
        "precision/findings_note": float(sum(f.severity == "note" for f in report.findings)),
        "precision/half_op_share": half / max(1, sum(op.count for op in forward)),
        "precision/autocast_on": float(any(state != "off" for state in autocast_states(trace))),
        "precision/all_gathered_bytes": float(trace.gathered_bytes()),
        "precision/reduced_bytes": float(sum(c.bytes for c in trace.gradient_reductions())),
    }
    if trace.logits is not None:
        scalars["precision/logits_bytes"] = float(trace.logits.bytes)
    if trace.loss is not None and trace.loss.value is not None:
        scalars["precision/loss"] = trace.loss.value
    return scalars


def log_report(report: PrecisionReport, args: Any, step: int) -> list[str]:
    """Log scalars and the text summary to the loggers in ``args.report_to``; TensorBoard today.

    Args:
        report: the report.
        args: the Trainer's `TrainingArguments`.
        step: global step to log at.

    Returns:
        Names of the loggers it went to.
    """
    wanted = args.report_to if isinstance(args.report_to, list | tuple) else [args.report_to]
    if not {"tensorboard", "all"} & set(wanted):
        return []
    try:
        writer_class = require("torch.utils.tensorboard", "logging to TensorBoard").SummaryWriter
    except ImportError:  # report_to="all" where TensorBoard isn't installed: the Trainer doesn't log to it either
        return []
    with writer_class(log_dir=str(tensorboard_folder(args)), filename_suffix=".precision") as writer:
        for tag, value in report_scalars(report).items():
            writer.add_scalar(tag, value, step)
        text = report.to_text(width=100)
        writer.add_text("precision/report", "".join(f"    {line}\n" for line in text.splitlines()), step)
    return ["tensorboard"]


def tensorboard_folder(args: Any) -> Path:
    """Folder of the Trainer's own event file.

    transformers 4.34 to 5.24: ``TENSORBOARD_LOGGING_DIR``, else ``args.logging_dir`` where the release has it, else a
    new folder under ``output_dir/runs`` named by time and host, so the newest one there.
    """
    given = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    if given:
        return Path(given).expanduser()
    runs = Path(args.output_dir) / "runs"
    files = sorted(runs.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    return files[-1].parent if files else runs
