"""One training step on fake tensors: a trace without the device, without weights, without computing anything."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from .dummy_inputs import candidate_inputs
from .fake_attention import FusedAttention
from .fake_device import answers_as_if_present, autocast_rules, left_as_it_is, without_collector
from .fake_fsdp import Boundaries, collectives_of_step, compute_dtypes, training_dtype
from .fake_ops import DryRunMode, Refusal, storage_of
from .fake_parameters import FakeParameters, fake_inputs, install_buffers
from .findings import Finding
from .memory import memory_of_step
from .model_records import find_logits, find_loss, read_buffers, read_parameters
from .param_dtypes import canonical_name
from .patching import patch_model
from .planned_units import block_modules, plan_units, why_refused
from .policy import PrecisionPolicy, dtype_name
from .python_backward import walk_backward
from .recorder import Recorder, largest_floating, tensors_in
from .shadows import Shadows
from .trace import LossRecord, ScalerRecord, Trace, kind_of

_ACCELERATE = "fp32"  # what accelerate's own wrapper does with outputs, under FSDP1 and DDP


@dataclass
class DryRun:
    """What came of it.

    Args:
        trace: everything seen, up to where it stopped.
        findings: what the kernels will refuse, and where the run could not go on.
        finished: whether the whole step was seen.
        error: the exception that stopped it; None where nothing did.
    """

    trace: Trace
    findings: list[Finding] = field(default_factory=list)
    finished: bool = True
    error: Exception | None = None


def dry_run(
    model: nn.Module,
    policy: PrecisionPolicy,
    fp32_names: Collection[str] = (),
    *,
    inputs: Mapping[str, Any] | None = None,
    candidate: int = 0,
    batch_size: int = 1,
    seq_len: int = 2048,
    world_size: int = 1,
    backward: bool = True,
    sequence: bool = False,
) -> DryRun:
    """Run one step of a model under a policy on fake tensors.

    Args:
        model: the model before sharding, on any device, meta included. It is left as it is.
        policy: the policy; version 0 is DDP, or one device.
        fp32_names: parameters that FSDP2 gathers as they are stored.
        inputs: keyword arguments of the forward, real tensors on any device: their shapes and dtypes count, and the
            values of small ones that are not floating. None makes some.
        candidate: which of `candidate_inputs` to make: labels per token, per example, none.
        batch_size, seq_len: of the inputs, per rank.
        world_size: ranks, for the collectives.
        backward: run the backward, too.
        sequence: keep the order of the ops.

    Raises:
        IndexError: there is no such candidate.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_as_it_is(model))
        stack.enter_context(_clean_state(policy))
        stack.enter_context(without_collector())
        stack.enter_context(answers_as_if_present(policy.device_type, as_real=True))
        step = _Step(model, policy, fp32_names, world_size, sequence)
        stack.callback(step.remove)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(step.mode)
        stack.enter_context(FusedAttention(policy.device_type))
        step.prepare()
        if inputs is None:
            inputs = list(candidate_inputs(model, policy.device_type, batch_size, seq_len))[candidate]
        else:
            inputs = fake_inputs(inputs, policy.device_type, step.shadows)
        error = step.run(inputs, backward)
        return step.finish(error, backward)


@contextlib.contextmanager
def _clean_state(policy: PrecisionPolicy) -> Iterator[None]:
    """Whatever the caller is inside of, the step starts with gradients on and autocast off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in dict.fromkeys(("cpu", policy.device_type)):
            stack.enter_context(autocast_rules(device_type, policy.dtype, enabled=False))
        stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
        yield


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What stops a dry run becomes a finding; torch would log its traceback as well."""
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Step:
    """The parts of one dry run."""

    def __init__(
        self, model: nn.Module, policy: PrecisionPolicy, fp32_names: Collection[str], world_size: int, sequence: bool
    ) -> None:
        self.model = model
        self.policy = policy
        self.world_size = world_size
        self.originals = {canonical_name(n): p for n, p in model.named_parameters()}
        self.units = plan_units(model, policy.fsdp_version) if policy.fsdp_version else []
        self._blocks = block_modules(model)
        self.dtypes = compute_dtypes(model, policy, fp32_names)
        self.collectives = collectives_of_step(model, policy, self.units, self.dtypes, world_size)
        self.recorder = Recorder(model, policy.device_type, sequence)
        self.shadows = Shadows()
        self.mode = DryRunMode(self.recorder, self.shadows, policy.device_type)
        self.trace = Trace(device_type=policy.device_type, source="fake", micro_batches=1)
        self.saved = 0
        self.residual: dict[str, int] = {}
        self._boundaries: Boundaries | None = None
        self._handles: list[RemovableHandle] = []
        self._failed_in: str | None = None

    def remove(self) -> None:
        """Take all hooks off."""
        if self._boundaries is not None:
            self._boundaries.remove()
        for handle in self._handles:
            handle.remove()

    def prepare(self) -> None:
        """Fake parameters, hooks in the order in which a real run has them, autocast around the forward."""
        model, policy, keep = self.model, self.policy, self._handles.append
        stored = {id(p): training_dtype(p) for p in model.parameters()}
        self.fakes = FakeParameters(model, stored, self.dtypes, policy.device_type)
        self.buffers = install_buffers(model, policy.buffer_dtype, policy.device_type, self.shadows)
        for unit in self.units:
            for path in unit.paths:
                self.recorder.modules[path].is_unit = True
        self._read_model()
        for module in model.modules():
            keep(module.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._boundaries = Boundaries(model, policy, self.units, self.fakes)
        for module in model.modules():
            keep(module.register_forward_pre_hook(self._see_inputs, with_kwargs=True))
            keep(module.register_forward_hook(self._see_outputs, prepend=True))
            keep(module.register_forward_hook(self._leave, always_call=True))
        stock = policy.preset == "stock" or policy.fsdp_version == 0
        dtype = policy.dtype if policy.autocast else torch.float32
        output = ("auto" if not stock else _ACCELERATE) if policy.autocast else ("none" if stock else "auto")
        patch_model(
            model, dtype, device_type=policy.device_type, cache_enabled=policy.cache_enabled, output_dtype=output
        )

    def _read_model(self) -> None:
        self._names, self._parameters = read_parameters(self.model, self.recorder)
        self._buffer_names, self._buffers = read_buffers(self.model, self.recorder)
        unit_of = {name: unit.paths[0] for unit in self.units for name in unit.parameters}
        for name, parameter in self.originals.items():
            record = self._parameters[name]
            record.storage = dtype_name(training_dtype(parameter))
            record.unit = unit_of.get(name)

    def run(self, inputs: Mapping[str, Any], backward: bool) -> Exception | None:
        """Forward and backward; the exception that stopped it."""
        try:
            output = self.model(**inputs)
            self._read_output(output)
            held = {storage_of(t) for t in (*self.fakes.tensors(), *self.buffers, *tensors_in(inputs))}
            self.saved = self.mode.live_bytes(held)
            if backward and (loss := self._loss_of(output)) is not None:
                walk_backward(loss)
        except Exception as error:  # model code may fail in any way on fake tensors; it becomes a finding
            return error
        return None

    def _read_output(self, output: Any) -> None:
        loss = find_loss(output)
        self.trace.loss = LossRecord(None if loss is None else dtype_name(loss.dtype))
        self.trace.logits = find_logits(output, self.recorder)

    def _loss_of(self, output: Any) -> torch.Tensor | None:
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is None:
            loss = next((t for t in tensors_in(output) if t.dim() == 0 and t.grad_fn is not None), None)
        if loss is None:
            loss = largest_floating([t for t in tensors_in(output) if t.grad_fn is not None])
            if loss is None:
                self.trace.notes.append("nothing that the model returns has a gradient: there is no backward.")
                return None
            self.trace.guesses.append("the model makes no loss: the backward starts from its largest output's mean")
            loss = loss.float()
        return loss if loss.dim() == 0 else loss.mean()

    def finish(self, error: Exception | None, backward: bool) -> DryRun:
        """The trace, filled."""
        trace, recorder = self.trace, self.recorder
        trace.ops = list(recorder.ops.values())
        trace.modules = recorder.called_modules()
        trace.buffers = list(self._buffers.values())
        trace.autocast = list(recorder.autocast.values())
        trace.accumulation = list(recorder.accumulation.values())
        trace.sequence = recorder.sequence or []
        trace.collectives = self.collectives
        if recorder.backward_start is not None and trace.loss is not None:
            trace.loss.backward_dtype = dtype_name(recorder.backward_start.dtype)
        self._read_gradients(backward and error is None)
        trace.parameters = list(self._parameters.values())
        fp16 = self.policy.dtype is torch.float16
        trace.scaler = ScalerRecord(present=fp16 and self.policy.device_type != "cpu", enabled=fp16)
        trace.memory = memory_of_step(
            self.originals.values(), trace.logits, self.policy, self.world_size, self.saved, sum(self.residual.values())
        )
        trace.guesses += [f"{line} ({n} times)" if n > 1 else line for line, n in self.mode.guesses.items()]
        findings = [*self._unshardable(), *_refused(self.mode.refusals)]
        if error is not None and not self._refused_before(error):
            findings.append(self._explain(error))
        return DryRun(trace, findings, error is None, error)

    def _read_gradients(self, finished: bool) -> None:
        for name, parameter in self.originals.items():
            gradient = self.fakes.gradient(parameter)
            if finished and gradient is not None:
                # FSDP hands the reduced gradient over in the dtype of the stored parameter
                record = self._parameters[name]
                record.gradient = record.storage if self.policy.fsdp_version else dtype_name(gradient.dtype)

    def _unshardable(self) -> list[Finding]:
        reason = why_refused(self.model, self.units, self.policy.fsdp_version)
        if reason is None:
            return []
        evidence = f"{reason}: the Trainer will stop when it shards the model. What is shown is as if it had not."
        fix = "other blocks in transformer_layer_cls_to_wrap, or FSDP1 (fsdp_config={'version': 1})."
        return [Finding("fsdp-cannot-shard", "error", "", evidence, fix)]

    def _refused_before(self, error: Exception) -> bool:
        """Whether the op that stopped the run is one that was found to be refused."""
        failure, refusals = self.mode.failure, self.mode.refusals
        return failure is not None and failure[0] is error and bool(refusals) and refusals[-1].op == failure[1].op

    def _explain(self, error: Exception) -> Finding:
        failure = self.mode.failure
        if failure is not None and failure[0] is error and failure[2]:
            return _dtype_mismatch(failure[1], 1)
        where = failure[1].module if failure is not None and failure[0] is error else self._failed_in or ""
        what = failure[1].why if failure is not None and failure[0] is error else _one_line(error)
        seen = sum(op.count for op in self.recorder.ops.values())
        phase = "backward" if self.trace.loss is not None else "forward"
        evidence = f"the dry run stopped in the {phase}: {what}. {seen} ops were seen until there."
        fix = "what is shown holds up to this place; record_precision(model) sees a live step whole."
        return Finding("dry-run-incomplete", "warning", kind_of(where), evidence, fix)

    # hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._failed_in = None
        self.recorder.enter(module, args, kwargs)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recorder.see_inputs(module, args, kwargs)
        for local, name in self._names.get(id(module), ()):
            self._parameters[name].compute = dtype_name(getattr(module, local).dtype)
        for local, name in self._buffer_names.get(id(module), ()):
            self._buffers[name].compute = dtype_name(getattr(module, local).dtype)

    def _see_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        self.recorder.see_outputs(module, output)
        floating = (t for t in tensors_in(output) if t.is_floating_point())
        if module in self._blocks and (first := next(floating, None)) is not None:
            self.residual[self.recorder.path_of(module)] = first.numel() * first.element_size()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and self._failed_in is None:
            self._failed_in = self.recorder.path_of(module)
        self.recorder.leave(module, output)


def _refused(refusals: list[Refusal]) -> list[Finding]:
    """One finding per kind of module and reason."""
    counts: dict[tuple[str, str, str], tuple[Refusal, int]] = {}
    for refusal in refusals:
        key = (kind_of(refusal.module), refusal.phase, refusal.why)
        first, count = counts.get(key, (refusal, 0))
        counts[key] = (first, count + 1)
    return [_dtype_mismatch(first, count) for first, count in counts.values()]


def _dtype_mismatch(refusal: Refusal, count: int) -> Finding:
    times = f" ({count} times)" if count > 1 else ""
    evidence = f"{refusal.why}: the device's kernels refuse that, so the {refusal.phase} will crash here{times}."
    fix = "autocast in the training dtype around the forward (FSDPAutocast), or keep_fp32 for what this module owns."
    return Finding("dtype-mismatch", "error", kind_of(refusal.module), evidence, fix)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


__all__ = ["DryRun", "dry_run"]
