"""What a dry run costs: seconds and memory for large models, and how it grows with their layers. No GPU needed.

python scripts/benchmark_explain.py [--json bench.json] [--repeat 3] [--device cuda]
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import HfArgumentParser, LlamaConfig, MixtralConfig, MptConfig, PreTrainedConfig

from hf_fsdp_amp import explain

MPT = {"max_seq_len": 2048, "vocab_size": 50432}
MODELS: dict[str, PreTrainedConfig] = {
    "MPT-7B": MptConfig(d_model=4096, n_heads=32, n_layers=32, **MPT),
    "MPT-30B": MptConfig(d_model=7168, n_heads=64, n_layers=48, **MPT),
    "Mixtral-8x7B": MixtralConfig(),
    "Llama-70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
LAYERS = (2, 4, 8, 16, 32, 48)


@dataclass
class Arguments:
    """What to measure."""

    json: str | None = field(default=None, metadata={"help": "Also write the numbers to this file."})
    repeat: int = field(default=3, metadata={"help": "Runs of each; the table has their median and their minimum."})
    device: str = field(default="cuda", metadata={"help": "Whose rules: cuda or cpu."})


def measure(config: PreTrainedConfig, preset: str, arguments: Arguments) -> dict[str, Any]:
    """Seconds of whole reports (model built, plain AMP, forward, backward, findings), and what they saw."""
    seconds = []
    for _ in range(arguments.repeat):
        start = time.perf_counter()
        report = explain(config, preset=preset, world_size=64, device_type=arguments.device)
        seconds.append(time.perf_counter() - start)
    return {
        "median_s": median(seconds),
        "min_s": min(seconds),
        "ops": sum(op.count for op in report.trace.ops),
        "errors": len(report.errors),
        "parameters": sum(p.numel for p in report.trace.parameters),
    }


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    explain(MptConfig(d_model=64, n_heads=2, n_layers=1), device_type=arguments.device)  # first use of torch's tables
    models = {
        f"{name} {preset}": measure(config, preset, arguments)
        for name, config in MODELS.items()
        for preset in ("amp", "exact")
    }
    layers = {n: measure(MptConfig(d_model=4096, n_heads=32, n_layers=n, **MPT), "amp", arguments) for n in LAYERS}
    for name, row in models.items():
        seconds, size = f"{row['median_s']:6.2f} s (min {row['min_s']:.2f})", row["parameters"] / 1e9
        print(f"{name:20} {seconds}  {row['ops']:7} ops  {size:6.1f} G parameters")
    for n, row in layers.items():
        print(f"MPT of {n:2} layers      {1000 * row['min_s'] / n:6.1f} ms a layer")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the process: {peak:.2f} GiB, torch {torch.__version__}")
    if arguments.json:
        found = {"models": models, "layers": layers, "peak_gib": peak, "torch": torch.__version__}
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
