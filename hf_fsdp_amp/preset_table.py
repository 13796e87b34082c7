"""Presets side by side: what each computes unlike plain AMP, what is found, and the bytes it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config_models import load_model
from .explain import EXPLAINED, Explainer, explained_policy
from .extras import require
from .fake_device import missing_support
from .report import PrecisionReport
from .report_table import aspects, render_text, size
from .summary import is_floating, is_move
from .trace import Trace

COMPARED = ("stock-fsdp2", "amp", "exact", "ddp")


@dataclass
class PresetComparison:
    """Reports of one model under several presets.

    Shown in a terminal by ``rich.print``, in a notebook by itself.

    Args:
        reports: by preset.
        plain: plain AMP's forward; None where it could not be run.
    """

    reports: dict[str, PrecisionReport]
    plain: Trace | None

    def rows(self) -> list[tuple[str, list[str]]]:
        """Label and one cell per preset."""
        columns = [self._cells(report) for report in self.reports.values()]
        return [(label, [column[label] for column in columns]) for label in columns[0]]

    def _cells(self, report: PrecisionReport) -> dict[str, str]:
        trace, memory = report.trace, report.trace.memory
        assert memory is not None  # every dry run fills it
        seen = aspects(trace)
        return {
            **{label: seen[label] for label in ("autocast", "embedding out", "norm out", "softmax", "loss")},
            "ops unlike plain AMP": self._share(trace),
            "errors / warnings": f"{len(report.errors)} / {sum(f.severity == 'warning' for f in report.findings)}",
            "all-gathered": size(trace.gathered_bytes()),
            "reduced": size(sum(c.bytes for c in trace.gradient_reductions())),
            "reduced in": seen["gradient reduction"],
            "parameters": size(memory.parameters),
            "gradients": size(memory.gradients),
            "AdamW's state": size(memory.optimizer),
            "logits": size(memory.logits),
            "residual stream": size(memory.residual),
            "saved for backward": size(memory.saved),
        }

    def _share(self, trace: Trace) -> str:
        if self.plain is None:
            return "unknown"
        differing, total = count_unlike(trace, self.plain)
        return f"{100 * differing / max(total, 1):.1f}%"

    def to_json(self) -> str:
        """The rows and the reports' own JSON."""
        table = {label: dict(zip(self.reports, cells, strict=True)) for label, cells in self.rows()}
        reports = {preset: json.loads(report.to_json()) for preset, report in self.reports.items()}
        return json.dumps({"table": table, "reports": reports})

    def to_text(self, width: int = 80, color: bool = False) -> str:
        """The table as text. Raises ImportError where rich is not installed."""
        return render_text(self, width, color)

    def __rich__(self) -> Any:
        table = require("rich.table", "the comparison").Table
        box = require("rich.box", "the comparison").SIMPLE_HEAD
        first = next(iter(self.reports.values())).run
        title = f"{first.model}, {first.dtype}, {first.world_size} ranks, {first.device_type}; bytes a step and rank"
        made = table(title=title, box=box, title_justify="left")
        made.add_column("")
        for preset in self.reports:
            made.add_column(preset)
        for label, cells in self.rows():
            made.add_row(label, *cells)
        return made

    def _repr_html_(self) -> str:
        return f"<pre>{self.to_text()}</pre>"


def compare_presets(
    model_or_config_or_path: Any,
    *,
    presets: Sequence[str] = COMPARED,
    dtype: str = "bf16",
    fsdp_version: int = 2,
    world_size: int = 8,
    batch_size: int = 1,
    seq_len: int = 2048,
    device_type: str = "cuda",
    trust_remote_code: bool = False,
) -> PresetComparison:
    """Dry runs of several presets, as `explain` makes them, in one table.

    Args:
        presets: of `EXPLAINED`.
        model_or_config_or_path, dtype, fsdp_version, world_size, batch_size, seq_len, device_type, trust_remote_code:
            as in `explain`.

    Raises:
        ValueError, RuntimeError: as `explain` does.
    """
    if missing := missing_support(device_type):
        raise RuntimeError(missing)
    policies = {preset: explained_policy(preset, dtype, fsdp_version, device_type) for preset in presets}
    model = load_model(model_or_config_or_path, trust_remote_code=trust_remote_code)
    explainer = Explainer(model, dtype, device_type, world_size, batch_size, seq_len)
    reports = {preset: explainer.report(policy, preset) for preset, policy in policies.items()}
    return PresetComparison(reports, explainer.plain_trace())


def count_unlike(trace: Trace, plain: Trace) -> tuple[int, int]:
    """Computing ops of the forward whose dtypes differ from plain AMP's, module by module, and all of plain AMP's.

    Args:
        trace, plain: with their sequences.
    """
    mine, theirs = _ops_by_module(trace), _ops_by_module(plain)
    differing = 0
    for path, expected in theirs.items():
        found = mine.get(path, [])
        same = sum(a == b for a, b in zip(expected, found, strict=False))
        differing += max(len(expected), len(found)) - same
    return differing, sum(map(len, theirs.values()))


def _ops_by_module(trace: Trace) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for index in trace.sequence:
        op = trace.ops[index]
        floating = tuple(d for d in op.inputs if is_floating(d))
        if op.phase == "forward" and floating and not is_move(op):
            found.setdefault(op.module, []).append((op.op, floating))
    return found


__all__ = ["COMPARED", "EXPLAINED", "PresetComparison", "compare_presets", "count_unlike"]
