"""What the 2-rank scenarios share: tiny models, token data, a Trainer that looks at dtypes, and training arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM, Trainer, TrainingArguments

VOCAB, LENGTH = 128, 16


def tiny_mpt(**changes: Any) -> MptForCausalLM:
    """A 2-layer MPT with width 32, seeded, fp32."""
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=VOCAB, max_seq_len=64, **changes)
    return MptForCausalLM(config)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A 2-layer Llama with width 32, seeded, fp32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": VOCAB, **sizes, **changes}))


def tokens(rows: int = 64, seed: int = 0) -> Dataset:
    """Random token rows with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def arguments(
    folder: Path, version: int = 2, fsdp_config: dict[str, Any] | None = None, **changes: Any
) -> TrainingArguments:
    """bf16 training for 3 steps on CPU with FSDP of `version` (0: none), wrapped per transformer block."""
    fsdp: dict[str, Any] = {}
    if version:
        fsdp = {"fsdp": True, "fsdp_config": {"version": version, **(fsdp_config or {})}}
    defaults: dict[str, Any] = {
        "bf16": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        "learning_rate": 1e-3,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **fsdp, **changes})


class LookingTrainer(Trainer):
    """A Trainer that notes, per forward, the dtype of the loss it gets and the autocast state inside the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, set[str]] = {"loss": set(), "logits": set(), "autocast": set(), "eval_autocast": set()}
        self._look(self.model)

    def _look(self, model: nn.Module) -> None:
        linear = next(m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n)
        linear.register_forward_pre_hook(self._note_autocast)

    def _note_autocast(self, module: nn.Module, args: Any) -> None:
        enabled = torch.is_autocast_enabled("cpu")
        state = str(torch.get_autocast_dtype("cpu")) if enabled else "off"
        self.seen["autocast" if module.training else "eval_autocast"].add(state)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.seen["loss"].add(str(loss.dtype))
        logits = outputs["logits"] if isinstance(outputs, dict) else None
        if logits is not None:
            self.seen["logits"].add(str(logits.dtype))
        return (loss, outputs) if return_outputs else loss

    def report(self) -> dict[str, Any]:
        """What was seen, sorted, with the logged losses."""
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        return {**{key: sorted(value) for key, value in self.seen.items()}, "losses": losses}
