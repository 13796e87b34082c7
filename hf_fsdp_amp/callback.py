"""`FSDPAutocast`: ties facts, policy, sharding and patching to the Trainer's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback

from .audit_callback import PrecisionAudit
from .costs import gathered_bytes
from .facts import RunFacts, find_disagreement, is_gradient_scaler_missing, read_facts
from .first_call import BeforeFirstCall
from .fp32_choice import Fp32Choice, choose_fp32
from .log import get_logger
from .param_dtypes import pin_fp32
from .patching import patch_model, patch_targets
from .policy import LOW_DTYPES, PrecisionPolicy, check_preset, dtype_name, parse_dtype, resolve_policy
from .report import PrecisionReport
from .sharding import custom_policy, mend_units, read_units, set_plugin_policy, users_unit_policy

logger = get_logger(__name__)


@dataclass
class _Run:
    """One Trainer's run: its arguments (held, so that their id stays theirs), facts, and the policy in force."""

    args: Any
    facts: RunFacts
    policy: PrecisionPolicy | None
    fp32: Fp32Choice = field(default_factory=Fp32Choice)
    pins: BeforeFirstCall | None = None


class FSDPAutocast(TrainerCallback):
    """Make ``bf16=True`` / ``fp16=True`` mean under FSDP what it means under DDP.

    Pass it to the Trainer's constructor: ``Trainer(..., callbacks=[FSDPAutocast()])``. Before the model is sharded
    it sets FSDP's mixed-precision policy on accelerate's plugin; once FSDP has been set up it runs the model's
    forward under autocast of the training dtype. Without FSDP it does nothing.

    Args:
        preset: ``"amp"``, ``"exact"``, ``"fsdp"`` or ``"stock"``; see `hf_fsdp_amp.policy.PRESETS`.
        dtype: the training dtype; default is what the Trainer was told. Another one is refused.
        reduce_dtype: dtype of the gradient reduction: ``"fp32"`` (as DDP), ``"bf16"`` or ``"fp16"``.
        keep_fp32: regular expressions; parameters whose name one of them matches are gathered in fp32 (FSDP2).
        audit: record the first optimizer step of a run, op by op, and report it; later steps cost nothing.
        strict: stop before the second step where the audit has a finding of severity error.
        report_dir: folder for ``precision.json`` and ``precision.html``; default is the Trainer's output folder.

    Raises:
        ValueError: unknown preset or dtype (here); settings that contradict each other (when the Trainer is built).
        RuntimeError: when training begins and the model is not sharded as it was asked to be.
    """

    def __init__(
        self,
        preset: str = "amp",
        *,
        dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype = "fp32",
        keep_fp32: Iterable[str] = (),
        audit: bool = True,
        strict: bool = False,
        report_dir: str | Path | None = None,
    ) -> None:
        check_preset(preset)
        self.preset = preset
        self.dtype = None if dtype is None else parse_dtype(dtype, "dtype", LOW_DTYPES)
        self.reduce_dtype = parse_dtype(reduce_dtype, "reduce_dtype")
        self.keep_fp32 = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
        self.audit = audit
        self._audit = PrecisionAudit(strict=strict, report_dir=report_dir, policy=self._policy_of)
        self._runs: dict[int, _Run] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the policy on accelerate's plugin and patch the model, before anything shards or runs it."""
        plugin = read_facts(args, None).plugin
        before = None if plugin is None else plugin.mixed_precision_policy
        try:
            self._set_up(args, kwargs.get("model"))
        except Exception:
            # accelerate keeps the plugin for the next Trainer with these arguments, which may come without us
            if plugin is not None:
                plugin.mixed_precision_policy = before
            raise

    def _set_up(self, args: Any, model: nn.Module | None) -> None:
        run = self._start(args, model)
        if run.policy is None or model is None or self.preset == "stock":
            return
        if run.facts.sharded_at_load and run.policy.preset != "custom":
            mend_units(model, run.policy)
        run.fp32 = self._choose_fp32(model, run)
        if run.facts.sharded_at_load and run.fp32.names:
            pin_fp32(model, run.fp32.names)
        elif run.fp32.names:  # evaluate() before train() shards and runs the model (accelerate 1.16)
            run.pins = BeforeFirstCall(model, partial(pin_fp32, names=run.fp32.names))
        # Already now, so that evaluate() before train(), and callbacks that run the model first, get autocast too.
        self._patch(model, run.policy)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the sharded model has the policy, mend it where it can be, and patch it."""
        model: nn.Module = kwargs["model"]
        run = self._runs.get(id(args))
        if run is None:  # added with trainer.add_callback(): on_init_end never came
            run = self._start(args, model)
            run.fp32 = self._choose_fp32(model, run)
        if run.policy is None or self.preset == "stock":
            return
        if run.pins is not None:
            run.pins.cancel()
        self._check_sharded(model, run)
        if run.policy.preset != "custom" and (mended := mend_units(model, run.policy)):
            _say(
                run.facts,
                logger.warning,
                f"{len(mended)} FSDP units had another policy and were set to: {run.policy.describe()}.",
            )
        if run.fp32.names:
            pin_fp32(model, run.fp32.names)
        self._patch(model, run.policy)
        if run.policy.dtype is torch.float16 and is_gradient_scaler_missing(kwargs.get("optimizer")):
            _say(
                run.facts,
                logger.warning,
                "fp16 without a gradient scaler (accelerate makes none on this device): small gradients become zero. "
                "Use bf16=True, or a device accelerate scales gradients on.",
            )

    @property
    def report(self) -> PrecisionReport | None:
        """The audit of the last audited run, on every rank; None before its first step has ended."""
        return self._audit.report

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record, if this is the first step of the run."""
        run = self._runs.get(id(args))
        if self.audit and run is not None and (run.policy is not None or run.facts.fsdp_requested):
            self._audit.on_step_begin(args, state, control, **kwargs)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the recording and publish it on rank 0. Raises RuntimeError where `strict` and it has errors."""
        self._audit.on_optimizer_step(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same in transformers < 4.46, which has no `on_optimizer_step`."""
        self._audit.on_step_end(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove what an audit without a whole step left; the patched forward stays, for evaluation after training."""
        self._audit.on_train_end(args, state, control, **kwargs)

    def _policy_of(self, args: Any) -> PrecisionPolicy | None:
        run = self._runs.get(id(args))
        return None if run is None else run.policy

    def _start(self, args: Any, model: nn.Module | None) -> _Run:
        facts = read_facts(args, model)
        run = _Run(args, facts, self._resolve(facts))
        self._runs[id(args)] = run
        if run.policy is None or self.preset == "stock":
            return run
        own = None
        if facts.plugin is None and model is not None:
            own = users_unit_policy(model, run.policy)
        elif facts.plugin is not None and not set_plugin_policy(facts.plugin, run.policy):
            own = facts.plugin.mixed_precision_policy
        if own is not None:
            run.policy = custom_policy(own, run.policy)
            _say(
                facts,
                logger.warning,
                f"your own FSDP mixed-precision policy stands, not preset {self.preset!r}: {own}.",
            )
        _say(facts, logger.info, run.policy.describe())
        return run

    def _resolve(self, facts: RunFacts) -> PrecisionPolicy | None:
        """The policy for these facts; None, with one line in the log, where there is nothing to do."""
        if problem := find_disagreement(facts):
            raise ValueError(problem)
        if self.dtype is not None and dtype_name(self.dtype) != facts.mixed_precision:
            raise ValueError(
                f"FSDPAutocast(dtype={dtype_name(self.dtype)!r}) but the Trainer trains in mixed precision "
                f"{facts.mixed_precision!r}: set {dtype_name(self.dtype)}=True in TrainingArguments or leave dtype out."
            )
        if self.preset != "stock" and (reason := why_inactive(facts)):
            log = logger.warning if facts.fsdp_requested and facts.fsdp_version == 0 else logger.info
            _say(facts, log, reason)
            return None
        if facts.mixed_precision not in LOW_DTYPES:  # "stock" in a run without mixed precision
            return None
        return resolve_policy(
            self.preset,
            facts.mixed_precision,
            fsdp_version=facts.fsdp_version,
            device_type=facts.device_type,
            reduce_dtype=self.reduce_dtype,
            keep_fp32=self.keep_fp32,
        )

    @staticmethod
    def _choose_fp32(model: nn.Module, run: _Run) -> Fp32Choice:
        """What stays in fp32; before the model is patched, for its forward is traced. Says how, and what it costs."""
        if run.policy is None or run.policy.preset in ("stock", "custom"):
            return Fp32Choice()
        choice = choose_fp32(model, run.policy, run.facts.world_size)
        for line in choice.lines:
            _say(run.facts, logger.info, line)
        if run.policy.preset == "exact" and run.policy.fsdp_version == 1:
            _say(run.facts, logger.warning, _fsdp1_exact_cost(model, run.policy, run.facts.world_size))
        return choice

    @staticmethod
    def _check_sharded(model: nn.Module, run: _Run) -> None:
        if not read_units(model):
            raise RuntimeError("FSDP was set up, but no module of the model is sharded: it would train without FSDP.")
        outer = getattr(model, "_orig_mod", model)
        if run.facts.fsdp_version == 1 and not isinstance(outer, FullyShardedDataParallel):
            raise RuntimeError(
                "the Trainer lost FSDP1's root wrapper (it does when evaluate() comes before train()): "
                "set trainer.model_wrapped = trainer.model before train()."
            )

    @staticmethod
    def _patch(model: nn.Module, policy: PrecisionPolicy) -> None:
        dtype = policy.dtype if policy.autocast else torch.float32
        patch_model(model, dtype, device_type=policy.device_type, cache_enabled=policy.cache_enabled)
        logger.debug("patched %s", [type(target).__name__ for target in patch_targets(model)])


def _fsdp1_exact_cost(model: nn.Module, policy: PrecisionPolicy, world_size: int) -> str:
    low = gathered_bytes(model, policy.dtype, (), world_size)
    return (
        f"preset 'exact' under FSDP1 gathers every parameter in fp32, {2 * low / 2**20:.1f} MiB a pass instead of "
        f"{low / 2**20:.1f}: its flat parameters have one dtype per unit. FSDP2 (fsdp_config version 2) needs less."
    )


def why_inactive(facts: RunFacts) -> str | None:
    """One line saying why there is nothing to do in this run; None where there is something."""
    if facts.fsdp_version == 0 and not facts.fsdp_requested:
        return "no FSDP in this run: accelerate's own autocast is right, nothing to do."
    if facts.fsdp_version == 0 and facts.device_type == "cpu":
        return (
            "FSDP was asked for, but accelerate is about to train DDP instead, for it does not shard on CPU: call "
            "hf_fsdp_amp.enable_cpu_fsdp() before the Trainer is built to rehearse FSDP on CPU."
        )
    if facts.fsdp_version == 0:
        return f"FSDP was asked for, but accelerate is about to train {facts.distributed_type} instead."
    if facts.mixed_precision not in LOW_DTYPES:
        return (
            f"mixed precision is {facts.mixed_precision!r}, nothing to do: "
            "set bf16=True or fp16=True in TrainingArguments for autocast."
        )
    return None


def _say(facts: RunFacts, log: Any, line: str) -> None:
    if facts.is_main_process:
        log(f"hf_fsdp_amp: {line}")
