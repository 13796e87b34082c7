"""What a finished run leaves behind: the loss curve, a sample and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer


def draw_losses(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """Training and validation loss over the steps, as a PNG.

    Args:
        history: `TrainerState.log_history`.
        path: file to write.
        title: above the curve.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o--")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def sample(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: int,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> str:
    """A continuation of `prompt` by the saved model, sampled with a fixed seed, on this process alone.

    From the saved files and not from the sharded model: FSDP1's `generate` fails ("'weight' must be 2-D",
    transformers 5.24), and this shows besides that what was saved can be used.

    Args:
        folder: the saved model.
        prompt: text to continue.
        tokens: how many tokens to add, at most.
        dtype: autocast dtype, that of the training.
        trust_remote_code: run code that came with the checkpoint; without it such a model cannot be loaded again.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code).eval()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    enabled = dtype is not torch.float32
    torch.manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", dtype if enabled else None, enabled=enabled):
        output = model.generate(
            inputs["input_ids"],
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.batch_decode(output, skip_special_tokens=True)[0]


def write_card(trainer: Trainer, model_name: str, dataset: str) -> None:
    """The Trainer's model card, in the output folder."""
    trainer.create_model_card(model_name=model_name, dataset=dataset, tags=["text-generation", "fsdp"])
