"""The rank side of `parity.py`: train tiny models under DDP and under presets with FSDP, the same data, and compare."""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_fsdp_amp import FSDPAutocast, enable_cpu_fsdp, patch_model
from hf_fsdp_amp.audit_callback import PrecisionAudit
from hf_fsdp_amp.param_dtypes import canonical_name

VOCAB, LENGTH = 128, 16
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=VOCAB, max_seq_len=64)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=VOCAB, **_SIZES)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_head=2, n_layer=2, vocab_size=VOCAB, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, n_positions=64
        )
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            vocab_size=VOCAB,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
    "bert": lambda: tf.BertForSequenceClassification(
        tf.BertConfig(vocab_size=VOCAB, num_labels=3, **_SIZES, **_NO_DROPOUT)
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(vocab_size=VOCAB, num_local_experts=4, num_key_value_heads=2, **_SIZES)
    ),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **_SIZES, **_NO_DROPOUT)
    ),
    "resnet": lambda: tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    ),
    "whisper": lambda: tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=VOCAB,
            max_source_positions=32,
            max_target_positions=64,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ),
}


@dataclass
class Result:
    """One way of training one architecture.

    Args:
        losses: logged loss of each step.
        sha256: over all parameters at the end, in name order.
        gathered, reduced: bytes each rank gets from all-gathers and gives to reductions in step 1.
        collectives: how many of these there were.
        parameters, gradients: full tensors at the end, and before step 1's update; not written to JSON.
    """

    losses: list[float] = field(default_factory=list)
    sha256: str = ""
    gathered: int = 0
    reduced: int = 0
    collectives: int = 0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


class FirstGradients(TrainerCallback):
    """Keeps the full gradients of step 1; opens the autocast that accelerate leaves out for fp16 on CPU."""

    def __init__(self, patch: str | None) -> None:
        self.patch = patch
        self.gradients: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.patch is not None:
            patch_model(kwargs["model"], self.patch)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.gradients = whole(kwargs["model"], gradients=True)


def whole(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """All parameters, or their gradients, gathered whole, by name."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=gradients):
            return _whole(model, gradients)
    return _whole(model, gradients)


def _whole(model: nn.Module, gradients: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[canonical_name(name)] = full.float().clone()
    return found


def rows(architecture: str, count: int) -> Dataset:
    """Seeded random examples of the kind that the architecture takes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=generator).tolist()
    if architecture in ("vit", "resnet"):
        images = torch.randn(count, 3, 32, 32, generator=generator).tolist()
        return Dataset.from_dict({"pixel_values": images, "labels": [i % 3 for i in range(count)]})
    if architecture == "whisper":
        sound = torch.randn(count, 80, 64, generator=generator).tolist()
        return Dataset.from_dict({"input_features": sound, "labels": ids})
    if architecture == "bert":
        return Dataset.from_dict({"input_ids": ids, "labels": [i % 3 for i in range(count)]})
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def fsdp_arguments(model: Any, version: int) -> dict[str, Any]:
    """FSDP per block of the model.

    Three faults of accelerate 1.15 under FSDP2 are stepped around, which stock training meets as well: it shards an
    embedding twice where the model names a module around it a block (BERT, ViT), asks for embeddings of models that
    have none (ResNet), and leaves out of a shared weight's unit what else owns it (T5's encoder and decoder).
    """
    blocks = [name for name in model._no_split_modules or () if "Embeddings" not in name]
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
        model.get_input_embeddings = lambda: None
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Embedding) and child.weight is getattr(embedding, "weight", None):
                setattr(parent, name, embedding)
    return {"fsdp": True, "fsdp_config": {"version": version, "transformer_layer_cls_to_wrap": blocks or None}}


def train(architecture: str, preset: str, options: Any) -> Result:
    """Train once: preset ``ddp``, ``stock`` or one of `FSDPAutocast`'s."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an Accelerator with FSDP leaves it set for the next one
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture]()
    fsdp = {} if preset == "ddp" else fsdp_arguments(model, options.fsdp)
    first = FirstGradients(options.dtype if preset == "ddp" and options.dtype == "fp16" else None)
    with tempfile.TemporaryDirectory() as folder:
        audit: Any = PrecisionAudit(report_dir=folder)
        if preset not in ("ddp", "stock"):
            audit = FSDPAutocast(preset, report_dir=folder)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=options.grad_accum,
                max_grad_norm=options.max_grad_norm,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
                **{options.dtype: True},
                **fsdp,
            ),
            train_dataset=rows(architecture, 64),
            data_collator=default_data_collator,
            callbacks=[audit, first],
        )
        trainer.train()
    return summarize(trainer, audit.report, first.gradients)


def summarize(trainer: Trainer, report: Any, gradients: dict[str, torch.Tensor]) -> Result:
    """The numbers of one finished training."""
    parameters = whole(trainer.model)
    sha = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
    sent = [c for c in report.trace.collectives if c.phase in ("forward", "backward", "recompute")]
    gathers = [c for c in sent if c.kind == "all_gather"]
    reductions = [c for c in sent if c.kind in ("reduce_scatter", "all_reduce")]
    return Result(
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        sha256=sha.hexdigest(),
        gathered=sum(c.bytes for c in gathers),
        reduced=sum(c.bytes for c in reductions),
        collectives=sum(c.count for c in gathers + reductions),
        parameters=parameters,
        gradients=gradients,
    )


def compare(architecture: str, options: Any) -> dict[str, Any]:
    """One architecture: DDP + autocast, and each preset against it."""
    reference = train(architecture, "ddp", options)
    found: dict[str, Any] = {"ddp": _plain(reference)}
    for preset in options.presets:
        try:
            result = train(architecture, preset, options)
        except RuntimeError as error:  # a dtype that a kernel rejects, on every rank alike: a result, and shown as one
            found[preset] = {"error": str(error).splitlines()[0], "identical": False, "same_numbers": False}
            continue
        found[preset] = {
            **_plain(result),
            "loss_difference": max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True)),
            "gradient_difference": _difference(result.gradients, reference.gradients),
            "parameter_difference": _difference(result.parameters, reference.parameters),
            "identical": result.sha256 == reference.sha256 and result.losses == reference.losses,
            "same_numbers": same_numbers(result, reference),
        }
    return found


def same_numbers(ours: Result, theirs: Result) -> bool:
    """Every loss and step 1's gradients to the bit, and parameters but for AdamW's last bit.

    CPU kernels compute the elements beyond a whole vector register by other instructions; sharding moves which these
    are, where a parameter's rows are no multiple of it (ResNet).
    """
    gradients = _difference(ours.gradients, theirs.gradients) < 1e-9
    return ours.losses == theirs.losses and gradients and _difference(ours.parameters, theirs.parameters) < 1e-7


def _plain(result: Result) -> dict[str, Any]:
    return {k: v for k, v in vars(result).items() if k not in ("parameters", "gradients")}


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items() if name in ours)


def run_rank(options: Any) -> dict[str, Any]:
    """All architectures, on every rank of the group that torchrun started."""
    enable_cpu_fsdp()
    tf.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    try:
        return {architecture: compare(architecture, options) for architecture in options.arch}
    finally:
        gc.collect()
        dist.destroy_process_group()
