"""`explain`: which dtype every op of a training step will use, before there is a GPU, weights, or a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .config_models import load_model, longest_sequence
from .contract import Finding, make_contract
from .dryrun import DryRun, dry_run
from .fake_device import missing_support
from .findings import find_faults, sort_findings
from .fp32_choice import choose_fp32
from .patching import unwrap_model
from .policy import LOW_DTYPES, PRESETS, PrecisionPolicy, dtype_name, parse_dtype, resolve_policy
from .report import PrecisionReport, RunRecord
from .sharding import read_units, stock_policy
from .trace import Trace

WITHOUT_US = {
    "stock-fsdp1": "what the installed accelerate does under FSDP1",
    "stock-fsdp2": "what the installed accelerate does under FSDP2",
    "ddp": "plain AMP: fp32 parameters and autocast, under DDP or on one device",
}
EXPLAINED = (*(p for p in PRESETS if p != "stock"), *WITHOUT_US)
"""The presets that `explain` takes."""


def explain(
    model_or_config_or_path: Any,
    *,
    preset: str = "amp",
    dtype: str | torch.dtype = "bf16",
    fsdp_version: int = 2,
    world_size: int = 8,
    batch_size: int = 1,
    seq_len: int = 2048,
    device_type: str = "cuda",
    inputs: Mapping[str, Any] | None = None,
    reduce_dtype: str | torch.dtype = "fp32",
    keep_fp32: Iterable[str] = (),
    trust_remote_code: bool = False,
) -> PrecisionReport:
    """Report one training step, forward and backward, as it will be on a device that need not be there.

    The step runs on fake tensors under the device type's autocast rules (CUDA's need a CUDA build of torch, no GPU),
    with FSDP's casts of parameters, inputs and outputs. Nothing is computed, no weights are loaded, and a model that
    is passed in is left as it is. It is judged against plain AMP, which runs first.

    Args:
        model_or_config_or_path: a model that is not sharded, a config, a hub id, a folder, or a ``config.json``.
        preset: one of `EXPLAINED`.
        dtype: training dtype, ``"bf16"`` or ``"fp16"``.
        fsdp_version: 1 or 2; the presets `WITHOUT_US` say it themselves.
        world_size: ranks that the parameters are sharded over.
        batch_size, seq_len: of the inputs on each rank; text longer than the model's positions is cut to them.
        device_type: whose rules apply, ``"cuda"`` or ``"cpu"``.
        inputs: a batch of your own in place of one made from the config.
        reduce_dtype, keep_fp32: as in `FSDPAutocast`.
        trust_remote_code: run code that comes with the config.

    Returns:
        The same report as a live audit's, with ``trace.source == "fake"``, the bytes in ``trace.memory``, what had to
        be assumed in ``trace.guesses``. An op that the device's kernels will refuse is a finding ``dtype-mismatch``;
        where the run could not go on, ``dry-run-incomplete`` says in which op and module.

    Raises:
        ValueError: an unknown option, a config or model that cannot be had, a model that is sharded.
        RuntimeError: this torch build has no such device type.
    """
    if missing := missing_support(device_type):
        raise RuntimeError(missing)
    policy = explained_policy(
        preset, dtype, fsdp_version, device_type, reduce_dtype=reduce_dtype, keep_fp32=tuple(keep_fp32)
    )
    model = load_model(model_or_config_or_path, trust_remote_code=trust_remote_code)
    return Explainer(model, dtype, device_type, world_size, batch_size, seq_len, inputs).report(policy, preset)


def explained_policy(
    preset: str,
    dtype: str | torch.dtype,
    fsdp_version: int,
    device_type: str,
    *,
    reduce_dtype: str | torch.dtype = "fp32",
    keep_fp32: tuple[str, ...] = (),
) -> PrecisionPolicy:
    """The policy of one of `EXPLAINED`.

    Raises:
        ValueError: an unknown preset, dtype or FSDP version.
    """
    if preset not in EXPLAINED:
        raise ValueError(f"preset={preset!r} is not known: use one of {', '.join(map(repr, EXPLAINED))}.")
    if preset == "ddp":
        return replace(resolve_policy("amp", dtype, fsdp_version=0, device_type=device_type), preset="stock")
    if preset in WITHOUT_US:
        version = int(preset[-1])
        return as_installed(resolve_policy("stock", dtype, fsdp_version=version, device_type=device_type))
    if fsdp_version not in (1, 2):
        raise ValueError(f"fsdp_version={fsdp_version!r} is not supported: use 1 or 2, or preset 'ddp' without FSDP.")
    return resolve_policy(
        preset,
        dtype,
        fsdp_version=fsdp_version,
        device_type=device_type,
        reduce_dtype=reduce_dtype,
        keep_fp32=keep_fp32,
    )


def as_installed(policy: PrecisionPolicy) -> PrecisionPolicy:
    """A stock policy with the dtypes that the installed accelerate sets."""
    own = stock_policy(policy.fsdp_version, policy.dtype)
    return replace(
        policy,
        param_dtype=own.param_dtype,
        reduce_dtype=own.reduce_dtype,
        output_dtype=getattr(own, "output_dtype", None),
        buffer_dtype=getattr(own, "buffer_dtype", None),
    )


class Explainer:
    """Dry runs of one model under several policies, all judged against one run of plain AMP.

    Args:
        model: not sharded.
        dtype, device_type, world_size, batch_size, seq_len, inputs: as in `explain`.

    Raises:
        ValueError: the model is sharded, has no parameters, or a number is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: str | torch.dtype,
        device_type: str,
        world_size: int,
        batch_size: int,
        seq_len: int,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("world_size", world_size), ("batch_size", batch_size), ("seq_len", seq_len)):
            if value < 1:
                raise ValueError(f"{name}={value} must be 1 or more.")
        self.model = _check(model)
        self.dtype = parse_dtype(dtype, "dtype", LOW_DTYPES)
        self.device_type = device_type
        self.world_size = world_size
        self.batch_size = batch_size
        self.inputs = inputs
        longest = longest_sequence(self.model)
        self.seq_len = min(seq_len, longest or seq_len)
        self.note = f"seq_len {seq_len} is beyond the model's {longest} positions: {longest} was taken."
        if self.seq_len == seq_len:
            self.note = ""
        self._candidate = 0
        self._reference: DryRun | None = None

    def report(self, policy: PrecisionPolicy, preset: str) -> PrecisionReport:
        """The report of one policy; `preset` is what it is called in the report."""
        reference = self._plain_amp()
        fp32 = choose_fp32(self.model, policy, self.world_size)
        run = self._dry_run(policy, fp32.names, self._candidate, backward=True)
        run.trace.notes += [*([self.note] if self.note else []), *fp32.lines]
        contract = make_contract(policy)
        plain = reference.trace if reference.finished else None
        findings = find_faults(run.trace, contract, plain)
        if not run.finished:
            findings = [f for f in findings if f.code not in _NEEDS_A_WHOLE_STEP]
        findings = sort_findings([*run.findings, *self._plain_too(findings, reference)])
        return PrecisionReport(run.trace, findings, self._record(policy, preset))

    def plain_trace(self) -> Trace | None:
        """The forward of plain AMP; None where it cannot be run."""
        reference = self._plain_amp()
        return reference.trace if reference.finished else None

    def _plain_amp(self) -> DryRun:
        """Plain AMP's forward with the first inputs that fit: labels per token, per example, none."""
        if self._reference is not None:
            return self._reference
        policy = explained_policy("ddp", self.dtype, 0, self.device_type)
        first: DryRun | None = None
        for candidate in range(3):
            try:
                run = self._dry_run(policy, (), candidate, backward=False)
            except IndexError:
                break
            first = first or run
            if run.finished or self.inputs is not None:
                self._candidate, self._reference = candidate, run
                return run
        assert first is not None  # there is always a first candidate
        self._reference = first
        return first

    def _dry_run(self, policy: PrecisionPolicy, fp32: Iterable[str], candidate: int, backward: bool) -> DryRun:
        return dry_run(
            self.model,
            policy,
            set(fp32),
            inputs=self.inputs,
            candidate=candidate,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            world_size=self.world_size,
            backward=backward,
            sequence=True,
        )

    def _plain_too(self, findings: list[Finding], reference: DryRun) -> list[Finding]:
        """What plain AMP crashes on is said to be the model's own."""
        if any(f.severity == "error" for f in reference.findings):
            own = reference.findings[0]
            note = f"plain AMP, without FSDP, crashes in the same way: {own.evidence}"
            return [
                *findings,
                Finding("plain-amp-crashes", "note", own.module, note, "mend the model, or keep it fp32."),
            ]
        return findings

    def _record(self, policy: PrecisionPolicy, preset: str) -> RunRecord:
        alone = "DDP" if self.world_size > 1 else "no"
        sizes = {"batch_size": str(self.batch_size), "seq_len": str(self.seq_len)}
        return RunRecord(
            model=type(unwrap_model(self.model)).__name__,
            preset=preset,
            dtype=dtype_name(policy.dtype),
            policy=policy.describe(),
            fsdp_version=policy.fsdp_version,
            distributed_type="FSDP" if policy.fsdp_version else alone,
            device_type=policy.device_type,
            world_size=self.world_size,
            step=0,
            args=sizes if self.inputs is None else {"inputs": "given"},
        )


_NEEDS_A_WHOLE_STEP = ("loss-half", "logits-upcast")


def _check(model: nn.Module) -> nn.Module:
    if read_units(model):
        raise ValueError(
            "the model is sharded: explain() takes it as it is before FSDP; record_precision() a live one."
        )
    if next(iter(model.parameters()), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to run in mixed precision.")
    return model
