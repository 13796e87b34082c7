"""Reports in the terminal: one table per report, one that compares several. Readable without colour, 80 columns."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .extras import require
from .findings import Finding
from .summary import (
    ATTENTIONS,
    MATMULS,
    SOFTMAXES,
    KindSummary,
    forward_dtypes,
    is_norm,
    summarize,
)
from .trace import Trace

if TYPE_CHECKING:
    from .report import PrecisionReport

MAX_ROWS = 20
MAX_FINDINGS = 6
_LABEL_WIDTH = 31
_MARK = {"error": "E", "warning": "W", "note": "n"}
_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render(report: PrecisionReport) -> Any:
    """A rich renderable of one report: title, table of kinds, what was sent, findings."""
    group = require("rich.console", "the terminal report").Group
    text = require("rich.text", "the terminal report").Text
    parts = [text(report.run.title(), style="bold"), text(_facts_line(report.trace)), _kind_table(report)]
    parts.extend(text(line) for line in _notes(report.trace))
    parts.extend(_finding_lines(report.findings))
    return group(*parts)


def render_text(report: Any, width: int = 80, color: bool = False) -> str:
    """Any rich renderable as text of `width` columns."""
    console_class = require("rich.console", "the terminal report").Console
    out = io.StringIO()
    console = console_class(file=out, width=width, force_terminal=color, no_color=not color, legacy_windows=False)
    console.print(report)
    return out.getvalue()


def compare(reports: Sequence[PrecisionReport], names: Sequence[str] | None = None) -> Any:
    """A rich table with one column per report and one row per aspect; a row whose cells differ is marked.

    Args:
        reports: at least one.
        names: column titles; default is how each is trained and with which preset.
    """
    table_class = require("rich.table", "the comparison").Table
    box = require("rich.box", "the comparison").SIMPLE_HEAD
    table = table_class(box=box, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for name in names or [short_name(report) for report in reports]:
        table.add_column(name)
    for label, cells in comparison_rows(reports):
        differs = len(set(cells)) > 1
        table.add_row(f"{'*' if differs else ' '} {label}", *cells, style="bold" if differs else None)
    return table


def comparison_rows(reports: Sequence[PrecisionReport]) -> list[tuple[str, list[str]]]:
    """The rows of `compare`: label, one cell per report."""
    columns = [aspects(report.trace) for report in reports]
    rows = [(label, [column[label] for column in columns]) for label in columns[0]]
    counts = [[sum(f.severity == severity for f in r.findings) for severity in _MARK] for r in reports]
    rows.append(("findings (E/W/n)", ["/".join(map(str, count)) for count in counts]))
    return rows


def short_name(report: PrecisionReport) -> str:
    """How a report's run is trained, in a few characters."""
    run = report.run
    how = f"FSDP{run.fsdp_version}" if run.fsdp_version else run.distributed_type.replace("no", "1 device")
    return f"{how} {run.preset}"


def aspects(trace: Trace) -> dict[str, str]:
    """What distinguishes one way of training from another, by label."""
    kinds = summarize(trace)
    embeddings = [d for k in kinds if "Embedding" in k.cls and "Rotary" not in k.cls for d in k.outputs]
    norms = [d for k in kinds if is_norm(k.cls) for d in k.outputs]
    return {
        "autocast": _list(autocast_states(trace)),
        "embedding out": _list(embeddings),
        "norm out": _list(norms),
        "matmul": _list(forward_dtypes(trace, MATMULS)),
        "softmax": _list(forward_dtypes(trace, SOFTMAXES)),
        "attention": _list(forward_dtypes(trace, ATTENTIONS)) if _fused(trace) else "unfused",
        "loss": loss_text(trace),
        "gradient reduction": _list([c.dtype for c in trace.gradient_reductions()]),
        "gradient": _list([p.gradient for p in trace.parameters if p.gradient]),
        "master weights": _list([p.storage for p in trace.parameters if p.requires_grad]),
        "optimizer state": _list([s.dtype for s in trace.optimizer if s.key != "step"]),
        "all-gathered": size(trace.gathered_bytes()),
        "logits": size(trace.logits.bytes) if trace.logits is not None else "-",
    }


def autocast_states(trace: Trace) -> list[str]:
    """Autocast's states in the forward: a dtype, or ``off``."""
    return [a.dtype if a.enabled else "off" for a in trace.autocast if a.phase == "forward"]


def loss_text(trace: Trace) -> str:
    """Dtype and value of the loss."""
    loss = trace.loss
    if loss is None or (loss.dtype is None and loss.backward_dtype is None):
        return "-"
    value = "" if loss.value is None else f" {loss.value:.5g}"
    return f"{loss.dtype or loss.backward_dtype}{value}"


def size(number: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def fold_rows(kinds: list[KindSummary]) -> list[tuple[str, KindSummary]]:
    """Kinds with siblings of the same class and dtypes put together: ``attn.{q_proj,k_proj}``."""
    groups: dict[tuple[Any, ...], list[KindSummary]] = {}
    for kind in kinds:
        if not (kind.runs or kind.storage or kind.casts):
            continue
        parent = kind.kind.rpartition(".")[0]
        key = (parent, kind.cls, kind.inputs, kind.outputs, kind.runs, kind.storage, kind.compute, kind.gradient)
        groups.setdefault(key, []).append(kind)
    rows = []
    for key, members in groups.items():
        names = [k.kind.rpartition(".")[2] for k in members]
        rows.append((f"{key[0]}.{brace(names)}".lstrip(".") or "(model)", members[0]))
    return rows


def brace(names: list[str]) -> str:
    """Names folded by their common start and end, cut at underscores: ``{q,k,v,o}_proj``, ``norm_{1,2}``."""
    if len(names) == 1:
        return names[0]
    start = _cut(_common_start(names))
    end = _cut(_common_start([name[len(start) :][::-1] for name in names]))[::-1]
    middles = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{start}{{{','.join(middles)}}}{end}"


def brace_paths(paths: list[str]) -> str:
    """Paths in one short text: siblings folded, the first two groups named."""
    parents: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        parents.setdefault(parent, []).append(name)
    texts = [f"{parent}.{brace(names)}".lstrip(".") for parent, names in parents.items()]
    return ", ".join(texts[:2]) + (f" and {len(texts) - 2} more" if len(texts) > 2 else "")


def _common_start(names: list[str]) -> str:
    columns = zip(*names)  # noqa: B905  (the shortest name ends it)
    return "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _cut(common: str) -> str:
    return common[: common.rfind("_") + 1]


def _kind_table(report: PrecisionReport) -> Any:
    table_class = require("rich.table", "the terminal report").Table
    box = require("rich.box", "the terminal report").SIMPLE_HEAD
    table = table_class(box=box, pad_edge=False, collapse_padding=True, show_edge=False)
    table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=_LABEL_WIDTH)
    table.add_column("n", justify="right", no_wrap=True, min_width=3)
    for name in ("weights", "in", "computes", "out"):
        table.add_column(name, no_wrap=True, min_width=9)
    rows = fold_rows(summarize(report.trace))
    worst = _worst_by_module(report.findings)
    for label, kind in rows[:MAX_ROWS]:
        severity = worst.get(kind.kind)
        weights = _arrow(kind.storage, kind.compute)
        cells = [_list(kind.inputs), _list(kind.runs), _list(kind.outputs)]
        mark = f" {_MARK[severity]}" if severity else ""
        style = _STYLE[severity] if severity else None
        table.add_row(_shorten(label, _LABEL_WIDTH - len(mark)) + mark, str(kind.members), weights, *cells, style=style)
    if len(rows) > MAX_ROWS:
        table.add_row(f"... {len(rows) - MAX_ROWS} more kinds (see the JSON or HTML)", "", "", "", "", "")
    return table


def _worst_by_module(findings: list[Finding]) -> dict[str, str]:
    worst: dict[str, str] = {}
    order = list(_MARK)
    for finding in findings:
        if finding.module not in worst or order.index(finding.severity) < order.index(worst[finding.module]):
            worst[finding.module] = finding.severity
    return worst


def _facts_line(trace: Trace) -> str:
    parts = [f"autocast {_list(autocast_states(trace))}", f"loss {loss_text(trace)}"]
    if trace.gathered_bytes():
        parts.append(f"gathered {size(trace.gathered_bytes())}")
    if reductions := trace.gradient_reductions():
        parts.append(f"reduced in {_list([c.dtype for c in reductions])}")
    gradients = [p.gradient for p in trace.parameters if p.gradient]
    parts.append(f"gradients {_list(gradients)}")
    return ", ".join(parts)


def _notes(trace: Trace) -> list[str]:
    return [*trace.notes, *([f"assumed: {len(trace.guesses)} guesses, listed in the JSON"] if trace.guesses else [])]


def _finding_lines(findings: list[Finding]) -> list[Any]:
    text = require("rich.text", "the terminal report").Text
    if not findings:
        return [text("no findings")]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity, finding.fix), []).append(finding)
    lines = []
    for (code, severity, fix), group in list(groups.items())[:MAX_FINDINGS]:
        modules = brace_paths([finding.module for finding in group if finding.module])
        head = text(f"{_MARK[severity]} {code}{' ' if modules else ''}{modules}: ", style=_STYLE[severity])
        lines.append(head.append(f"{group[0].evidence} Fix: {fix}", style="default"))
    if len(groups) > MAX_FINDINGS:
        lines.append(text(f"... {len(groups) - MAX_FINDINGS} more findings (see the JSON or HTML)"))
    return lines


def _fused(trace: Trace) -> bool:
    return bool(forward_dtypes(trace, ATTENTIONS))


def _list(dtypes: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(dtypes)) or "-"


def _arrow(storage: tuple[str, ...], compute: tuple[str, ...]) -> str:
    if not storage:
        return "-"
    return _list(storage) if not compute or storage == compute else f"{_list(storage)}>{_list(compute)}"


def _shorten(label: str, width: int) -> str:
    """The end of a path says more than its start."""
    return label if len(label) <= width else "…" + label[-(width - 1) :]
