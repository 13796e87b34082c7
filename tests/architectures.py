"""Tiny models of transformers' architectures, built from their configs by one rule; none is listed by hand.

``python -m tests.architectures`` prints which architectures build and train in fp32, and why the others don't.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_fsdp_amp.dummy_inputs import candidate_inputs

# one head per architecture, the first of these kinds that it has
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "text": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
# field name (whole) -> small value; the first pattern that matches counts
SMALL: tuple[tuple[str, int], ...] = (
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|attention_)*(layers|n_layer|n_layers|num_layers)", 2),
    (r"(.*_)?num_(encoder_|decoder_)?(hidden_)?layers?", 2),
    (r"n_layers?|num_blocks|encoder_layers|decoder_layers|depth", 2),
    (r"(.*_)?(num_)?(key_value|kv)_heads|num_kv_heads|n_head_kv", 2),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|(.*_)?attention_heads|linear_num_(key|value)_heads", 2),
    (r"(num_)?(local_|routed_)?experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k|moe_k|n_group|topk_group|n_shared_experts|first_k_dense_replace", 1),
    (r"(.*_)?vocab_size", 128),
    (r"(.*_)?max_(position_embeddings|seq_len|sequence_length)|n_positions|n_ctx|max_source_positions", 64),
    (r"image_size|input_size", 32),
    (r"patch_size", 8),
    (r"num_groups", 4),
    (r"(.*_)?head_dim|d_kv|(linear_)?(key|value)_head_dim|v_head_dim|qk_nope_head_dim|qk_rope_head_dim", 16),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"(moe_)?(.*_)?intermediate_size|(encoder_|decoder_)?ffn_dim|d_ff|d_inner|n_inner|ffn_hidden_size", 64),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|hidden_dim|projection_dim|word_embed_proj_dim", 32),
    (r"num_labels|num_classes", 3),
)
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")


@dataclass
class Tiny:
    """A tiny model, and inputs with which it gives a loss.

    Args:
        name: model type in transformers.
        kind: which of `KINDS`.
        model: seeded, in fp32, on CPU, dropout off.
        inputs: keyword arguments of its forward.
        candidate: which of `candidate_inputs` they are.
    """

    name: str
    kind: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    candidate: int = 0


def names() -> list[tuple[str, str]]:
    """Model type and kind of every architecture with a head to train, in order."""
    found: dict[str, str] = {}
    for kind, mapping in KINDS.items():
        for model_type in getattr(modeling_auto, mapping):
            if model_type in CONFIG_MAPPING_NAMES:
                found.setdefault(model_type, kind)
    return sorted(found.items())


def build(name: str, kind: str) -> Tiny:
    """The tiny model of one architecture, with inputs that give a finite loss and gradients in fp32.

    Raises:
        Exception: whatever its config, constructor or forward raises; it then does not count as buildable.
    """
    config = shrink(type(AutoConfig.for_model(name)))
    head = getattr(modeling_auto, KINDS[kind])[name]
    head = head[0] if isinstance(head, (tuple, list)) else head
    torch.manual_seed(0)
    model = getattr(transformers, head)(config).float().train()
    if sum(p.numel() for p in model.parameters()) > 30e6:
        raise ValueError("the rule leaves it too large")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    candidate, inputs = find_inputs(model)
    return Tiny(name, kind, model, inputs, candidate)


def find_inputs(model: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    """The first dummy inputs with which the model trains, and which of the candidates they are."""
    error: Exception | None = None
    for index, inputs in enumerate(candidate_inputs(model, "cpu", batch_size=2, seq_len=16)):
        inputs = {k: vary(v, k) for k, v in inputs.items()}
        try:
            loss = loss_of(model, inputs)
            loss.backward()
        except Exception as raised:  # the next candidate may fit
            error = raised
            continue
        finite = bool(loss.isfinite())
        model.zero_grad()
        if finite:
            return index, inputs
        error = ValueError("the loss is not finite")
    raise error or ValueError("no inputs")


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or the mean square of its first floating output."""
    torch.manual_seed(1)
    output = model(**inputs)
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss.float().mean()
    first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    return first.float().square().mean()


def vary(value: torch.Tensor, name: str) -> torch.Tensor:
    """The dummy's shape and dtype, with values that differ."""
    generator = torch.Generator().manual_seed(len(name))
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    high = 3 if name == "labels" and value.dim() == 1 else 100
    return torch.randint(3 if high > 3 else 0, high, value.shape, generator=generator)


def shrink(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default config with its sizes made small by field name, configs inside it as well."""
    default = cls()
    changes: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        inner = getattr(default, name, None)
        if isinstance(inner, PreTrainedConfig):
            changes[name] = shrink(type(inner)).to_dict()
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            changes[name] = small_value(name, value)
        elif isinstance(value, float) and "dropout" in name:
            changes[name] = 0.0
        elif isinstance(value, (list, tuple)) and name in ("layer_types", "hidden_sizes", "depths"):
            changes[name] = shorten(name, list(value))
    changes.update({name: 1 for name in IDS if isinstance(getattr(default, name, None), int)})
    return cls(**{**changes, "use_cache": False})


def small_value(name: str, value: int) -> int:
    for pattern, small in SMALL:
        if re.fullmatch(pattern, name):
            return min(small, value)
    return value


def shorten(name: str, values: list[Any]) -> list[Any]:
    if name == "layer_types":
        kinds = list(dict.fromkeys(values))[:2]
        return (kinds * 2)[:2]
    return [8 * 2**i for i in range(len(values))] if name == "hidden_sizes" else [1] * len(values)


def all_tiny() -> Iterator[Tiny | tuple[str, str, str]]:
    """Every architecture: the tiny model, or name, kind and the reason why there is none."""
    for name, kind in names():
        try:
            yield build(name, kind)
        except Exception as error:  # told, not hidden: the table below prints it
            line = str(error).strip().splitlines()
            yield name, kind, f"{type(error).__name__}: {line[0][:110] if line else ''}"


def main() -> None:
    """Print the table of those that don't build, by reason, and the counts."""
    built: collections.Counter[str] = collections.Counter()
    failed = 0
    for tiny in all_tiny():
        if isinstance(tiny, Tiny):
            built[tiny.kind] += 1
        else:
            failed += 1
            print(f"{tiny[0]:28} {tiny[1]:8} {tiny[2]}")
    print(f"{sum(built.values())} build and train in fp32 ({dict(built)}), {failed} don't")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main())
