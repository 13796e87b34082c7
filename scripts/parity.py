#!/usr/bin/env python
"""Does FSDP train what DDP trains? Tiny models, 2 ranks on CPU, the real Trainer; DDP + autocast is the reference.

    python scripts/parity.py --arch mpt --steps 20
    python scripts/parity.py --arch llama gpt2 t5 bert mixtral vit resnet whisper --grad_accum 4 --fsdp 1

Exit code 1 where preset `exact` under FSDP2 has other numbers although gradients are not clipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leave import leave
from parity_runs import ARCHITECTURES, run_rank
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from hf_fsdp_amp.policy import LOW_DTYPES, PRESETS
from hf_fsdp_amp.report import read_versions
from hf_fsdp_amp.report_table import size


@dataclass
class Options:
    """What to compare."""

    arch: list[str] = field(default_factory=lambda: ["mpt"], metadata={"help": f"Of {', '.join(ARCHITECTURES)}."})
    presets: list[str] = field(
        default_factory=lambda: ["exact", "amp", "fsdp", "stock"], metadata={"help": "Presets to hold against DDP."}
    )
    steps: int = field(default=20, metadata={"help": "Optimizer steps."})
    grad_accum: int = field(default=1, metadata={"help": "Micro-batches per step."})
    fsdp: int = field(default=2, metadata={"help": "FSDP version, 1 or 2."})
    dtype: str = field(default="bf16", metadata={"help": "bf16 or fp16."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip gradients to this norm; 0 does not."})
    ranks: int = field(default=2, metadata={"help": "Processes."})
    out: str = field(default="outputs/parity.json", metadata={"help": "Where the JSON goes."})


def main() -> int:
    """Launch the ranks, print the table; see the module for the exit code."""
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    if "RANK" in os.environ:
        found = run_rank(options)
        if os.environ["RANK"] == "0":
            Path(options.out).write_text(json.dumps(found))
        leave(0)
    if problem := bad(options):
        print(f"parity.py: {problem}", file=sys.stderr)
        return 2
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, *launcher, __file__, *sys.argv[1:]], env=environment, check=True)
    found = json.loads(out.read_text())
    out.write_text(json.dumps({"options": asdict(options), "versions": read_versions(), "runs": found}, indent=1))
    console = Console(width=max(110, Console().width))
    console.print(table(found, options))
    for note in [*notes(options), *crashes(found)]:
        console.print(note)
    return 0 if passed(found, options) else 1


def bad(options: Options) -> str | None:
    """One line on an option that cannot be; None where all can."""
    for name, given, known in (
        ("arch", options.arch, ARCHITECTURES),
        ("presets", options.presets, PRESETS),
        ("dtype", [options.dtype], LOW_DTYPES),
        ("fsdp", [options.fsdp], (1, 2)),
    ):
        if unknown := [value for value in given if value not in known]:
            return f"--{name} {unknown[0]}: use {', '.join(map(str, known))}."
    return None if options.ranks > 1 else "--ranks: FSDP needs two or more."


def table(found: dict[str, Any], options: Options) -> Table:
    """One row per architecture and way of training."""
    result = Table(
        title=f"FSDP{options.fsdp} against DDP + autocast, {options.dtype}, {options.steps} steps, "
        f"{options.grad_accum} micro-batches, {options.ranks} ranks"
    )
    for column in ("arch", "training", "loss", "gradient", "parameters", "SHA-256", "gathered", "reduced", "calls"):
        result.add_column(column, no_wrap=True)
    for architecture, runs in found.items():
        for name, run in runs.items():
            if "error" in run:
                result.add_row(architecture, name, "crashes")
                continue
            differences = ["reference"] * 3
            if name != "ddp":
                keys = ("loss_difference", "gradient_difference", "parameter_difference")
                differences = ["0" if run[key] == 0 else f"{run[key]:.1e}" for key in keys]
            mark = " =" if run.get("identical") else " ~" if run.get("same_numbers") else ""
            sha = run["sha256"][:8] + mark
            cost = [size(run["gathered"]), size(run["reduced"]), str(run["collectives"])]
            result.add_row(architecture, name, *differences, sha, *cost)
        result.add_section()
    return result


def notes(options: Options) -> list[str]:
    """What a reader of the table needs to know beside it."""
    lines = [
        "loss, gradient (step 1), parameters (end): largest absolute difference from DDP; bytes and calls of step 1.",
        "= the same bits; ~ the same losses and gradients, parameters but for the last bit of CPU's vector tails.",
    ]
    if options.max_grad_norm > 0:
        lines.append("Clipping: the norm of sharded gradients is summed in another order, so that bits differ.")
    if options.dtype == "fp16":
        lines.append("accelerate opens no fp16 autocast on CPU; the DDP reference got it by patch_model.")
    if options.fsdp == 1:
        lines.append("FSDP1 reduces flat parameters and gathers exact's in fp32: close to DDP, not always to the bit.")
    return lines


def crashes(found: dict[str, Any]) -> list[str]:
    """One line per run that ended in an error."""
    runs = ((architecture, name, run) for architecture, each in found.items() for name, run in each.items())
    return [f"{architecture}, {name}: {run['error']}" for architecture, name, run in runs if "error" in run]


def passed(found: dict[str, Any], options: Options) -> bool:
    """Whether `exact` has DDP's numbers wherever it promises to."""
    promised = options.fsdp == 2 and options.max_grad_norm == 0
    return not promised or all(runs["exact"]["same_numbers"] for runs in found.values() if "exact" in runs)


if __name__ == "__main__":
    sys.exit(main())
