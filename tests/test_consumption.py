"""`read_consumption`: what autocast does to each parameter, on real architectures, and that nothing is left changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MptConfig, MptForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_fsdp_amp.consumption import Consumption, describe_experts, read_consumption
from hf_fsdp_amp.fp32_choice import choose_fp32, match_names
from hf_fsdp_amp.policy import resolve_policy

from .architectures import build
from .distributed.exact_scenarios import tiny_mixtral
from .distributed.training import tiny_llama, tiny_mpt

BF16 = torch.bfloat16
CUDA_BUILD = torch.version.cuda is not None
needs_cuda_build = pytest.mark.skipif(not CUDA_BUILD, reason="fake cuda tensors need the CUDA build of torch")


def read(model: nn.Module, device_type: str = "cpu") -> Consumption:
    consumption = read_consumption(model, BF16, device_type)
    assert consumption.traced, consumption.reason
    assert not consumption.low & consumption.fp32
    assert consumption.low | consumption.fp32 == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    return consumption


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def test_matmuls_low_norms_and_embeddings_fp32(device_type: str) -> None:
    consumption = read(tiny_mpt(), device_type)
    assert {name.rsplit(".", 2)[-2] for name in consumption.low} == {"Wqkv", "out_proj", "up_proj", "down_proj"}
    assert consumption.evidence["transformer.wte.weight"] == "embedding"
    assert consumption.evidence["transformer.norm_f.weight"] == "native_layer_norm"


def test_untied_head_is_low_and_a_tied_one_fp32() -> None:
    assert "lm_head.weight" in read(tiny_llama()).low
    tied = read(tiny_llama(tie_word_embeddings=True))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tied.fp32


def test_experts_of_a_grouped_matmul_are_fp32_and_told() -> None:
    consumption = read(tiny_mixtral())
    assert {name.rsplit(".", 1)[1] for name in consumption.fp32_experts} == {"gate_up_proj", "down_proj"}
    line = describe_experts(consumption, BF16)
    assert line is not None
    assert "plain AMP computes them in fp32" in line
    assert describe_experts(read(tiny_llama()), BF16) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "causal"), ("bert", "masked"), ("t5", "seq2seq"), ("vit", "vision"), ("resnet", "vision")],
)
def test_other_kinds_are_traced(name: str, kind: str) -> None:
    consumption = read(build(name, kind).model)
    assert consumption.low
    assert consumption.fp32


def test_weight_that_is_normalised_before_its_convolution_is_fp32() -> None:
    """The case that the module's class gets wrong: Bit standardises its convolution weights in fp32."""
    consumption = read(build("bit", "vision").model)
    assert any("conv" in name and name in consumption.fp32 for name in consumption.evidence)


def test_frozen_bf16_base_and_trainable_adapters() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_llama().to(BF16)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    consumption = read(model)
    assert all(name in consumption.low for name, _ in model.named_parameters() if "lora_" in name)


def test_model_of_real_size_on_meta() -> None:
    with torch.device("meta"):
        model = MptForCausalLM(MptConfig())
    assert len(read(model).low) == 4 * model.config.n_layers  # four matmuls a block
    assert all(p.device.type == "meta" for p in model.parameters())


def test_nothing_is_left_changed() -> None:
    model = tiny_llama().eval()
    twin = copy.deepcopy(model)
    before = [(id(m), dict(vars(m))) for m in model.modules()]
    random = torch.get_rng_state()
    read(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert not model.training
    assert [(id(m), dict(vars(m))) for m in model.modules()] == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(type(b) is torch.Tensor for b in model.buffers())
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)


class Broken(PreTrainedModel):
    """Cannot be followed: its forward branches on a value."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.left_behind = input_ids
        raise RuntimeError("planted\nsecond line")


def test_fallback_by_class_says_why_and_restores() -> None:
    model = Broken(PreTrainedConfig())
    before = dict(vars(model))
    consumption = read_consumption(model, BF16, "cpu")
    assert not consumption.traced
    assert consumption.reason == "RuntimeError: planted"
    assert consumption.low == {"linear.weight", "linear.bias"}
    assert consumption.fp32 == {"norm.weight", "norm.bias", "scale"}
    assert vars(model) == before
    assert not torch.is_autocast_enabled("cpu")
    choice = choose_fp32(model, resolve_policy("exact", "bf16", device_type="cpu"))
    assert choice.names == consumption.fp32
    assert "by the class of the owning module" in choice.lines[0]
    assert "planted" in choice.lines[0]


def test_amp_keeps_batch_norms_everywhere_and_layer_norms_on_cpu() -> None:
    resnet = build("resnet", "vision").model
    for device_type in ("cpu", "cuda"):
        names = choose_fp32(resnet, resolve_policy("amp", "bf16", device_type=device_type)).names
        assert names
        assert all("normalization" in name for name in names)
    assert choose_fp32(tiny_mpt(), resolve_policy("amp", "bf16", device_type="cuda")).names == set()
    on_cpu = choose_fp32(tiny_mpt(), resolve_policy("amp", "bf16", device_type="cpu")).names
    assert {name.rsplit(".", 2)[-2] for name in on_cpu} == {"norm_1", "norm_2", "norm_f"}


def test_keep_fp32_patterns() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    assert match_names(model, [r"lm_head"]) == {"lm_head.weight", "model.embed_tokens.weight"}
    assert len(match_names(model, ["q_proj", r"norm\.weight$"])) == 2 + 1 + 4
    with pytest.raises(ValueError, match=r"keep_fp32='q_porj' matches no parameter. Near ones: .*q_proj"):
        match_names(model, ["q_porj"])
    with pytest.raises(ValueError, match="is no regular expression"):
        match_names(model, ["("])
    with pytest.raises(ValueError, match="keep_fp32 needs FSDP2"):
        choose_fp32(model, resolve_policy("amp", "bf16", fsdp_version=1, keep_fp32=("norm",)))
