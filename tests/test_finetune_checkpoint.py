"""`scripts/finetune_checkpoint.py`: which checkpoint is gone on from, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import TrainerState

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from finetune_checkpoint import checkpoint_to_resume
from finetune_data import UsageError


def checkpoint(folder: Path, step: int, whole: bool = True) -> str:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    if whole:
        TrainerState(global_step=step).save_to_json(str(path / "trainer_state.json"))
    return str(path)


def test_auto_takes_the_last_whole_checkpoint_by_number(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9)
    last = checkpoint(tmp_path, 10)
    cut_off = checkpoint(tmp_path, 11, whole=False)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint_to_resume(str(tmp_path), "auto") == last
    assert checkpoint_to_resume(str(tmp_path), last) == last
    with pytest.raises(UsageError, match=r"not a whole checkpoint, it has no trainer_state\.json"):
        checkpoint_to_resume(str(tmp_path), cut_off)
    with pytest.raises(UsageError, match="holds checkpoint-11: pass --resume_from_checkpoint auto"):
        checkpoint_to_resume(str(tmp_path), None)


def test_new_run(tmp_path: Path) -> None:
    assert checkpoint_to_resume(str(tmp_path / "new"), None) is None
    assert checkpoint_to_resume(str(tmp_path), None) is None


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint_to_resume(str(tmp_path), "auto")
    with pytest.raises(UsageError, match="there is no such folder"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path / "none"))
    checkpoint(tmp_path, 5, whole=False)
    with pytest.raises(UsageError, match=r"checkpoint-5 in .* was cut off while it was saved"):
        checkpoint_to_resume(str(tmp_path), "auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file: name a folder"):
        checkpoint_to_resume(str(tmp_path / "file"), None)
