"""Run scenarios on real ranks: `torchrun` starts this file, every scenario runs on all ranks in one process group.

Two uses: `run_scenarios(...)` from a test, and on each rank ``launch.py OUT_DIR module:function@version ...``.
Starting ranks and importing costs more than most scenarios, so a test module runs all of its own in one launch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What one scenario gave on one rank: its result, or the text of its exception."""

    result: Any = None
    error: str | None = None
    trace: str | None = None


def run_scenarios(
    out_dir: Path, scenarios: list[str], *, ranks: int = 2, timeout: float = 540, env: dict[str, str] | None = None
) -> dict[str, list[Outcome]]:
    """Run ``module:function`` scenarios on `ranks` gloo ranks and collect their results.

    Args:
        out_dir: an empty folder; each scenario gets a folder of its own in it.
        scenarios: names as ``module:function@version``; a function takes its folder and the FSDP version, and returns
            something JSON can hold.
        ranks: number of processes.
        timeout: seconds for all of them; what has not finished by then is reported as not run.
        env: environment variables to add.

    Returns:
        Per scenario the outcome of each rank.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(__file__)), str(out_dir), *scenarios]
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(env or {})}
    log = out_dir / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=full_env, cwd=ROOT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
    return {name: [_read(out_dir, name, rank, log) for rank in range(ranks)] for name in scenarios}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End `torchrun` so that it ends its ranks: they are in sessions of their own, and killing it would leave them."""
    process.terminate()
    try:
        process.wait(60)  # it gives its ranks 30 s before it kills them
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _folder(name: str) -> str:
    return name.replace(":", ".").replace("@", ".v")


def _read(out_dir: Path, name: str, rank: int, log: Path) -> Outcome:
    path = out_dir / _folder(name) / f"rank{rank}.json"
    if not path.exists():
        return Outcome(error="did not finish", trace=log.read_text()[-6000:])
    return Outcome(**json.loads(path.read_text()))


def _run_all(out_dir: Path, scenarios: list[str]) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    environment = dict(os.environ)
    cpu_dtype = torch.get_autocast_dtype("cpu")
    dist.init_process_group("gloo")
    try:
        for name in scenarios:
            folder = out_dir / _folder(name)
            folder.mkdir(parents=True, exist_ok=True)
            outcome = _run_one(name, folder)
            (folder / f"rank{rank}.json").write_text(json.dumps(vars(outcome)))
            os.environ.clear()
            os.environ.update(environment)
            torch.set_autocast_dtype("cpu", cpu_dtype)
            gc.collect()
            torch._dynamo.reset()
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _run_one(name: str, folder: Path) -> Outcome:
    from accelerate.state import AcceleratorState, GradientState
    from torch import manual_seed

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    manual_seed(0)
    try:
        module, _, function = name.partition(":")
        function, _, version = function.partition("@")
        return Outcome(result=getattr(importlib.import_module(module), function)(folder, int(version)))
    except Exception as error:  # what a scenario raises is what its test asserts on
        return Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _run_all(Path(sys.argv[1]), sys.argv[2:])
