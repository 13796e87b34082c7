"""`PrecisionReport`: a step's trace, the findings, and what run they are of; as JSON and in the terminal."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .findings import Finding
from .trace import Trace, from_plain, to_plain

SCHEMA = "hf_fsdp_amp.precision/1"
"""Name and version of the JSON: the version grows when a field changes its meaning or goes; new fields don't count.

Top level: ``schema``, ``run`` (`RunRecord`), ``findings`` (list of `Finding`), ``trace`` (`Trace`). Fields that hold
their default are left out. Dtypes are short names, sizes are bytes.
"""

_PACKAGES = ("hf_fsdp_amp", "torch", "transformers", "accelerate")


def read_versions() -> dict[str, str]:
    """Installed versions of this package and of what it stands on; one that is not installed is left out."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # this package run from a checkout
            continue
    return versions


@dataclass
class RunRecord:
    """What run a report is of.

    Args:
        model: class name of the model.
        preset: preset in force, ``"stock"`` where none.
        dtype: training dtype, ``"no"`` where the run is not mixed.
        policy: the policy in one line.
        fsdp_version: 0 (none), 1 or 2.
        distributed_type: what trains it: ``"FSDP"``, ``"DDP"``, ``"no"``, or accelerate's own name.
        device_type: device type it computes on.
        world_size: ranks.
        step: optimizer step that was traced, from 1.
        versions: package versions.
        args: further settings that shape the run (batch size, sequence length), by name.
    """

    model: str = ""
    preset: str = "stock"
    dtype: str = "no"
    policy: str = ""
    fsdp_version: int = 0
    distributed_type: str = "no"
    device_type: str = "cpu"
    world_size: int = 1
    step: int = 1
    versions: dict[str, str] = field(default_factory=read_versions)
    args: dict[str, str] = field(default_factory=dict)

    def title(self) -> str:
        """One line: model, how it is trained, preset."""
        how = f"FSDP{self.fsdp_version}" if self.fsdp_version else self.distributed_type.replace("no", "one device")
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 rank"
        return f"{self.model}: {how}, {self.dtype}, preset {self.preset}, {ranks}, {self.device_type}"


@dataclass
class PrecisionReport:
    """Everything known about the precision of one step.

    Shown in a terminal by ``rich.print(report)``, in a notebook by itself, in a file by `save`.

    Args:
        trace: the step.
        findings: what is wrong or worth knowing, errors first.
        run: what run it is of.
    """

    trace: Trace
    findings: list[Finding] = field(default_factory=list)
    run: RunRecord = field(default_factory=RunRecord)

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity error."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text, see `SCHEMA`."""
        data = {
            "schema": SCHEMA,
            "run": to_plain(self.run),
            "findings": [to_plain(finding) for finding in self.findings],
            "trace": self.trace.to_dict(),
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> PrecisionReport:
        """The report that `to_json` gave.

        Raises:
            ValueError: not such a report, or one of another schema version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a precision report: {error}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema is {schema!r}, this version reads {SCHEMA!r}.")
        return cls(
            Trace.from_dict(data.get("trace", {})),
            [from_plain(Finding, finding) for finding in data.get("findings", [])],
            from_plain(RunRecord, data.get("run", {})),
        )

    @classmethod
    def load(cls, path: str | Path) -> PrecisionReport:
        """The report in a JSON file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no report.
        """
        return cls.from_json(Path(path).read_text())

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON; returns the path."""
        Path(path).write_text(self.to_json())
        return Path(path)

    def to_text(self, width: int = 80, color: bool = False) -> str:
        """The terminal's view as text.

        Raises:
            ImportError: rich is not installed.
        """
        from .report_table import render_text

        return render_text(self, width, color)

    def __rich__(self) -> Any:
        from .report_table import render

        return render(self)

    def _repr_html_(self) -> str:
        return f"<pre>{_escape(self.to_text())}</pre>"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
