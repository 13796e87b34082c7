"""`scripts/parity.py` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ["mpt", "llama", "gpt2", "t5", "bert", "mixtral", "vit", "resnet", "whisper"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "parity.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)


def test_exact_is_bit_identical_for_every_architecture(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    done = run("--arch", *ARCHITECTURES, "--steps", "3", "--presets", "exact", "stock", "--out", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert list(found["runs"]) == ARCHITECTURES
    for name, runs in found["runs"].items():
        assert runs["exact"]["same_numbers"]
        assert runs["exact"]["losses"] == runs["ddp"]["losses"]
        if name != "resnet":  # its parameters' last bits depend on where CPU's vector registers end
            assert runs["exact"]["identical"]
            assert runs["exact"]["sha256"] == runs["ddp"]["sha256"]
        assert not runs["stock"]["identical"]
        if name == "resnet":  # batch norm's fp32 statistics with bf16 weights
            assert "BFloat16" in runs["stock"]["error"]
        else:
            assert runs["exact"]["collectives"] == runs["stock"]["collectives"]
    assert "SHA-256" in done.stdout
    assert found["versions"]["torch"]


def test_bad_options_are_one_line() -> None:
    for arguments, message in (
        (["--arch", "nope"], "parity.py: --arch nope: use mpt, llama"),
        (["--presets", "fast"], "parity.py: --presets fast: use amp"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(message)
