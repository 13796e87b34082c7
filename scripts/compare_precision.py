#!/usr/bin/env python
"""Print what several audited runs computed in which dtype, side by side: ``compare_precision.py name=folder ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from hf_fsdp_amp import PrecisionReport
from hf_fsdp_amp.report_table import compare


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with a line on how to call it."""
    runs = [argument.partition("=") for argument in arguments]
    if not runs or not all(name and folder for name, _, folder in runs):
        print("usage: compare_precision.py name=folder [name=folder ...]", file=sys.stderr)
        return 2
    reports = [PrecisionReport.load(Path(folder) / "precision.json") for _, _, folder in runs]
    Console().print(compare(reports, [name for name, _, _ in runs]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
