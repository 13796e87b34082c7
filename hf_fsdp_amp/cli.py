"""The command line: ``hf-fsdp-amp explain | show | diff``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cli_explain
from .diff import render_diff
from .report import PrecisionReport
from .report_html import save_html
from .report_table import render_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 where a report shown has findings of severity error (for ``diff``: the second one); 2 where a file
        cannot be read, an option is wrong, or what is asked for cannot be had.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        sys.stderr.write(f"hf-fsdp-amp: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-fsdp-amp", description="Which dtype does every op of a run use?")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "which dtype every op will use, before there is a GPU or a step; exit code 1 where it has errors"
    explain = commands.add_parser("explain", help=about, description=about)
    cli_explain.add_arguments(explain)
    show = commands.add_parser("show", help="show a report; exit code 1 where it has errors")
    show.add_argument("report", type=Path, help="precision.json")
    show.add_argument("--html", type=Path, metavar="FILE", help="also write the HTML page")
    show.set_defaults(run=_show)
    diff = commands.add_parser("diff", help="what changed between two runs; exit code 1 where the second has errors")
    diff.add_argument("before", type=Path, help="precision.json of the first run")
    diff.add_argument("after", type=Path, help="precision.json of the second run")
    diff.set_defaults(run=_diff)
    for command in (explain, show, diff):
        command.add_argument("--width", type=int, default=80, help="columns (default 80)")
        command.add_argument("--color", action=argparse.BooleanOptionalAction, default=sys.stdout.isatty())
    return parser


def _show(args: argparse.Namespace) -> int:
    report = PrecisionReport.load(args.report)
    sys.stdout.write(report.to_text(args.width, args.color))
    if args.html is not None:
        save_html(report, args.html)
    return int(bool(report.errors))


def _diff(args: argparse.Namespace) -> int:
    before, after = PrecisionReport.load(args.before), PrecisionReport.load(args.after)
    sys.stdout.write(render_text(render_diff(before, after), args.width, args.color))
    return int(bool(after.errors))


if __name__ == "__main__":
    sys.exit(main())
