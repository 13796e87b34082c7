"""`PrecisionAudit`: a callback that audits the first optimizer step of a run and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from .compiled import why_not_recordable
from .contract import make_contract
from .facts import RunFacts, find_disagreement, read_facts
from .findings import describe_findings
from .log import get_logger
from .policy import PrecisionPolicy
from .report import PrecisionReport, RunRecord
from .step_audit import StepAudit, publish
from .trackers import log_report

logger = get_logger(__name__)


class PrecisionAudit(TrainerCallback):
    """Audit each Trainer's first optimizer step: log findings, write ``precision.json`` and ``precision.html``.

    It only looks. `FSDPAutocast` uses it for ``audit=True``; alone it shows what a stock run does:
    ``Trainer(..., callbacks=[PrecisionAudit()])``. Steps after the first cost nothing.

    Args:
        strict: raise before the second step where a finding of severity error exists on any rank.
        report_dir: folder for the files; default is the Trainer's output folder.
        policy: called with the Trainer's arguments, gives the policy in force; None for a stock run.

    Attributes:
        report: this rank's report, once the first step is done.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        report_dir: str | Path | None = None,
        policy: Callable[[Any], PrecisionPolicy | None] | None = None,
    ) -> None:
        self.strict = strict
        self.report_dir = report_dir
        self.report: PrecisionReport | None = None
        self._policy = policy
        self._audit: StepAudit | None = None
        self._facts: RunFacts | None = None
        self._faults: str | None = None
        self._audited: dict[
            int, Any
        ] = {}  # arguments of the runs that were audited, held so that their id stays theirs

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start recording, the first time."""
        if id(args) in self._audited:
            return
        self._abandon()  # one whose step raised
        model = kwargs["model"]
        self._facts = read_facts(args, model)
        compiled = bool(getattr(args, "torch_compile", False))
        if reason := why_not_recordable(model, compiled):
            self._audited[id(args)] = args
            if self._facts.is_main_process:
                logger.warning(reason)
            return
        policy = self._policy(args) if self._policy is not None else None
        contract = make_contract(policy, self._facts, find_disagreement(self._facts) or "")
        settings = {"per_device_train_batch_size": str(args.per_device_train_batch_size)}
        settings["gradient_accumulation_steps"] = str(args.gradient_accumulation_steps)
        run = RunRecord(world_size=args.world_size, step=state.global_step + 1, args=settings)
        run.policy = policy.describe() if policy is not None else ""
        self._audit = StepAudit(model, contract, run, compiled=compiled)
        self._audit.start()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop recording; gradients are still there (transformers >= 4.46)."""
        self._finish(args, state, kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop recording in releases without `on_optimizer_step`; stop training where `strict` demands it."""
        self._finish(args, state, kwargs.get("optimizer"))
        if self._faults is not None:
            faults, self._faults = self._faults, None
            raise RuntimeError(faults)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove what a run without a whole step left."""
        self._abandon()

    def _abandon(self) -> None:
        if self._audit is not None:
            self._audit.abandon()
            self._audit = None

    def _finish(self, args: Any, state: Any, optimizer: Any) -> None:
        if self._audit is None or self._facts is None:
            return
        audit, self._audit = self._audit, None
        self._audited[id(args)] = args
        self.report = audit.stop(optimizer)
        if self._facts.is_main_process:
            publish(self.report, self.report_dir or args.output_dir)
            log_report(self.report, args, audit.run.step)
        if self.strict and _any_rank(bool(self.report.errors), args.device):
            errors = self.report.errors or self.report.findings
            self._faults = f"strict=True, and step {audit.run.step} has faults:\n{describe_findings(errors)}"


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any rank says so; all ranks must call it. Ranks that raised alone would leave the others waiting."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    votes = torch.tensor([float(flag)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())
