"""`scripts/finetune_data.py` and `finetune_model.py`: rows, packing, labels, and what they refuse."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from finetune_data import (
    IGNORED,
    DataArguments,
    UsageError,
    check_arguments,
    load_file,
    load_rows,
    make_blocks,
    pack,
    standard_library_docstrings,
    tokenize,
    train_tokenizer,
)
from finetune_model import SIZES, ModelArguments, load_config, load_model

ROWS = [{"prompt": f"question {i}: ", "completion": f"answer {i}"} for i in range(40)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_standard_library_is_a_real_corpus_in_a_fixed_order() -> None:
    rows = list(standard_library_docstrings())
    assert len(rows) > 3000
    assert rows[:50] == list(islice(standard_library_docstrings(), 50))
    dumps = next(row for row in rows if row["prompt"].startswith("# json\ndef dumps("))
    assert "Serialize ``obj``" in dumps["completion"]
    assert dumps["completion"].startswith('    """')


def test_loss_is_on_the_completion_only() -> None:
    tokenizer = train_tokenizer(Dataset.from_list(ROWS), vocab_size=300)
    row = tokenize(ROWS[3], tokenizer)
    prompt = tokenizer(ROWS[3]["prompt"])["input_ids"]
    assert row["labels"][: len(prompt)] == [IGNORED] * len(prompt)
    assert row["labels"][len(prompt) :] == row["input_ids"][len(prompt) :]
    assert row["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row["input_ids"][:-1]) == ROWS[3]["prompt"] + ROWS[3]["completion"]
    text = tokenize({"text": "question 3"}, tokenizer)
    assert text["labels"] == text["input_ids"]


def test_tokenizer_is_deterministic_and_covers_every_byte() -> None:
    first, second = (train_tokenizer(Dataset.from_list(ROWS), vocab_size=300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    text = "größer ≠ 小 \x00\t🙂"
    assert first.decode(first(text)["input_ids"]) == text


def test_packing_keeps_order_and_drops_the_rest() -> None:
    packed = pack({"input_ids": [[1, 2, 3], [4, 5], [6, 7]], "labels": [[-100, 2, 3], [4, 5], [6, 7]]}, 3)
    assert packed == {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, 2, 3], [4, 5, 6]]}
    assert pack({"input_ids": [[1]], "labels": [[1]]}, 3) == {"input_ids": [], "labels": []}


def test_blocks_within_a_prompt_are_dropped() -> None:
    """The label of a block's first token is never predicted: [.., 7] alone at its start does not keep a block."""
    labels = [-100, -100, -100, 7, -100, -100, -100, 8, 9]
    packed = pack({"input_ids": [list(range(9))], "labels": [labels]}, 3)
    assert packed == {"input_ids": [[6, 7, 8]], "labels": [[-100, 8, 9]]}


def test_no_block_reaches_a_completion() -> None:
    rows = Dataset.from_list([{"prompt": "question " * 50, "completion": "a"}])
    tokenizer = train_tokenizer(rows, vocab_size=260)
    tokens = len(tokenize(rows[0], tokenizer)["input_ids"])
    block_size = tokens // 2 if tokens % 2 else tokens // 2 - 2  # the completion lies in what is left over at the end
    with pytest.raises(UsageError, match="no block of the train split holds part of a completion"):
        make_blocks(DatasetDict(train=rows), tokenizer, block_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (DataArguments(block_size=0), "--block_size 0: use 2 tokens or more"),
        (DataArguments(max_rows=-3), "--max_rows -3: use 1 or more"),
        (DataArguments(validation_fraction=1.0), "--validation_fraction 1.0: use a share between 0 and 1"),
    ],
)
def test_bad_numbers_are_one_line(arguments: DataArguments, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_arguments(arguments)
    assert str(error.value).startswith(message)
    check_arguments(DataArguments())


def test_blocks_are_whole(tmp_path: Path) -> None:
    rows = load_rows(DataArguments(train_file=write(tmp_path / "a.jsonl", ROWS)), seed=0)
    assert (len(rows["train"]), len(rows["validation"])) == (38, 2)
    tokenizer = train_tokenizer(rows["train"], vocab_size=300)
    blocks = make_blocks(rows, tokenizer, 4)
    assert {len(ids) for ids in blocks["train"]["input_ids"]} == {4}
    with pytest.raises(UsageError, match="--block_size 4096: the train split has only"):
        make_blocks(rows, tokenizer, 4096)


def test_every_kind_of_file(tmp_path: Path) -> None:
    data = Dataset.from_list([{"text": "one", "other": 1}, {"text": "two", "other": 2}])
    data.to_csv(tmp_path / "a.csv")
    data.to_parquet(tmp_path / "a.parquet")
    data.to_json(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for kind in ("csv", "parquet", "jsonl", "txt"):
        rows = load_file(str(tmp_path / f"a.{kind}"), "--train_file")
        assert rows.column_names == ["text"]
        assert rows["text"][:] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "there is no such file"),
        ("empty.jsonl", b"", "the file is empty"),
        ("latin.jsonl", b'{"text": "gr\xf6\xdfer"}\n', "not UTF-8 at byte 12"),
        ("columns.jsonl", b'{"input": "a", "output": "b"}\n', "needs a column 'text', or 'prompt' and 'completion'"),
        ("half.jsonl", b'{"prompt": "a"}\n', "it has 'prompt'"),
        ("broken.jsonl", b'{"text": \n', "cannot be read as json"),
        ("broken.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("data.xlsx", b"x", "unknown kind of file, use one of .jsonl"),
        ("blank.csv", b"text\n", "corresponds to no data"),
        ("numbers.csv", b"text\n1\n2\n", "column 'text' holds int64, not text"),
        ("lists.jsonl", b'{"prompt": "a", "completion": ["b"]}\n', "column 'completion' holds"),
        ("nulls.jsonl", b'{"text": null}\n', "column 'text' holds null, not text"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_file(str(tmp_path / name), "--train_file")
    text = str(error.value)
    assert text.startswith(f"--train_file {tmp_path / name}: ")
    assert message in text
    assert "\n" not in text


def test_bad_splits(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", ROWS[:1])
    with pytest.raises(UsageError, match="leave none to train on"):
        load_rows(DataArguments(train_file=one), seed=0)
    with pytest.raises(UsageError, match="--validation_file needs --train_file"):
        load_rows(DataArguments(validation_file=one), seed=0)


def test_validation_file_is_used_whole(tmp_path: Path) -> None:
    train, validation = write(tmp_path / "t.jsonl", ROWS[:30]), write(tmp_path / "v.jsonl", ROWS[30:])
    rows = load_rows(DataArguments(train_file=train, validation_file=validation, max_rows=5), seed=0)
    assert isinstance(rows, DatasetDict)
    assert (len(rows["train"]), len(rows["validation"])) == (5, 10)


@pytest.mark.parametrize(
    ("arguments", "block_size", "message"),
    [
        (ModelArguments(model_size="huge"), 8, "--model_size 'huge': use one of tiny, small"),
        (ModelArguments(max_seq_len=16), 17, "--block_size 17 is beyond the model's 16 tokens; use at most 16"),
        (
            ModelArguments(model_name_or_path="/no/such/model"),
            8,
            "--model_name_or_path /no/such/model: cannot be loaded",
        ),
    ],
)
def test_bad_models_are_one_line(arguments: ModelArguments, block_size: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load_config(arguments, block_size)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_model_without_parameters() -> None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

    class EmptyConfig(PreTrainedConfig):
        model_type = "empty-for-a-test"

    class Empty(PreTrainedModel):
        config_class = EmptyConfig

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    AutoModelForCausalLM.register(EmptyConfig, Empty)
    with pytest.raises(UsageError, match="Empty has no parameters: there is nothing to train"):
        load_model(ModelArguments(), EmptyConfig())


def test_sizes_are_divisible_and_master_weights_fp32() -> None:
    assert all(width % heads == 0 for width, heads, _ in SIZES.values())
    model = load_model(ModelArguments(), load_config(ModelArguments(model_size="tiny"), 8))
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}
    assert model.config.use_cache is False
