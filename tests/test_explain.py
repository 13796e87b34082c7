"""`explain`: dry runs under CUDA's rules, without a GPU; a CUDA build of torch is needed, as plain pip installs it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MptConfig, ResNetConfig, T5Config
from transformers.utils import import_utils

from hf_fsdp_amp import PrecisionReport, compare_presets, explain
from hf_fsdp_amp.cli import main
from hf_fsdp_amp.diff import compare_reports
from hf_fsdp_amp.explain import EXPLAINED
from hf_fsdp_amp.fake_device import missing_support
from hf_fsdp_amp.report_html import render_html
from tests.architectures import build, names

pytestmark = pytest.mark.skipif(
    missing_support("cuda") is not None, reason="this torch is built without CUDA, whose rules it cannot follow"
)
TINY = {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 128, "max_seq_len": 64}


def tiny_mpt() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MptConfig(**TINY))


def codes(report: PrecisionReport, severity: str = "error") -> list[str]:
    return [f.code for f in report.findings if f.severity == severity]


def test_presets_under_cudas_rules() -> None:
    reports = {preset: explain(MptConfig(**TINY), preset=preset, world_size=4) for preset in EXPLAINED}
    for preset, report in reports.items():
        assert report.trace.source == "fake"
        assert report.trace.guesses == []
        assert report.run.preset == preset
        assert {op.phase for op in report.trace.ops} >= {"forward", "backward"}
        assert {p.gradient for p in report.trace.parameters} == {"fp32"}
    assert codes(reports["stock-fsdp2"])[0] == "autocast-missing"
    assert "reduce-half" in codes(reports["stock-fsdp1"])
    for preset in ("amp", "exact", "ddp"):
        assert codes(reports[preset]) == []
    assert codes(reports["exact"], "note") == []
    assert set(codes(reports["amp"], "note")) == {"norm-half", "embedding-half"}
    norms = [op for op in reports["amp"].trace.ops if op.op == "aten.native_layer_norm.default"]
    assert {op.inputs[0] for op in norms} == {"fp32"}, "CUDA's autocast runs layer_norm in fp32, CPU's does not"
    assert reports["exact"].trace.gathered_bytes() > reports["amp"].trace.gathered_bytes() > 0
    assert reports["ddp"].trace.gathered_bytes() == 0


def test_a_report_is_the_live_audits_report(tmp_path: Path) -> None:
    """Saved, shown, drawn and compared by the same code."""
    amp, stock = explain(tiny_mpt(), seq_len=16), explain(tiny_mpt(), preset="stock-fsdp2", seq_len=16)
    again = PrecisionReport.load(amp.save(tmp_path / "precision.json"))
    assert again.trace == amp.trace
    assert "preset amp" in amp.to_text()
    assert "<html" in render_html(amp)
    difference = compare_reports(stock, amp)
    assert difference
    assert main(["diff", str(stock.save(tmp_path / "stock.json")), str(tmp_path / "precision.json")]) == 0
    assert main(["show", str(tmp_path / "stock.json")]) == 1


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("version", [1, 2])
def test_dtypes_devices_and_versions(device_type: str, dtype: str, version: int) -> None:
    report = explain(tiny_mpt(), dtype=dtype, device_type=device_type, fsdp_version=version, seq_len=16)
    matmuls = {op.inputs[0] for op in report.trace.ops if op.op == "aten.mm.default" and op.phase == "forward"}
    assert matmuls == {dtype}
    missing_scaler = dtype == "fp16" and device_type == "cpu"
    assert codes(report) == (["scaler-missing"] if missing_scaler else [])


@pytest.mark.parametrize("name", ["vit", "whisper", "t5", "resnet"])
def test_vision_speech_and_encoder_decoder(name: str) -> None:
    report = explain(build(name, dict(names())[name]).model, preset="exact", seq_len=16)
    assert not {"dry-run-incomplete", "dtype-mismatch"} & {f.code for f in report.findings}
    assert any(op.phase == "backward" for op in report.trace.ops)


CRASHES = {
    "fnet": "fnet.encoder.layer.*.fourier.output.LayerNorm",
    "inkling2_loop_text": "model.layers.*.mlp.gate",
    "inkling2_text": "model.layers.*.mlp.gate",
    "minimax": "model.layers.*.self_attn",
    "mra": "mra.encoder.layer.*.attention.output.dense",
    "openai-gpt": "transformer.h.*.attn",
}


@pytest.mark.parametrize("name", CRASHES)
def test_what_crashes_under_stock_fsdp2_is_said_to(name: str) -> None:
    """Fake kernels let most of these mixes pass; real ones don't. With `amp` none is left."""
    tiny = build(name, dict(names())[name])
    stock = explain(tiny.model, preset="stock-fsdp2", inputs=tiny.inputs)
    mismatches = [f for f in stock.findings if f.code == "dtype-mismatch"]
    assert mismatches[0].module == CRASHES[name]
    assert mismatches[0].severity == "error"
    assert not [f for f in explain(tiny.model, inputs=tiny.inputs).findings if f.code == "dtype-mismatch"]


class LowPrecisionNorm(nn.LayerNorm):
    """Casts its input and weight to autocast's dtype where CUDA's autocast is on, and runs with autocast off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def low(tensor: torch.Tensor) -> torch.Tensor:
            enabled = torch.is_autocast_enabled("cuda")
            return tensor.to(torch.get_autocast_dtype("cuda")) if enabled else tensor

        x, weight, bias = low(x), low(self.weight), low(self.bias)
        with torch.autocast("cuda", enabled=False):
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class WrongAutocast(nn.Module):
    """A model whose block runs in autocast of the device's default dtype, as accelerate 0.23 ran all of it."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        self.config = MptConfig(**TINY)
        self.right = right
        self.embed = nn.Embedding(16, 8)
        self.proj = nn.Linear(8, 8)
        self.norm = LowPrecisionNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.proj(self.embed(input_ids))
        with contextlib.nullcontext() if self.right else torch.autocast("cuda", torch.float16):
            hidden = self.norm(hidden)
        logits = self.head(hidden)
        return {
            "loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), input_ids.flatten()),
            "logits": logits,
        }


def test_a_low_precision_norm_under_the_wrong_dtype_is_named() -> None:
    wrong = explain(WrongAutocast(right=False), seq_len=8)
    named = {(f.code, f.module) for f in wrong.findings if f.severity == "error"}
    assert ("dtype-changes-across-norm", "norm") in named
    right = explain(WrongAutocast(right=True), seq_len=8)
    assert codes(right) == []


def state() -> list[Any]:
    return [
        *(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(d) for d in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.cuda.get_device_capability,
        torch.cuda.amp.common.amp_definitely_not_available,
        getattr(import_utils, "is_fake_tensor", None),
        torch.random.get_rng_state().tolist(),
    ]


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.config = MptConfig(**TINY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.cache = self.inner(input_ids.float()[..., :4])
        raise LookupError("no such thing")


@pytest.fixture
def fp16_outside() -> Iterator[None]:
    """Called inside of somebody's autocast and no_grad."""
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        yield


@pytest.mark.usefixtures("fp16_outside")
def test_everything_is_as_it_was() -> None:
    model = tiny_mpt()
    raises = Raises()
    before, weights = state(), dict(model.named_parameters())
    attributes = {n: dict(m.__dict__) for n, m in model.named_modules()}
    model.eval()
    explain(model, seq_len=16)
    assert not model.training
    assert {n: dict(m.__dict__) for n, m in model.named_modules()}.keys() == attributes.keys()
    assert all(p is weights[n] and p.grad is None for n, p in model.named_parameters())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    report = explain(raises, seq_len=8)
    assert state() == before
    stopped = next(f for f in report.findings if f.code == "dry-run-incomplete")
    assert "LookupError: no such thing" in stopped.evidence
    assert "ops were seen" in stopped.evidence


class Branches(nn.Module):
    """Control flow on data: on a mask, which is known, and on an activation, which is a guess."""

    def __init__(self) -> None:
        super().__init__()
        self.config = MptConfig(**TINY)
        self.embed = nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if (input_ids > 0).all():
            hidden = hidden.sin()
        if hidden.max() > 3:
            hidden = hidden.tan()
        return hidden


def test_known_data_is_followed_and_guesses_are_told() -> None:
    report = explain(Branches(), seq_len=8)
    ran = {op.op for op in report.trace.ops}
    assert "aten.sin.default" in ran
    assert "aten.tan.default" not in ran
    guesses = "\n".join(report.trace.guesses)
    assert "model: a condition on what the model computes was taken as false" in guesses
    assert "makes no loss" in guesses
    assert "assumed" in report.to_text()


def test_bytes() -> None:
    report = explain(MptConfig(**TINY), preset="ddp", world_size=1, batch_size=2, seq_len=16)
    numel = sum(p.numel for p in report.trace.parameters)
    memory = report.trace.memory
    assert memory is not None
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * numel, 4 * numel, 8 * numel)
    assert memory.logits == 2 * 16 * 128 * (2 + 4)
    assert memory.residual == 2 * 2 * 16 * 32 * 4
    assert memory.saved > memory.residual
    sharded = explain(MptConfig(**TINY), world_size=4, seq_len=16).trace.memory
    assert sharded is not None
    assert numel <= sharded.parameters < numel * 1.1


def test_comparison_of_presets() -> None:
    comparison = compare_presets(MptConfig(**TINY), world_size=4, seq_len=16)
    rows = dict(comparison.rows())
    assert list(comparison.reports) == ["stock-fsdp2", "amp", "exact", "ddp"]
    shares = [float(cell.rstrip("%")) for cell in rows["ops unlike plain AMP"]]
    assert shares[0] > shares[1] > shares[2] == shares[3] == 0
    assert rows["reduced in"] == ["bf16", "fp32", "fp32", "fp32"]
    assert all(len(line) <= 80 for line in comparison.to_text().splitlines())
    assert json.loads(comparison.to_json())["table"]["autocast"]["stock-fsdp2"] == "off"


def test_sequences_beyond_the_positions_are_cut() -> None:
    report = explain(MptConfig(**TINY), seq_len=2048)
    assert any("beyond the model's 64 positions" in note for note in report.trace.notes)
    assert report.run.args["seq_len"] == "64"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "stock"}, "preset='stock' is not known: use one of 'amp', 'exact', 'fsdp', 'stock-fsdp1'"),
        ({"dtype": "fp32"}, "dtype='fp32' is not supported"),
        ({"fsdp_version": 3}, "fsdp_version=3 is not supported"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(MptConfig(**TINY), **options)
    with pytest.raises(ValueError, match="has no parameters"):
        explain(nn.ReLU())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MptConfig(**TINY).save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["explain", str(model), "--world-size", "4", "--json", str(tmp_path / "out.json")]) == 0
    assert "preset amp, 4 ranks, cuda" in capsys.readouterr().out
    assert PrecisionReport.load(tmp_path / "out.json").trace.source == "fake"
    mpt = ["explain", "--model-type", "mpt", "--set", *(f"{k}={v}" for k, v in TINY.items())]
    assert main([*mpt, "--preset", "stock-fsdp2", "--html", str(tmp_path / "out.html")]) == 1
    assert (tmp_path / "out.html").exists()
    assert main([*mpt, "--compare", "--device", "cpu", "--dtype", "fp16"]) == 0
    assert "ops unlike plain AMP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such-model"], "no/such-model: no config could be loaded (neither a folder nor a file here"),
        (["--model-type", "lama"], "--model-type lama: not known. Near ones: llama"),
        (["--model-type", "llama", "--set", "hiden_size=3"], "llama has no such setting. Near ones: hidden_size"),
        (["--model-type", "llama", "--set", "hidden_size"], "write it as name=value"),
        (["--model-type", "llama", "--device", "abacus"], "device_type='abacus' is not one that autocast knows"),
        ([], "name a model (hub id, folder or config.json), or --model-type"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert len(said) == 1


def test_configs_of_other_kinds_become_models() -> None:
    for config in (
        T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2),
        ResNetConfig(depths=[1, 1, 1, 1]),
    ):
        report = explain(config, preset="exact", seq_len=8)
        assert not {"dry-run-incomplete", "dtype-mismatch"} & {f.code for f in report.findings}
