"""The formula for all-gathered bytes, on models of real size that are never allocated."""

from __future__ import annotations

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from hf_fsdp_amp import resolve_policy
from hf_fsdp_amp.costs import gathered_bytes, gathered_bytes_per_step, padded_numel
from hf_fsdp_amp.fp32_choice import choose_fp32


def bytes_of(width: int, layers: int, preset: str) -> tuple[int, int]:
    """Bytes a pass and a step of an MPT of that size, on 8 ranks."""
    with torch.device("meta"):
        model = MptForCausalLM(MptConfig(d_model=width, n_heads=16, n_layers=layers, vocab_size=50368))
    names = choose_fp32(model, resolve_policy(preset, "bf16")).names
    arguments = (model, torch.bfloat16, names, 8)
    return gathered_bytes(*arguments), gathered_bytes_per_step(*arguments)


@pytest.mark.parametrize(("width", "layers"), [(2048, 24), (4096, 32)], ids=["1.3B", "7B"])
def test_exact_gathers_at_most_a_twentieth_more_than_amp(width: int, layers: int) -> None:
    (_, amp), (_, exact) = bytes_of(width, layers, "amp"), bytes_of(width, layers, "exact")
    assert 1.0 < exact / amp <= 1.05


def test_mpt_7b_in_gib() -> None:
    amp, exact = bytes_of(4096, 32, "amp")[0], bytes_of(4096, 32, "exact")[0]
    assert [round(x / 2**30, 1) for x in (amp, exact)] == [12.4, 12.8]


def test_padding() -> None:
    assert padded_numel(torch.Size([5, 3]), 2) == 18
    assert padded_numel(torch.Size([4, 3]), 2) == 12
    assert padded_numel(torch.Size([]), 4) == 4
