"""The HTML page of a report: one self-contained file with a picture of the network, top to bottom."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract import Finding
from .extras import require
from .report_table import aspects, size
from .summary import KindSummary, is_floating, op_dtype, op_name, summarize
from .trace import Trace, kind_of

if TYPE_CHECKING:
    from .report import PrecisionReport

_TEMPLATE = Path(__file__).parent / "templates" / "precision.html.j2"
_MAX_OPS = 14


@dataclass
class Box:
    """One kind of module in the picture, with what runs inside it.

    Args:
        name: last part of its path; kind: the whole folded path.
        summary: None for the root of a subtree that ran nothing itself.
        children: kinds inside, in order of first call.
        ops: lines about its own ops in the forward: name, dtypes, number of runs.
        pins: numbers of the findings about it.
        stream_in, stream_out: dtype that enters and leaves it, ``""`` where unknown.
    """

    name: str
    kind: str
    summary: KindSummary | None = None
    children: list[Box] = field(default_factory=list)
    ops: list[tuple[str, str, int]] = field(default_factory=list)
    pins: list[tuple[int, str]] = field(default_factory=list)
    stream_in: str = ""
    stream_out: str = ""


def render_html(report: PrecisionReport) -> str:
    """The page as text; it loads nothing.

    Raises:
        ImportError: jinja2 is not installed.
    """
    jinja2 = require("jinja2", "the HTML report")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["size"] = size
    environment.filters["dtype_class"] = dtype_class
    root = build_tree(report.trace, report.findings)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        trace=report.trace,
        facts=aspects(report.trace),
        root=root,
        stages=_stages(root),
        present=[d for d in ("fp32", "bf16", "fp16", "fp8") if d in _present(report.trace)],
        traffic=_traffic(report.trace),
        memory=_memory(report.trace),
    )


def save_html(report: PrecisionReport, path: str | Path) -> Path:
    """Write the page; returns the path."""
    Path(path).write_text(render_html(report), encoding="utf-8")
    return Path(path)


def build_tree(trace: Trace, findings: list[Finding]) -> Box:
    """The network as nested boxes, layers folded."""
    root = Box(name="", kind="")
    boxes: dict[str, Box] = {"": root}
    ops = _ops_by_kind(trace)
    for summary in summarize(trace):
        box = boxes.get(summary.kind)
        if box is None:
            parent = _nearest(boxes, summary.kind)
            box = Box(summary.kind[len(parent.kind) :].lstrip("."), summary.kind)
            boxes[summary.kind] = box
            parent.children.append(box)
        box.summary = summary
        box.ops = ops.get(summary.kind, [])
        box.stream_in, box.stream_out = "+".join(summary.inputs[:1]), "+".join(summary.outputs[:1])
    for number, finding in enumerate(findings, 1):
        if finding.module:
            _nearest(boxes, finding.module + ".x").pins.append((number, finding.severity))
    root.name = root.summary.cls if root.summary is not None else "model"
    return root


def dtype_class(dtypes: Any) -> str:
    """CSS class for one dtype or several: ``bf16``, ``fp32``, ``mix`` for two, ``none`` for none."""
    names = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    names = [name for name in dict.fromkeys(names) if name]
    if not names:
        return "none"
    if len(names) > 1:
        return "mix"
    name = names[0]
    if name.startswith(("float8", "fp8")):
        return "fp8"
    return name if name in ("bf16", "fp16", "fp32") else "none"


def _nearest(boxes: dict[str, Box], kind: str) -> Box:
    while kind not in boxes:
        kind = kind.rpartition(".")[0]
    return boxes[kind]


def _present(trace: Trace) -> set[str]:
    """CSS classes of the dtypes that show in the picture."""
    kinds = summarize(trace)
    return {dtype_class(d) for k in kinds for d in (*k.storage, *k.compute, *k.runs, *k.inputs, *k.outputs)}


def _stages(root: Box) -> list[Box]:
    """The boxes along the residual stream: containers with no weights and no layers of their own are opened.

    The root's own ops (the loss, usually) come last.
    """
    stages: list[Box] = []
    for box in root.children:
        opened = box.children and "*" not in box.kind and (box.summary is None or not box.summary.storage)
        stages.extend(_stages(box) if opened else [box])
    if root.summary is not None and root.ops:
        own = Box(f"{root.name}, own ops", root.kind or " ", root.summary, [], root.ops, root.pins)
        own.stream_out = "+".join(root.summary.outputs[:1])
        stages.append(own)
    return stages


def _ops_by_kind(trace: Trace) -> dict[str, list[tuple[str, str, int]]]:
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for op in trace.ops:
        if op.phase != "forward" or op_dtype(op) is None:
            continue
        given = ",".join(d for d in op.inputs if is_floating(d)) or "-"
        made = ",".join(d for d in op.outputs if is_floating(d)) or "-"
        name = op_name(op.op)
        if name in ("view", "_unsafe_view", "t", "transpose", "detach", "expand", "slice", "as_strided", "unsqueeze"):
            continue
        counts.setdefault(kind_of(op.module), Counter())[name, f"{given} → {made}"] += op.count
    return {kind: [(n, d, c) for (n, d), c in counter.most_common(_MAX_OPS)] for kind, counter in counts.items()}


def _traffic(trace: Trace) -> list[dict[str, Any]]:
    """What was sent, by collective, phase and dtype, largest first, with its share of the largest."""
    totals: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for c in trace.collectives:
        if is_floating(c.dtype) or c.kind == "all_gather":
            totals[c.kind, c.phase, c.dtype] += c.bytes
            counts[c.kind, c.phase, c.dtype] += c.count
    largest = max(totals.values(), default=1)
    return [
        {"kind": k, "phase": p, "dtype": d, "bytes": b, "count": counts[k, p, d], "share": 100 * b / largest}
        for (k, p, d), b in totals.most_common()
    ]


def _memory(trace: Trace) -> list[dict[str, Any]]:
    """Elements by what they are and dtype: parameters unsharded, optimizer state and logits as seen on this rank."""
    rows: Counter[tuple[str, str]] = Counter()
    for p in trace.parameters:
        rows["parameters, master", p.storage] += p.numel
        if p.compute:
            rows["parameters, in the forward", p.compute] += p.numel
    for s in trace.optimizer:
        rows[f"optimizer {s.key} (this rank)", s.dtype] += s.numel
    return [{"what": what, "dtype": dtype, "numel": numel} for (what, dtype), numel in rows.items()]
