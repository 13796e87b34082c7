#!/usr/bin/env python
"""Print what several audited runs computed in which dtype, side by side; with --svg also as a picture.

python scripts/compare_precision.py DDP=outputs/ddp "FSDP2 stock=outputs/stock" [--svg table.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from hf_fsdp_amp import PrecisionReport
from hf_fsdp_amp.report_table import compare


def main() -> int:
    """Exit code 0, or 2 with a line where a report cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a column's name, and the run's output folder")
    parser.add_argument("--svg", type=Path, help="also write the table as a picture")
    arguments = parser.parse_args()
    runs = [run.partition("=") for run in arguments.runs]
    try:
        reports = [PrecisionReport.load(Path(folder) / "precision.json") for _, _, folder in runs]
    except (OSError, ValueError) as error:
        print(f"compare_precision.py: {error}", file=sys.stderr)
        return 2
    console = Console(width=100, record=arguments.svg is not None)
    console.print(compare(reports, [name for name, _, _ in runs]))
    if arguments.svg is not None:
        console.save_svg(str(arguments.svg), title="the same first step, trained in four ways")
    return 0


if __name__ == "__main__":
    sys.exit(main())
