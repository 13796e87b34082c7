"""Audit one optimizer step of a run: start before it, stop after it, then publish the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from .audit import LiveRecording
from .facts import RunFacts
from .log import get_logger
from .patching import unwrap_model
from .policy import PrecisionPolicy
from .report import PrecisionReport, RunRecord
from .trace import Trace

logger = get_logger(__name__)

JSON_NAME = "precision.json"


class StepAudit:
    """The recording of one step, and what run it is of.

    Args:
        model: the model as it is trained.
        policy: the policy in force.
        facts: how the run is set up.
        step: the optimizer step that is about to begin, from 1.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy, facts: RunFacts, step: int) -> None:
        self.recording = LiveRecording(model, device_type=policy.device_type)
        self.run = RunRecord(
            model=_class_name(model),
            preset=policy.preset,
            dtype=facts.mixed_precision,
            policy=policy.describe(),
            fsdp_version=facts.fsdp_version,
            distributed_type=facts.distributed_type,
            device_type=policy.device_type,
            world_size=facts.world_size,
            step=step,
        )

    def start(self) -> None:
        """Begin to record; every op costs a Python call until `stop`."""
        self.recording.start()

    def stop(self, optimizer: Any) -> PrecisionReport:
        """Remove everything that records, and report.

        Args:
            optimizer: the optimizer, accelerate's wrapper or torch's own.
        """
        trace = self.recording.stop(Trace(device_type=self.recording.device_type), optimizer)
        return PrecisionReport(trace, run=self.run)


def publish(report: PrecisionReport, folder: str | Path) -> Path:
    """Write the report as JSON into `folder` and log its table; returns the JSON's path. For rank 0."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = report.save(folder / JSON_NAME)
    try:
        text = report.to_text()
    except ImportError as error:  # rich is an extra
        text = str(error)
    logger.info("precision of step %d, also in %s:\n%s", report.run.step, path, text)
    return path


def _class_name(model: nn.Module) -> str:
    return type(unwrap_model(model)).__name__.removeprefix("FSDP")
