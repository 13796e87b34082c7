"""Which checkpoint a run goes on from, and whether an output folder may be used."""

from __future__ import annotations

from pathlib import Path

from finetune_data import UsageError

# The Trainer writes it last (transformers 5.24, `_save_checkpoint`): a folder without it was cut off while saving.
_WRITTEN_LAST = "trainer_state.json"


def checkpoints(folder: Path) -> list[Path]:
    """The folders ``checkpoint-<step>`` in `folder`, whole or not, by step."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and _step(path).isdigit()]
    return sorted(found, key=lambda path: int(_step(path)))


def is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer finished writing this checkpoint."""
    return (checkpoint / _WRITTEN_LAST).is_file()


def checkpoint_to_resume(output_dir: str, asked: str | None) -> str | None:
    """The checkpoint to go on from; None for a new run.

    Args:
        output_dir: the run's output folder; need not exist.
        asked: ``--resume_from_checkpoint``: None, a folder, or ``auto`` for the last whole checkpoint in `output_dir`.

    Raises:
        UsageError: `output_dir` is a file, or holds a checkpoint and nothing was said about it; there is no checkpoint
            to go on from, or the one named was cut off while it was saved.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output_dir {output_dir} is a file: name a folder.")
    found = checkpoints(folder)
    if asked is None:
        if found:
            raise UsageError(
                f"--output_dir {output_dir} holds {found[-1].name}: pass --resume_from_checkpoint auto to "
                "go on from it, or another --output_dir."
            )
        return None
    if asked.lower() in ("auto", "true"):
        return _last_whole(found, output_dir, asked)
    if not Path(asked).is_dir():
        raise UsageError(f"--resume_from_checkpoint {asked}: there is no such folder.")
    if not is_whole(Path(asked)):
        raise UsageError(
            f"--resume_from_checkpoint {asked}: not a whole checkpoint, it has no {_WRITTEN_LAST}; name another, or "
            "pass auto for the last whole one."
        )
    return asked


def _last_whole(found: list[Path], output_dir: str, asked: str) -> str:
    whole = [path for path in found if is_whole(path)]
    if whole:
        return str(whole[-1])
    if found:
        raise UsageError(
            f"--resume_from_checkpoint {asked}: {found[-1].name} in {output_dir} was cut off while it was saved and "
            "there is no other: remove it and start anew."
        )
    raise UsageError(f"--resume_from_checkpoint {asked}: {output_dir} holds no checkpoint.")


def _step(path: Path) -> str:
    return path.name.removeprefix("checkpoint-")
