"""Which architectures of transformers `explain` reports on under CUDA's rules, and why not on the others.

``python -m tests.dry_coverage [OUT.json] [preset]`` prints the list. Needs a CUDA build of torch, and no GPU.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

import torch
import transformers

from hf_fsdp_amp import explain
from tests.architectures import build, names


def look(name: str, kind: str, preset: str) -> dict[str, Any] | None:
    """What became of one architecture; None where the rule in `tests.architectures` builds none."""
    try:
        tiny = build(name, kind)
    except Exception:  # `python -m tests.architectures` tells why
        return None
    torch.manual_seed(0)
    report = explain(tiny.model, preset=preset, inputs=tiny.inputs, seq_len=16)
    found = [f for f in report.findings if f.code in ("dtype-mismatch", "dry-run-incomplete")]
    return {
        "name": name,
        "kind": kind,
        "stopped": [f"{f.module or '(root)'}: {f.evidence}" for f in found if f.code == "dry-run-incomplete"],
        "crashes": [f"{f.module or '(root)'}: {f.evidence}" for f in found if f.code == "dtype-mismatch"],
        "guesses": report.trace.guesses,
        "ops": len(report.trace.ops),
        "backward": sum(op.count for op in report.trace.ops if op.phase == "backward"),
    }


def main(out: str = "", preset: str = "amp") -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    records = [record for name, kind in names() if (record := look(name, kind, preset)) is not None]
    if out:
        with open(out, "w") as stream:
            json.dump(records, stream)
    whole = [r for r in records if not r["stopped"]]
    for record in records:
        for line in record["stopped"]:
            print(f"{record['name']:24} stopped  {line}")
        for line in record["crashes"]:
            print(f"{record['name']:24} crashes  {line}")
    print(
        f"{len(whole)} of {len(records)} architectures reported whole, {sum(not r['guesses'] for r in whole)} of them"
    )
    print("without a guess; by kind:", dict(collections.Counter(r["kind"] for r in whole)))


if __name__ == "__main__":
    main(*sys.argv[1:])
