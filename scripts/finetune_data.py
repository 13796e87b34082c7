"""Data for fine-tuning a causal language model: files, hub datasets or the standard library's docstrings, packed.

Rows are ``{"text": ...}``, or ``{"prompt": ..., "completion": ...}``, whose loss is on the completion only.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Value, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

IGNORED = -100  # label that the loss skips, in torch's cross_entropy and so in transformers
_LOADERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet"}
_NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
_EOS = "<|endoftext|>"


class UsageError(Exception):
    """Something the user gave cannot work; its text is one line that names the option and the remedy."""


@dataclass
class DataArguments:
    """What to train on; by default the docstrings of the running Python's standard library."""

    dataset_name: str | None = field(default=None, metadata={"help": "Name of a dataset on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the hub dataset."})
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "Training data: jsonl, json, csv or parquet with a `text` column or `prompt` and `completion` "
            "columns, or a txt file, one row a line."
        },
    )
    validation_file: str | None = field(default=None, metadata={"help": "Validation data, of the same kinds."})
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Share of the rows held out where there is no validation data."}
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per packed block."})
    max_rows: int | None = field(default=None, metadata={"help": "Use at most this many training rows."})


def check_arguments(arguments: DataArguments) -> None:
    """Raises UsageError where a number cannot work, whatever the data."""
    if arguments.block_size < 2:
        raise UsageError(f"--block_size {arguments.block_size}: use 2 tokens or more.")
    if arguments.max_rows is not None and arguments.max_rows < 1:
        raise UsageError(f"--max_rows {arguments.max_rows}: use 1 or more, or leave it out for all rows.")
    if not 0 < arguments.validation_fraction < 1:
        raise UsageError(f"--validation_fraction {arguments.validation_fraction}: use a share between 0 and 1.")


def load_rows(arguments: DataArguments, seed: int) -> DatasetDict:
    """The rows to train and validate on.

    Args:
        arguments: where they come from.
        seed: of the split that holds out validation rows.

    Returns:
        Splits ``train`` and ``validation`` with columns ``text``, or ``prompt`` and ``completion``.

    Raises:
        UsageError: a file that is missing, empty, not UTF-8, of an unknown kind, or lacks the columns; a dataset that
            cannot be loaded; too few rows to hold any out.
    """
    if arguments.train_file is None and arguments.validation_file is not None:
        raise UsageError("--validation_file needs --train_file.")
    if arguments.dataset_name is not None:
        rows = _load_hub(arguments)
    elif arguments.train_file is not None:
        rows = DatasetDict(train=load_file(arguments.train_file, "--train_file"))
        if arguments.validation_file is not None:
            rows["validation"] = load_file(arguments.validation_file, "--validation_file")
    else:
        rows = DatasetDict(train=Dataset.from_list(list(standard_library_docstrings())))
    if arguments.max_rows is not None:
        rows["train"] = rows["train"].shuffle(seed=seed).select(range(min(arguments.max_rows, len(rows["train"]))))
    if "validation" not in rows:
        rows = _hold_out(rows["train"], arguments.validation_fraction, seed)
    return DatasetDict({split: _only_text(rows[split], split) for split in ("train", "validation")})


def load_file(path: str, option: str) -> Dataset:
    """One local file as rows; `option` is what the user called it. Raises UsageError, see `load_rows`."""
    file = Path(path)
    loader = _LOADERS.get(file.suffix.lower())
    if loader is None:
        raise UsageError(f"{option} {path}: unknown kind of file, use one of {', '.join(_LOADERS)}.")
    if not file.is_file():
        raise UsageError(f"{option} {path}: there is no such file.")
    if file.stat().st_size == 0:
        raise UsageError(f"{option} {path}: the file is empty.")
    if loader != "parquet":
        _check_utf8(file, option)
    try:
        rows = load_dataset(loader, data_files=str(file), split="train")
    except Exception as error:  # the readers raise a dozen kinds; the user needs the file and the last cause
        cause = str(error.__cause__ or error).splitlines()[0]
        raise UsageError(f"{option} {path}: cannot be read as {loader}: {cause}") from error
    if len(rows) == 0:
        raise UsageError(f"{option} {path}: the file has no rows.")
    return _only_text(rows, f"{option} {path}")


def _check_utf8(file: Path, option: str) -> None:
    with file.open(encoding="utf-8") as stream:
        try:
            while stream.read(1 << 20):
                pass
        except UnicodeDecodeError as error:
            raise UsageError(f"{option} {file}: not UTF-8 at byte {error.start}; convert the file first.") from error


def _load_hub(arguments: DataArguments) -> DatasetDict:
    try:
        loaded = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    except Exception as error:  # hub, network and script errors alike
        cause = str(error).splitlines()[0]
        raise UsageError(f"--dataset_name {arguments.dataset_name}: cannot be loaded: {cause}") from error
    if "train" not in loaded:
        raise UsageError(f"--dataset_name {arguments.dataset_name}: has no split 'train', only {', '.join(loaded)}.")
    return DatasetDict({split: loaded[split] for split in ("train", "validation") if split in loaded})


def _hold_out(rows: Dataset, fraction: float, seed: int) -> DatasetDict:
    held_out = max(1, int(len(rows) * fraction))
    if not 0 < fraction < 1 or len(rows) <= held_out:
        raise UsageError(f"--validation_fraction {fraction}: {len(rows)} rows leave none to train on or to validate.")
    split = rows.train_test_split(test_size=held_out, seed=seed)
    return DatasetDict(train=split["train"], validation=split["test"])


def _only_text(rows: Dataset, what: str) -> Dataset:
    for columns in (["prompt", "completion"], ["text"]):
        if set(columns) <= set(rows.column_names):
            for column in columns:
                feature = rows.features[column]
                kind = str(feature.dtype) if isinstance(feature, Value) else type(feature).__name__.lower()
                if "string" not in kind:  # string, large_string, string_view
                    raise UsageError(
                        f"{what}: column {column!r} holds {kind}, not text; write it as strings, in jsonl."
                    )
            return rows.select_columns(columns)
    found = ", ".join(map(repr, rows.column_names))
    raise UsageError(f"{what}: needs a column 'text', or 'prompt' and 'completion'; it has {found}.")


def standard_library_docstrings() -> Iterator[dict[str, str]]:
    """Signature → docstring of every documented function of the running Python's library, in path order.

    Sources are parsed, never imported.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _NOT_LIBRARY & set(relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            text = ast.get_docstring(node)
            if text and len(text) > 20:
                prompt = f"# {module}\ndef {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "completion": f'    """{text}"""\n'}


def train_tokenizer(rows: Dataset, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the rows; the same rows give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(rows), trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, bos_token=_EOS, pad_token=_EOS)


def _texts(rows: Dataset) -> Iterable[str]:
    return ("".join(str(value) for value in row.values()) for row in rows)


def tokenize(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Token ids and labels of one row, closed by the end-of-text token; a prompt's labels are ignored by the loss."""
    end = [tokenizer.eos_token_id]
    if "text" in row:
        ids = tokenizer(row["text"] or "", add_special_tokens=False)["input_ids"] + end
        return {"input_ids": ids, "labels": list(ids)}
    prompt = tokenizer(row["prompt"] or "", add_special_tokens=False)["input_ids"]
    completion = tokenizer(row["completion"] or "", add_special_tokens=False)["input_ids"] + end
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


def pack(rows: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Rows laid end to end and cut into blocks of `block_size` tokens; what is left over at the end is dropped.

    So is a block without a label for the loss (it lies within one long prompt): a batch of such blocks alone would be
    a step that learns nothing. The first label of a block is not counted, for the loss predicts from the second on.
    """
    joined = {name: [token for row in column for token in row] for name, column in rows.items()}
    whole = len(joined["input_ids"]) // block_size * block_size
    starts = [
        start
        for start in range(0, whole, block_size)
        if any(label != IGNORED for label in joined["labels"][start + 1 : start + block_size])
    ]
    return {name: [ids[start : start + block_size] for start in starts] for name, ids in joined.items()}


def make_blocks(rows: DatasetDict, tokenizer: PreTrainedTokenizerBase, block_size: int) -> DatasetDict:
    """Tokenized and packed splits with ``input_ids`` and ``labels`` of `block_size` tokens.

    Raises:
        UsageError: a split has fewer tokens than one block, or no completion token in any.
    """
    blocks = DatasetDict()
    for split, data in rows.items():
        options: dict[str, Any] = {"remove_columns": data.column_names, "desc": f"Tokenizing {split}"}
        tokenized = data.map(tokenize, fn_kwargs={"tokenizer": tokenizer}, **options)
        blocks[split] = tokenized.map(
            pack, fn_kwargs={"block_size": block_size}, batched=True, batch_size=None, desc=f"Packing {split}"
        )
        if len(blocks[split]) == 0:
            tokens = sum(len(ids) for ids in tokenized["input_ids"])
            if tokens >= block_size:
                raise UsageError(
                    f"--block_size {block_size}: no block of the {split} split holds part of a completion."
                )
            raise UsageError(
                f"--block_size {block_size}: the {split} split has only {tokens} tokens; use a smaller one."
            )
    return blocks
