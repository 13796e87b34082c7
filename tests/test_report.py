"""Reports: JSON, terminal, comparison, HTML with a screenshot in headless Chromium, the command line, TensorBoard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_fsdp_amp.audit_callback import PrecisionAudit
from hf_fsdp_amp.cli import main
from hf_fsdp_amp.contract import Contract
from hf_fsdp_amp.diff import compare_reports
from hf_fsdp_amp.findings import find_faults
from hf_fsdp_amp.report import SCHEMA, PrecisionReport, RunRecord
from hf_fsdp_amp.report_html import build_tree, render_html, save_html
from hf_fsdp_amp.report_table import brace, compare, comparison_rows, render_text
from hf_fsdp_amp.summary import summarize
from hf_fsdp_amp.trackers import report_scalars

from .audit_models import LowPrecisionNorm, Toy, train_step
from .distributed.training import arguments, tiny_llama, tiny_mpt, tokens


def make(model: torch.nn.Module, name: str, call: Any = None, **options: Any) -> PrecisionReport:
    trace = train_step(model, call=call, **options)
    run = RunRecord(model=name, dtype="bf16")
    return PrecisionReport(trace, find_faults(trace, Contract(dtype="bf16")), run)


@pytest.fixture(scope="module")
def clean() -> PrecisionReport:
    torch.manual_seed(0)
    return make(Toy(), "Toy")


@pytest.fixture(scope="module")
def faulty() -> PrecisionReport:
    torch.manual_seed(0)
    return make(Toy(LowPrecisionNorm), "Toy", dtype=torch.float16)


@pytest.fixture(scope="module")
def moe() -> PrecisionReport:
    """A 48-layer mixture of experts, tiny in width, with a rounded norm in it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=48, num_local_experts=4, vocab_size=64, **sizes))
    model.model.norm.to(torch.bfloat16)
    call = lambda ids: model(input_ids=ids, labels=ids, use_cache=False)  # noqa: E731
    return make(model, "MixtralForCausalLM", call)


def test_json_round_trip(faulty: PrecisionReport, tmp_path: Path) -> None:
    path = faulty.save(tmp_path / "precision.json")
    assert PrecisionReport.load(path) == faulty
    data = json.loads(path.read_text())
    assert data["schema"] == SCHEMA
    assert {"code", "severity", "module", "evidence", "fix"} == set(data["findings"][0])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "hf_fsdp_amp.precision/99"}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema|not a precision report"):
        PrecisionReport.from_json(text)


def test_text_of_32_layers_fits_a_terminal() -> None:
    model = tiny_llama(num_hidden_layers=32)
    report = make(model, "LlamaForCausalLM", lambda ids: model(input_ids=ids, labels=ids), dtype=torch.float16)
    text = report.to_text()
    lines = text.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    assert "model.layers.*.self_attn.o_proj" in text
    assert "…ayers.*.self_attn.{q,k,v}_proj" in text
    assert any(line.startswith("E autocast-wrong-dtype") for line in lines)
    assert "\x1b[" in report.to_text(color=True)


def test_every_kind_is_one_row(clean: PrecisionReport) -> None:
    kinds = {kind.kind: kind for kind in summarize(clean.trace)}
    qkv = kinds["blocks.*.attn.qkv"]
    assert (qkv.members, qkv.calls, qkv.numel) == (2, 2, 2 * (48 * 16 + 48))
    assert (qkv.inputs, qkv.runs, qkv.outputs, qkv.backward) == (("fp32",), ("bf16",), ("bf16",), ("bf16",))
    assert qkv.casts == {"fp32>bf16": 6}
    assert kinds["wte"].outputs == ("fp32",)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["q_proj", "k_proj", "v_proj"], "{q,k,v}_proj"),
        (["norm_1", "norm_2"], "norm_{1,2}"),
        (["attn", "ffn"], "{attn,ffn}"),
        (["head"], "head"),
    ],
)
def test_brace(names: list[str], folded: str) -> None:
    assert brace(names) == folded


def test_comparison(clean: PrecisionReport, faulty: PrecisionReport) -> None:
    rows = dict(comparison_rows([clean, faulty]))
    assert rows["autocast"] == ["bf16", "fp16"]
    assert rows["norm out"] == ["fp32", "fp16"]
    assert rows["master weights"] == ["fp32", "fp32"]
    text = render_text(compare([clean, faulty], ["clean", "faulty"]))
    assert re.search(r"\* autocast +bf16 +fp16", text)
    assert re.search(r"^ +master weights +fp32 +fp32", text, re.MULTILINE)


def test_show(clean: PrecisionReport, faulty: PrecisionReport, tmp_path: Path, capsys: Any) -> None:
    good, bad = clean.save(tmp_path / "good.json"), faulty.save(tmp_path / "bad.json")
    assert main(["show", str(good)]) == 0
    assert "no findings" not in capsys.readouterr().err
    assert main(["show", str(bad), "--html", str(tmp_path / "bad.html")]) == 1
    assert "autocast-wrong-dtype" in capsys.readouterr().out
    assert (tmp_path / "bad.html").read_text().startswith("<!doctype html>")
    assert main(["show", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["show", str(tmp_path / "other.json")]) == 2


def test_diff(clean: PrecisionReport, faulty: PrecisionReport, tmp_path: Path, capsys: Any) -> None:
    good, bad = clean.save(tmp_path / "good.json"), faulty.save(tmp_path / "bad.json")
    assert main(["diff", str(good), str(good)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"autocast +bf16 +fp16", out)
    assert re.search(r"blocks\.\*\.norm_1", out)
    assert main(["diff", str(bad), str(good)]) == 0


def test_diff_of_runs(clean: PrecisionReport) -> None:
    other = PrecisionReport.from_json(clean.to_json())
    other.run.fsdp_version, other.run.versions["accelerate"] = 2, "99"
    changes = compare_reports(clean, other)
    assert {(c.where, c.after) for c in changes.run} == {("fsdp_version", "2"), ("accelerate", "99")}
    assert not changes.aspects
    assert not changes.kinds


def test_html_is_self_contained_and_complete(faulty: PrecisionReport) -> None:
    page = render_html(faulty)
    assert not re.search(r"https?://|src=|@import|<script|<link", page)
    for finding in faulty.findings:
        assert finding.code in page
    assert page.count('class="finding ') == len(faulty.findings)
    assert 'href="#f1"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_html_escapes_what_it_shows(clean: PrecisionReport) -> None:
    report = PrecisionReport(clean.trace, run=RunRecord(model="<b>&"))
    assert "<b>&:" not in render_html(report)
    assert "&lt;b&gt;&amp;:" in render_html(report)


def test_findings_are_pinned_to_their_place(faulty: PrecisionReport) -> None:
    root = build_tree(faulty.trace, faulty.findings)
    pinned = {}
    todo = [root]
    while todo:
        box = todo.pop()
        pinned.update({faulty.findings[n - 1].module: box.kind for n, _ in box.pins})
        todo.extend(box.children)
    assert pinned["blocks.*.norm_1"] == "blocks.*.norm_1"
    assert all(module == kind for module, kind in pinned.items())


def test_html_of_a_deep_model_is_small(moe: PrecisionReport) -> None:
    page = render_html(moe)
    assert len(page) < 100_000
    assert "\u00d748" in page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_html_in_chromium(moe: PrecisionReport, tmp_path: Path, theme: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    page, picture = save_html(moe, tmp_path / "precision.html"), tmp_path / "page.png"
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --hide-scrollbars --window-size=1280,1000"
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    command += ["--force-dark-mode"] if theme == "dark" else []
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    colors = _colors(picture)
    background = colors[0]
    assert (sum(background) > 600) == (theme == "light")
    fp32, bf16 = ((33, 102, 172), (168, 90, 0)) if theme == "light" else ((125, 184, 238), (240, 178, 94))
    assert {fp32, bf16} <= set(colors)


def _colors(picture: Path) -> list[tuple[int, int, int]]:
    """The picture's colours, most frequent first."""
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    counted = image.getcolors(image.width * image.height)
    return [color for _, color in sorted(counted, reverse=True)]


def test_audit_of_a_training_run(tmp_path: Path) -> None:
    """Files, TensorBoard and the log come from the first step; the steps after it run without hooks."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import TrainerCallback

    hooks: list[int] = []

    class Count(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.append(sum(len(m._forward_hooks) for m in kwargs["model"].modules()))

    audit = PrecisionAudit(report_dir=tmp_path / "reports")
    args = arguments(tmp_path, 0, report_to="tensorboard")
    trainer = Trainer(model=tiny_mpt(), args=args, train_dataset=tokens(), callbacks=[audit, Count()])
    trainer.train()
    assert hooks[0] > 0
    assert hooks[1:] == [0, 0]
    report = PrecisionReport.load(tmp_path / "reports" / "precision.json")
    assert report == audit.report
    assert (report.run.model, report.run.step, report.run.dtype) == ("MptForCausalLM", 1, "bf16")
    assert (tmp_path / "reports" / "precision.html").exists()
    folders = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert len(folders) == 1, "our events belong into the Trainer's own run"
    events = EventAccumulator(str(folders.pop()))
    events.Reload()
    scalars = report_scalars(report)
    assert set(scalars) <= set(events.Tags()["scalars"])
    assert "train/loss" in events.Tags()["scalars"]
    (loss,) = events.Scalars("precision/loss")
    assert (loss.step, round(loss.value, 4)) == (1, round(scalars["precision/loss"], 4))
    (summary,) = events.Tensors("precision/report/text_summary")
    assert b"transformer.blocks.*.norm_{1,2}" in summary.tensor_proto.string_val[0]


def test_the_schema_is_documented() -> None:
    """Every field of every record, and every finding's code, is named in hf_fsdp_amp/precision_json.md."""
    import dataclasses

    from hf_fsdp_amp import contract, rules_model, rules_run, trace

    docs = (Path(__file__).parents[1] / "hf_fsdp_amp" / "precision_json.md").read_text()
    assert SCHEMA in docs
    records = [r for r in vars(trace).values() if dataclasses.is_dataclass(r)]
    for record in [*records, RunRecord, contract.Finding]:
        for field in dataclasses.fields(record):
            assert re.search(rf"\b{field.name}\b", docs), f"{record.__name__}.{field.name}"
    for rules in (rules_run, rules_model):
        for code in re.findall(r'Finding\(\s*"([a-z0-9-]+)"', Path(rules.__file__).read_text()):
            assert f"`{code}`" in docs, code
