#!/usr/bin/env python
"""Fine-tune MPT (or any causal language model) with FSDP and true mixed precision.

    torchrun --nproc-per-node=2 scripts/finetune_mpt.py --fsdp --fsdp_config scripts/configs/fsdp2.json \
        --bf16 --output_dir outputs/mpt --model_name_or_path mosaicml/mpt-7b --train_file data.jsonl
    accelerate launch --config_file scripts/configs/fsdp2.yaml scripts/finetune_mpt.py --output_dir outputs/mpt

Add --use_cpu to rehearse the same on CPU.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_checkpoint import checkpoint_to_resume
from finetune_data import DataArguments, UsageError, check_arguments, load_rows, make_blocks
from finetune_model import ModelArguments, load_config, load_model, load_tokenizer
from finetune_report import draw_losses, sample, write_card
from leave import leave
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from hf_fsdp_amp import FSDPAutocast, enable_cpu_fsdp, log, resolve_policy

SAMPLE_PROMPT = "# json\ndef dumps(obj, indent=None):\n"


@dataclass
class PrecisionArguments:
    """How mixed precision is done under FSDP."""

    preset: str = field(
        default="amp", metadata={"help": "Preset of FSDPAutocast; `stock` is what the Trainer does without it."}
    )
    reduce_dtype: str = field(default="fp32", metadata={"help": "Dtype of the gradient reduction."})


@dataclass
class SampleArguments:
    """The sample at the end."""

    sample_prompt: str = field(default=SAMPLE_PROMPT, metadata={"help": "What the trained model shall continue."})
    sample_tokens: int = field(default=48, metadata={"help": "Length of the sample in tokens; 0 for none."})


def main() -> int:
    """Train; the exit code is 0, or 2 after one line on what is wrong with the arguments or the data."""
    logging.getLogger(log.ROOT).setLevel(logging.INFO)  # the table of the run's dtypes
    enable_cpu_fsdp()  # no effect on another device; before the Trainer builds accelerate's state
    code = 1
    try:
        train(*parse())
        code = 0
    except UsageError as error:
        code = 2
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    finally:
        tear_down(wait=code == 0)
    return code


def tear_down(wait: bool) -> None:
    """End the process group: left to the interpreter's exit, gloo aborts about one run in six (torch 2.13, 2.14).

    Args:
        wait: for all ranks first; not after an error, for a dead rank would never come to the barrier.
    """
    if not dist.is_initialized():
        return
    gc.collect()  # FSDP's modules are cycles that hold their process groups
    if wait:
        dist.barrier()
    dist.destroy_process_group()


def parse() -> tuple[ModelArguments, DataArguments, PrecisionArguments, SampleArguments, TrainingArguments]:
    """The arguments by group. Raises UsageError where they contradict each other."""
    groups = (ModelArguments, DataArguments, PrecisionArguments, SampleArguments, TrainingArguments)
    try:
        model, data, precision, sampling, training = HfArgumentParser(groups).parse_args_into_dataclasses()
    except (ValueError, OSError) as error:  # OSError: --fsdp_config names a file that is not there
        raise UsageError(str(error).splitlines()[0]) from error
    fsdp = bool(training.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if fsdp and training.world_size == 1:
        raise UsageError("FSDP needs two processes or more: launch with torchrun --nproc-per-node=2, or drop --fsdp.")
    return model, data, precision, sampling, training


def callbacks_for(arguments: PrecisionArguments) -> list[TrainerCallback]:
    """The callback of the preset; `stock` only audits. Raises UsageError on unknown options."""
    try:
        # what the preset itself refuses (exact with a low reduction), before any data is read; the dtype is no matter
        resolve_policy(arguments.preset, "bf16", reduce_dtype=arguments.reduce_dtype)
        return [FSDPAutocast(arguments.preset, reduce_dtype=arguments.reduce_dtype)]
    except ValueError as error:
        raise UsageError(f"--preset/--reduce_dtype: {error}") from error


def train(
    model_arguments: ModelArguments,
    data: DataArguments,
    precision: PrecisionArguments,
    sampling: SampleArguments,
    training: TrainingArguments,
) -> None:
    """Load, train, evaluate, save, and leave curve, sample and card in the output folder."""
    callbacks = callbacks_for(precision)
    checkpoint = checkpoint_to_resume(str(training.output_dir), training.resume_from_checkpoint)
    check_arguments(data)
    config = load_config(model_arguments, data.block_size)
    set_seed(training.seed)
    # datasets caches by fingerprint: rank 0 writes, the others read the same files
    with training.main_process_first(local=False, desc="loading the data"):
        rows = load_rows(data, training.seed)
    tokenizer = load_tokenizer(model_arguments, rows["train"], training)
    if model_arguments.model_name_or_path is None:
        config.vocab_size = len(tokenizer)
    with training.main_process_first(local=False, desc="packing the data"):
        blocks = make_blocks(rows, tokenizer, data.block_size)
    model = load_model(model_arguments, config)
    try:
        trainer = Trainer(
            model=model,
            args=training,
            train_dataset=blocks["train"],
            eval_dataset=blocks["validation"],
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    except ValueError as error:  # what the Trainer, accelerate and FSDPAutocast refuse, before anything is trained
        raise UsageError(str(error).splitlines()[0]) from error
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    trainer.save_model()
    dist_barrier()
    if trainer.is_world_process_zero():
        leave_behind(trainer, model_arguments, data, sampling)


def dist_barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def leave_behind(trainer: Trainer, model: ModelArguments, data: DataArguments, sampling: SampleArguments) -> None:
    """On rank 0: loss curve, sample, model card, and one line per file."""
    training = trainer.args
    folder = Path(str(training.output_dir))
    name = model.model_name_or_path or f"MPT from scratch ({model.model_size})"
    dataset = data.dataset_name or data.train_file or "docstrings of the Python standard library"
    draw_losses(trainer.state.log_history, folder / "loss.png", name)
    write_card(trainer, folder.name, dataset)
    if sampling.sample_tokens > 0:
        dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
        text = sample(
            str(folder),
            trainer.processing_class,
            sampling.sample_prompt,
            sampling.sample_tokens,
            dtype,
            model.trust_remote_code,
        )
        (folder / "sample.txt").write_text(text, encoding="utf-8")
        print(f"\nsample of the trained model:\n{text}\n")
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        print(f"  {file}")


if __name__ == "__main__":
    leave(main())
