"""What changed between two reports: settings, versions, aspects, kinds of module, findings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .extras import require
from .report import PrecisionReport
from .report_table import aspects
from .summary import KindSummary, summarize

_MAX_KINDS = 16
_COMPARED = ("storage", "compute", "gradient", "inputs", "outputs", "runs", "backward", "is_unit")
_LABELS = {"storage": "master", "compute": "weights", "runs": "computes", "inputs": "in", "outputs": "out"}


@dataclass(frozen=True)
class Change:
    """One thing that differs: where, and its value before and after (``-`` for absent)."""

    where: str
    before: str
    after: str


@dataclass(frozen=True)
class Difference:
    """All that differs between two reports.

    Args:
        run: settings and package versions; aspects: autocast, loss, reductions and the like.
        kinds: dtypes of kinds of module; findings: those that came or went.
    """

    run: list[Change]
    aspects: list[Change]
    kinds: list[Change]
    findings: list[Change]

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))


def compare_reports(before: PrecisionReport, after: PrecisionReport) -> Difference:
    """What changed from one report to another."""
    first, second = aspects(before.trace), aspects(after.trace)
    return Difference(
        run=_changes(_settings(before), _settings(after)),
        aspects=_changes(first, second),
        kinds=_kind_changes(before, after),
        findings=_changes(_found(before), _found(after)),
    )


def render_diff(before: PrecisionReport, after: PrecisionReport) -> Any:
    """A rich renderable of `compare_reports`."""
    group = require("rich.console", "the comparison").Group
    text = require("rich.text", "the comparison").Text
    difference = compare_reports(before, after)
    if not difference:
        return text("no difference")
    parts: list[Any] = [text(f"- {before.run.title()}"), text(f"+ {after.run.title()}")]
    for title, changes in (
        ("run", difference.run),
        ("precision", difference.aspects),
        ("modules", difference.kinds),
        ("findings", difference.findings),
    ):
        if changes:
            parts.append(_table(title, changes))
    return group(*parts)


def _table(title: str, changes: list[Change]) -> Any:
    table_class = require("rich.table", "the comparison").Table
    box = require("rich.box", "the comparison").SIMPLE_HEAD
    table = table_class(box=box, pad_edge=False, collapse_padding=True, show_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for change in changes[:_MAX_KINDS]:
        table.add_row(change.where, change.before, change.after)
    if len(changes) > _MAX_KINDS:
        table.add_row(f"... {len(changes) - _MAX_KINDS} more", "", "")
    return table


def _settings(report: PrecisionReport) -> dict[str, str]:
    run = report.run
    names = ("model", "preset", "dtype", "policy", "fsdp_version", "distributed_type", "device_type", "world_size")
    return {**{name: str(getattr(run, name)) or "-" for name in names}, **run.versions, **run.args}


def _found(report: PrecisionReport) -> dict[str, str]:
    return {f"{f.code} {f.module}".rstrip(): f.severity for f in report.findings}


def _changes(before: dict[str, str], after: dict[str, str]) -> list[Change]:
    names = dict.fromkeys([*before, *after])
    pairs = [(name, before.get(name, "-"), after.get(name, "-")) for name in names]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _kind_changes(before: PrecisionReport, after: PrecisionReport) -> list[Change]:
    first = {kind.kind: kind for kind in summarize(before.trace)}
    second = {kind.kind: kind for kind in summarize(after.trace)}
    changes = []
    for name in dict.fromkeys([*first, *second]):
        old, new = first.get(name), second.get(name)
        if old is None or new is None:
            present = ("-", "runs") if old is None else ("runs", "-")
            changes.append(Change(name or "(model)", *present))
            continue
        changed = [field for field in _COMPARED if getattr(old, field) != getattr(new, field)]
        if changed:
            changes.append(Change(name or "(model)", _values(old, changed), _values(new, changed)))
    return changes


def _values(kind: KindSummary, names: list[str]) -> str:
    parts = []
    for name in names:
        value = getattr(kind, name)
        shown = "+".join(value) if isinstance(value, tuple) else str(value)
        parts.append(f"{_LABELS.get(name, name)} {shown or '-'}")
    return ", ".join(parts)
