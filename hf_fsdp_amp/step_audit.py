"""`StepAudit`: record one optimizer step of a running Trainer, judge it, write the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .audit import LiveRecording
from .contract import Contract
from .findings import describe_findings, find_faults
from .log import get_logger
from .patching import unwrap_model
from .recorder import class_name
from .report import PrecisionReport, RunRecord
from .report_html import save_html
from .trace import Trace

logger = get_logger(__name__)

JSON_NAME = "precision.json"
HTML_NAME = "precision.html"


class StepAudit:
    """Records from `start` to `stop`; before and after there is nothing of it on the model.

    Start it before the step's first forward (``on_step_begin``), stop it after the optimizer has stepped
    (``on_optimizer_step``; in releases without that event ``on_step_end``, where gradients are gone, but were read
    before the optimizer's step). A forward that raises ends it by itself.

    Args:
        model: the model, sharded or wrapped as it is trained.
        contract: what the run's settings promise.
        run: what the report shall say about the run; what the contract knows is filled in.
        reference: a trace of the same model under plain AMP, where there is one.
        compiled: torch.compile is known to wrap the model from outside.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: Contract,
        run: RunRecord | None = None,
        reference: Trace | None = None,
        compiled: bool = False,
    ) -> None:
        self.contract = contract
        self.reference = reference
        name = class_name(unwrap_model(model))
        how = {"preset": contract.preset, "dtype": contract.dtype, "fsdp_version": contract.fsdp_version}
        where = {"distributed_type": contract.distributed_type, "device_type": contract.device_type}
        self.run = replace(run or RunRecord(), model=name, **how, **where)  # type: ignore[arg-type]
        self._recording: LiveRecording | None = LiveRecording(
            model, device_type=contract.device_type, compiled=compiled
        )

    @property
    def running(self) -> bool:
        """Whether it records now."""
        return self._recording is not None and self._recording.running

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: it has been stopped: one audit records one step.
        """
        if self._recording is None:
            raise RuntimeError("this StepAudit has been stopped: make a new one for another step.")
        self._recording.start()

    def abandon(self) -> None:
        """End the recording without a report."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None

    def stop(self, optimizer: Any = None) -> PrecisionReport:
        """End the recording and judge it.

        Args:
            optimizer: accelerate's optimizer wrapper, for the gradient scaler on it.

        Raises:
            RuntimeError: it has been stopped before.
        """
        if self._recording is None:
            raise RuntimeError("this StepAudit has been stopped.")
        trace = self._recording.stop(Trace(device_type=self.contract.device_type), optimizer)
        self._recording = None  # holds the model
        return PrecisionReport(trace, find_faults(trace, self.contract, self.reference), self.run)


def publish(report: PrecisionReport, folder: str | Path) -> list[Path]:
    """Write the report into `folder` and log it: as a warning where it has errors or warnings. For rank 0.

    Args:
        report: the report.
        folder: where ``precision.json`` and, where jinja2 is installed, ``precision.html`` go; made if absent.

    Returns:
        The files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [report.save(folder / JSON_NAME)]
    try:
        written.append(save_html(report, folder / HTML_NAME))
    except ImportError as error:
        logger.info("%s", error)
    try:
        text = report.to_text()
    except ImportError:  # without rich: the findings alone
        text = describe_findings(report.findings)
    serious = any(finding.severity != "note" for finding in report.findings)
    say = logger.warning if serious else logger.info
    say("precision of step %d, also in %s:\n%s", report.run.step, ", ".join(map(str, written)), text)
    return written
