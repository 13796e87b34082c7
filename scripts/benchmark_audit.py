#!/usr/bin/env python
"""What `audit=True` costs: the first step, and the steps after it, with and without.

    torchrun --nproc-per-node 2 scripts/benchmark_audit.py --json audit.json

Runs on CPU under FSDP2 (``--version 1`` for FSDP1), audited and bare runs in turn, so that a drift of the machine
falls on both. Steps 2 and later must cost the same: nothing of the audit is left on the model then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from datasets import Dataset
from leave import leave
from transformers import MptConfig, MptForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_fsdp_amp import FSDPAutocast, enable_cpu_fsdp

VOCAB, LENGTH = 512, 64


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step. Goes before the audited callback, so that its start is inside."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def train(folder: str, version: int, steps: int, layers: int, audit: bool) -> list[float]:
    """Seconds of each step of one run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    config = MptConfig(d_model=128, n_heads=4, n_layers=layers, vocab_size=VOCAB, max_seq_len=LENGTH)
    ids = torch.randint(0, VOCAB, (8 * steps, LENGTH)).tolist()
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        fsdp=True,
        fsdp_config={"version": version},
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    times = StepTimes()
    trainer = Trainer(
        model=MptForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[times, FSDPAutocast(audit=audit)],
    )
    trainer.train()
    return times.seconds


def measure(folder: str, version: int, steps: int, layers: int, repeats: int) -> dict[str, Any]:
    """First step and median later step, in milliseconds, of audited and bare runs in turn."""
    runs: dict[bool, list[list[float]]] = {True: [], False: []}
    train(folder, version, 3, layers, audit=False)  # warm up
    for _ in range(repeats):
        for audit in (False, True):
            runs[audit].append(train(folder, version, steps, layers, audit))
    result: dict[str, Any] = {"fsdp_version": version, "layers": layers, "steps": steps, "repeats": repeats}
    for audit, name in ((False, "bare"), (True, "audited")):
        later = [second for run in runs[audit] for second in run[1:]]
        result[name] = {
            "first_step_ms": 1000 * statistics.median(run[0] for run in runs[audit]),
            "later_step_ms": 1000 * statistics.median(later),
            "later_step_quartiles_ms": [1000 * q for q in statistics.quantiles(later, n=4)],
        }
    result["later_step_ratio"] = result["audited"]["later_step_ms"] / result["bare"]["later_step_ms"]
    return result


def main() -> int:
    """Print the numbers, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", type=int, choices=(1, 2), default=2, help="FSDP version")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    enable_cpu_fsdp()
    dist.init_process_group("gloo")
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(folder, options.version, options.steps, options.layers, options.repeats)
            dist.barrier()
        if dist.get_rank() == 0:
            print(json.dumps(result, indent=2))
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=2))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())
