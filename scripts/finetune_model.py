"""The model and tokenizer to fine-tune: a checkpoint, or an MPT from scratch by size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from finetune_data import UsageError, train_tokenizer
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MptConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

# width, heads, layers; 1b and 7b are MPT-1B's and MPT-7B's
SIZES = {
    "tiny": (64, 2, 2),
    "small": (256, 4, 4),
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "1b": (2048, 16, 24),
    "7b": (4096, 32, 32),
}


@dataclass
class ModelArguments:
    """Which model to train."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a checkpoint; without it an MPT from scratch is trained."}
    )
    model_size: str = field(default="small", metadata={"help": f"Size of the MPT from scratch: {', '.join(SIZES)}."})
    max_seq_len: int = field(default=2048, metadata={"help": "Longest sequence of the MPT from scratch, in tokens."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})


def load_tokenizer(arguments: ModelArguments, rows: Dataset, training: TrainingArguments) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, or one trained on the rows: rank 0 trains and saves it, the others load that file."""
    if arguments.model_name_or_path is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UsageError(_cannot_load(arguments, error)) from error
        if tokenizer.eos_token_id is None:
            raise UsageError(f"--model_name_or_path {arguments.model_name_or_path}: its tokenizer has no end of text.")
        return tokenizer
    folder = Path(str(training.output_dir)) / "tokenizer"
    with training.main_process_first(local=False, desc="training the tokenizer"):
        if training.process_index == 0:
            train_tokenizer(rows).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def load_config(arguments: ModelArguments, block_size: int) -> Any:
    """The checkpoint's config, or one by size whose vocabulary is yet to be set; checked against the block size.

    Raises:
        UsageError: unknown size, a checkpoint that cannot be loaded, or blocks longer than the model's sequences.
    """
    if arguments.model_name_or_path is not None:
        try:
            config = AutoConfig.from_pretrained(
                arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UsageError(_cannot_load(arguments, error)) from error
    elif arguments.model_size in SIZES:
        width, heads, layers = SIZES[arguments.model_size]
        config = MptConfig(d_model=width, n_heads=heads, n_layers=layers, max_seq_len=arguments.max_seq_len)
    else:
        raise UsageError(f"--model_size {arguments.model_size!r}: use one of {', '.join(SIZES)}.")
    longest = getattr(config, "max_seq_len", None) or getattr(config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise UsageError(f"--block_size {block_size} is beyond the model's {longest} tokens; use at most {longest}.")
    return config


def load_model(arguments: ModelArguments, config: Any) -> PreTrainedModel:
    """The model with fp32 weights, which stay the master weights under mixed precision.

    Raises:
        UsageError: the checkpoint cannot be loaded, or the model has no parameters.
    """
    if arguments.model_name_or_path is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        # the argument was renamed in transformers 4.56
        name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
        options: dict[str, Any] = {name: torch.float32, "trust_remote_code": arguments.trust_remote_code}
        try:
            model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, config=config, **options)
        except (OSError, ValueError) as error:
            raise UsageError(_cannot_load(arguments, error)) from error
    if not any(True for _ in model.parameters()):
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to train.")
    model.config.use_cache = False
    return model


def _cannot_load(arguments: ModelArguments, error: Exception) -> str:
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"--model_name_or_path {arguments.model_name_or_path}: cannot be loaded: {cause}"
