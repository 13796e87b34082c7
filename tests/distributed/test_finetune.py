"""`scripts/finetune_mpt.py` as users start it: torchrun and accelerate launch, 2 ranks on CPU, real text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "finetune_mpt.py")
CONFIGS = ROOT / "scripts" / "configs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
SMALL = [
    *("--use_cpu", "--model_size", "tiny", "--block_size", "32", "--per_device_train_batch_size", "2"),
    *("--logging_steps", "1", "--report_to", "none", "--sample_tokens", "4", "--max_rows", "300"),
]


def environment() -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def run(command: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def fsdp(version: int) -> list[str]:
    return ["--fsdp", "--fsdp_config", str(CONFIGS / f"fsdp{version}.json"), "--bf16"]


def losses(folder: Path) -> dict[int, float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{i} plus {i + 1} is ", "completion": f"{2 * i + 1}, of course."} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_under_torchrun_then_resume(jsonl: str, tmp_path: Path) -> None:
    """4 steps in one go, and 2 steps with a new start: the same losses; everything promised is in the folder."""
    data = ["--train_file", jsonl, "--save_steps", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run([*TORCHRUN, SCRIPT, *SMALL, *fsdp(2), *data, "--output_dir", str(whole), "--max_steps", "4"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = {path.name for path in whole.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "loss.png", "sample.txt"} <= files
    results = json.loads((whole / "eval_results.json").read_text())
    assert 1 < results["perplexity"] < 1e4
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")

    # the same schedule, stopped after 2 steps as a lost machine would: only its checkpoint is left
    (whole / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    parts.mkdir()
    (tmp_path / "checkpoint-2").rename(parts / "checkpoint-2")
    again = [*TORCHRUN, SCRIPT, *SMALL, *fsdp(2), *data, "--output_dir", str(parts), "--max_steps", "4"]
    refused = run(again)
    assert refused.returncode != 0
    assert refused.stderr.count("holds checkpoint-2: pass --resume_from_checkpoint auto") == 1
    resumed = run([*again, "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert losses(parts) == losses(whole)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_launch_with_the_ready_yaml(version: int, tmp_path: Path) -> None:
    config = ["--config_file", str(CONFIGS / f"fsdp{version}.yaml")]
    done = run([*ACCELERATE, *config, SCRIPT, *SMALL, "--output_dir", str(tmp_path / "out"), "--max_steps", "2"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_help() -> None:
    done = run([sys.executable, SCRIPT, "--help"])
    assert done.returncode == 0
    for option in ("--train_file", "--model_name_or_path", "--preset", "--block_size", "--fsdp_config"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "fast"], "--preset/--reduce_dtype: preset='fast' is not known: use one of 'amp'"),
        (["--reduce_dtype", "int8"], "reduce_dtype='int8' is not supported: use one of 'bf16'"),
        (["--bf16", "--fp16"], "At most one of fp16 and bf16 can be True, but not both"),
        (["--fsdp", "--bf16"], "FSDP needs two processes or more: launch with torchrun --nproc-per-node=2"),
        (["--train_file", "no.jsonl"], "--train_file no.jsonl: there is no such file."),
        (["--block_size", "4096"], "--block_size 4096 is beyond the model's 2048 tokens; use at most 2048."),
        (["--resume_from_checkpoint", "auto"], "holds no checkpoint"),
        (["--fsdp", "--fsdp_config", "no.json"], "No such file or directory: 'no.json'"),
        (["--preset", "exact", "--reduce_dtype", "bf16"], "preset='exact' reduces gradients in fp32"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    base = ["--use_cpu", "--output_dir", str(tmp_path / "out"), "--max_rows", "50", "--model_size", "tiny"]
    done = run([sys.executable, SCRIPT, *base, *arguments])
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("finetune_mpt.py: ")]
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "out").exists(), "refused before anything was written"


def test_killed_rank_ends_the_launcher_and_the_checkpoint_resumes(jsonl: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        *TORCHRUN,
        SCRIPT,
        *SMALL,
        *fsdp(2),
        "--train_file",
        jsonl,
        "--output_dir",
        str(out),
        "--save_steps",
        "5",
    ]
    log = (tmp_path / "log.txt").open("w")
    process: Any = subprocess.Popen(
        [*command, "--max_steps", "100000"], env=environment(), cwd=ROOT, stdout=log, stderr=log
    )
    try:
        wait_for(out / "checkpoint-5" / "trainer_state.json", process)
        os.kill(rank_pid(process.pid, rank=1), signal.SIGKILL)
        assert process.wait(120) != 0
    finally:
        process.kill()
        log.close()
    last = max(int(path.parent.name.split("-")[1]) for path in out.glob("checkpoint-*/trainer_state.json"))
    # as if it had been killed while saving: the Trainer writes trainer_state.json last
    shutil.copytree(out / f"checkpoint-{last}", out / f"checkpoint-{last + 5}")
    (out / f"checkpoint-{last + 5}" / "trainer_state.json").unlink()
    resumed = run([*command, "--max_steps", str(last + 1), "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert max(losses(out)) == last + 1


def wait_for(path: Path, process: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.2)


def rank_pid(launcher: int, rank: int) -> int:
    """Process id of a rank that torchrun started, by its environment."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{launcher}\n" in (entry / "status").read_text():
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
    raise AssertionError(f"torchrun has no rank {rank}")
