"""Plain AMP of other architectures gives no finding of severity error, and every report can be shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

from hf_fsdp_amp.contract import Contract
from hf_fsdp_amp.findings import describe_findings, find_faults
from hf_fsdp_amp.report import PrecisionReport, RunRecord
from hf_fsdp_amp.report_html import render_html

from .audit_models import train_step

DECODER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
T5 = {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
VIT = {**DECODER, "image_size": 16, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
BART: dict[str, Any] = {"d_model": 32}
for _side in ("encoder", "decoder"):
    BART |= {f"{_side}_layers": 2, f"{_side}_ffn_dim": 32, f"{_side}_attention_heads": 2}
MIXTRAL = {**DECODER, "num_key_value_heads": 2, "num_local_experts": 4}

CASES: list[tuple[str, Any, dict[str, Any], set[str]]] = [
    ("gpt2", AutoModelForCausalLM, GPT2, set()),
    ("bert", AutoModelForCausalLM, {**DECODER, "is_decoder": True}, set()),
    ("llama", AutoModelForCausalLM, DECODER, set()),
    ("qwen3", AutoModelForCausalLM, {**DECODER, "num_key_value_heads": 2, "head_dim": 16}, set()),
    ("bloom", AutoModelForCausalLM, {"hidden_size": 32, "n_layer": 2, "n_head": 2}, set()),
    ("mamba", AutoModelForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, {"logits-upcast"}),
    ("mixtral", AutoModelForCausalLM, MIXTRAL, {"router-half", "experts-fp32"}),
    ("t5", AutoModelForSeq2SeqLM, T5, set()),
    ("bart", AutoModelForSeq2SeqLM, BART, {"logits-upcast"}),
    ("vit", AutoModelForImageClassification, VIT, set()),
    ("resnet", AutoModelForImageClassification, RESNET, set()),
]


@pytest.mark.parametrize(("name", "auto", "sizes", "expected"), CASES, ids=[case[0] for case in CASES])
def test_plain_amp_has_no_errors(name: str, auto: Any, sizes: dict[str, Any], expected: set[str]) -> None:
    torch.manual_seed(0)
    images = auto is AutoModelForImageClassification
    try:
        config = AutoConfig.for_model(name, **sizes, **({} if images else {"vocab_size": 128}))
    except ValueError:
        pytest.skip(f"this transformers has no {name}")
    model = auto.from_config(config)

    def call(ids: torch.Tensor) -> Any:
        if images:
            return model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1]))
        return model(input_ids=ids, labels=ids)

    trace = train_step(model, call=call)
    findings = find_faults(trace, Contract(dtype="bf16"))
    assert {f.code for f in findings} == expected, describe_findings(findings)
    assert all(f.severity != "error" for f in findings)
    backward = [op for op in trace.ops if op.phase == "backward"]
    rootless = sum(op.count for op in backward if not op.module)
    assert rootless <= 0.1 * sum(op.count for op in backward)
    report = PrecisionReport(trace, findings, RunRecord(model=name, dtype="bf16"))
    lines = report.to_text().splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert PrecisionReport.from_json(report.to_json()) == report
    assert "<html" in render_html(report)
