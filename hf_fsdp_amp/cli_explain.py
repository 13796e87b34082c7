"""``hf-fsdp-amp explain``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from .config_models import load_config, make_config
from .explain import EXPLAINED, explain
from .preset_table import COMPARED, compare_presets
from .report_html import save_html


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to explain, and where the answer goes."""
    what = command.add_argument_group("model")
    what.add_argument("model", nargs="?", help="hub id, folder or config.json; no weights are read")
    what.add_argument("--model-type", metavar="TYPE", help="a default config of transformers instead, e.g. llama")
    what.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="change the config")
    what.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the config")
    how = command.add_argument_group("training")
    how.add_argument("--preset", default="amp", choices=EXPLAINED)
    how.add_argument("--compare", action="store_true", help=f"the presets {', '.join(COMPARED)} side by side")
    how.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    how.add_argument("--fsdp-version", type=int, default=2, choices=(1, 2))
    how.add_argument("--world-size", type=int, default=8, metavar="N", help="ranks (default 8)")
    how.add_argument("--batch-size", type=int, default=1, metavar="N", help="examples a rank (default 1)")
    how.add_argument("--seq-len", type=int, default=2048, metavar="N", help="tokens (default 2048)")
    how.add_argument("--device", default="cuda", help="whose autocast rules: cuda (default) or cpu")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write precision.json")
    command.add_argument("--html", type=Path, metavar="FILE", help="also write the HTML page")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain, print, write; 1 where there are findings of severity error (with --compare: never).

    Raises:
        ValueError, RuntimeError, OSError, ImportError: one line that says what is wrong.
    """
    transformers_logging.set_verbosity_error()
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "fsdp_version": args.fsdp_version,
        "world_size": args.world_size,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "device_type": args.device,
        "trust_remote_code": args.trust_remote_code,
    }
    config = _config(args)
    if args.compare:
        if args.html is not None:
            raise ValueError("--html shows one report: leave --compare or --html out.")
        comparison = compare_presets(config, **options)
        sys.stdout.write(comparison.to_text(args.width, args.color))
        if args.json is not None:
            args.json.write_text(comparison.to_json())
        return 0
    report = explain(config, preset=args.preset, **options)
    sys.stdout.write(report.to_text(args.width, args.color))
    if args.json is not None:
        report.save(args.json)
    if args.html is not None:
        save_html(report, args.html)
    return int(bool(report.errors))


def _config(args: argparse.Namespace) -> Any:
    if (args.model is None) == (args.model_type is None):
        raise ValueError("name a model (hub id, folder or config.json), or --model-type, and not both.")
    if args.model_type is not None:
        return make_config(args.model_type, args.set)
    if args.set:
        raise ValueError("--set changes the config of a --model-type; edit config.json to change a model's.")
    return load_config(args.model, args.trust_remote_code)
