"""The trace of a live step on one device: attribution, phases, dtypes; and that nothing of it stays behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp_amp.audit import LiveRecording, record_precision
from hf_fsdp_amp.autograd import current_node, in_backward, label_nodes, label_of
from hf_fsdp_amp.collectives import read_collective
from hf_fsdp_amp.recorder import clean_path
from hf_fsdp_amp.trace import OpRecord, Trace, kind_of

from .audit_models import Toy, train_step
from .distributed.training import tiny_llama


@pytest.fixture(scope="module")
def trace() -> Trace:
    torch.manual_seed(0)
    return train_step(Toy(), sequence=True)


def ops(trace: Trace, name: str, **where: str) -> list[OpRecord]:
    """Records of one op that match."""
    return [op for op in trace.ops if name in op.op and all(getattr(op, k) == v for k, v in where.items())]


def test_forward_ops_are_in_their_module(trace: Trace) -> None:
    (linear,) = ops(trace, "addmm", module="blocks.0.attn.qkv", phase="forward")
    assert (linear.inputs, linear.outputs, linear.count) == (("bf16",) * 3, ("bf16",), 1)
    (softmax,) = ops(trace, "aten._softmax.default", module="blocks.1.attn", phase="forward")
    assert softmax.inputs == ("fp32",)
    assert softmax.shape == (2, 8, 8)
    assert softmax.max_bytes == 2 * 8 * 8 * 4
    assert ops(trace, "aten.add.Tensor", module="blocks.0", phase="forward")
    assert ops(trace, "nll_loss_forward", module="", phase="forward")


def test_backward_ops_are_in_the_module_that_made_their_node(trace: Trace) -> None:
    for module in ("head", "blocks.0.attn.qkv", "blocks.1.moe.experts.1"):
        assert ops(trace, "aten.mm.default", module=module, phase="backward"), module
    (embedding,) = ops(trace, "embedding_dense_backward", phase="backward")
    assert (embedding.module, embedding.node) == ("wte", "EmbeddingBackward0")
    (norm,) = ops(trace, "native_layer_norm_backward", module="blocks.0.norm_1")
    assert norm.node == "NativeLayerNormBackward0"


def test_phases(trace: Trace) -> None:
    assert {op.phase for op in trace.ops} == {"forward", "backward", "optimizer", "outside"}
    assert all(op.node is None for op in trace.ops if op.phase != "backward")
    assert ops(trace, "lerp", phase="optimizer")


def test_parameters_buffers_and_state(trace: Trace) -> None:
    weight = next(p for p in trace.parameters if p.name == "blocks.0.attn.qkv.weight")
    assert (weight.storage, weight.compute, weight.gradient, weight.unit) == ("fp32", "fp32", "fp32", None)
    assert (weight.shape, weight.numel, weight.cls) == ((48, 16), 768, "Linear")
    assert {(b.name, b.storage, b.compute) for b in trace.buffers} == {
        (f"blocks.{i}.attn.bias", "fp32", "fp32") for i in (0, 1)
    }
    assert {s.key for s in trace.optimizer} == {"step", "exp_avg", "exp_avg_sq"}
    assert next(s for s in trace.optimizer if s.key == "exp_avg").numel == sum(p.numel for p in trace.parameters)


def test_loss_logits_and_autocast(trace: Trace) -> None:
    assert trace.loss is not None
    assert (trace.loss.dtype, trace.loss.backward_dtype) == ("fp32", "fp32")
    assert 3 < (trace.loss.value or 0) < 5
    assert trace.logits is not None
    assert (trace.logits.module, trace.logits.made_dtype, trace.logits.dtype) == ("head", "bf16", "bf16")
    assert trace.logits.bytes == 2 * 8 * 32 * 2
    assert [(a.enabled, a.dtype, a.cache_enabled, a.module) for a in trace.autocast] == [(True, "bf16", True, "wte")]


def test_modules_are_in_order_of_their_first_call(trace: Trace) -> None:
    paths = [m.path for m in trace.modules]
    assert paths[:5] == ["", "wte", "blocks.0", "blocks.0.norm_1", "blocks.0.attn"]
    assert paths[-1] == "head"


def test_sequence_is_the_order_of_ops(trace: Trace) -> None:
    named = [trace.ops[i] for i in trace.sequence]
    assert len(named) == sum(op.count for op in trace.ops)
    forward = [op.module for op in named if op.phase == "forward" and "addmm" in op.op]
    assert forward[:2] == ["blocks.0.attn.qkv", "blocks.0.moe.router"]
    assert train_step(Toy()).sequence == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_is_a_phase_of_its_own(trace: Trace, reentrant: bool) -> None:
    model = Toy(wrap=lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    recorded = train_step(model)
    count: dict[str, int] = {}
    for op in recorded.ops:
        if "addmm" in op.op and op.module == "blocks.0.attn.qkv":
            count[op.phase] = count.get(op.phase, 0) + op.count
    assert count == {"forward": 1, "recompute": 1}
    block = next(m for m in recorded.modules if m.path == "blocks.0.attn")
    assert (block.calls, block.recomputes, block.recompute_autocast) == (1, 1, "bf16")
    assert any(op.phase == "recompute" and op.module == "blocks.0" for op in recorded.ops)


def test_gradients_are_the_same_with_and_without() -> None:
    grads = []
    for recorded in (True, False):
        torch.manual_seed(0)
        model = Toy()
        if recorded:
            train_step(model)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.arange(16).reshape(2, 8))["loss"]
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


def test_nothing_stays_behind() -> None:
    model = Toy()
    train_step(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert _modes() == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_forward_that_raises_ends_it() -> None:
    model = Toy()
    recording = LiveRecording(model)
    recording.start()
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 1000))
    assert not recording.running
    assert _modes() == 0
    assert not model._forward_hooks


def test_a_new_recording_ends_one_left_open() -> None:
    model = Toy()
    stale = LiveRecording(model)
    stale.start()
    trace = train_step(model)
    assert not stale.running
    assert trace.micro_batches == 1
    assert _modes() == 0


def test_json_round_trip(trace: Trace) -> None:
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    with pytest.raises(ValueError, match="no field colour"):
        Trace.from_dict({"colour": 1})


def test_compiled_model_is_seen_eagerly_and_compiles_afterwards() -> None:
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model = Toy()
    compiled: Any = torch.compile(model, backend="eager")
    trace = train_step(model, call=compiled, compiled=True)
    assert ops(trace, "addmm", module="head", phase="forward")
    assert not counters["stats"]
    compiled(torch.arange(16).reshape(2, 8))["loss"].backward()
    assert counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


def test_trace_says_that_compile_stood_aside() -> None:
    compiled: Any = torch.compile(Toy(), backend="eager")
    trace = train_step(compiled)
    assert trace.compiled == [""]
    assert "torch.compile stood aside" in trace.notes[0]
    assert "blocks.0.attn" in {m.path for m in trace.modules}
    torch._dynamo.reset()


def test_functions_compiled_inside_stay_compiled() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    @torch.compile(backend="aot_eager")
    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scores(self.proj(x)).sum()

    model, x = Compiled(), torch.ones(2, 3, 4)
    with record_precision(model) as trace:
        model(x).backward()
    model(x).backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert trace.compiled == [""]
    assert "a compiled function ran in the whole model" in trace.notes[0]
    assert ops(trace, "mm", module="proj", phase="backward")
    torch._dynamo.reset()


def test_higher_order_ops_run_under_the_recording() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with record_precision(Branch()) as trace, torch.no_grad():
        Branch()(torch.ones(2))
    assert isinstance(trace, Trace)


def test_what_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdp_amp import compiled

    model = tiny_llama()
    assert compiled.why_not_recordable(model, compiled=True) is None
    model.config._attn_implementation = "flex_attention"
    assert compiled.why_not_recordable(model) is None
    assert "score matrix" in (compiled.why_not_recordable(model, compiled=True) or "")
    monkeypatch.setattr(compiled, "KEEPS_COMPILED", False)
    assert "score matrix" in (compiled.why_not_recordable(model) or "")


def test_autograd() -> None:
    """The two private names of autograd that `autograd.py` reads, and the labels."""
    seen: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((in_backward(), label_of(current_node(), owner), torch.is_grad_enabled()))
            return grad * 2

    owner = -1
    assert not in_backward()
    assert current_node() is None
    x = torch.ones(2, requires_grad=True)
    y = Look.apply(x)
    label_nodes([y], owner, "a.b")
    label_nodes([y.sum()], owner, "later")
    assert label_of(y.grad_fn, -2) is None
    y.sum().backward()
    assert seen == [(True, "a.b", False)]


def test_functional_collectives() -> None:
    shard = torch.zeros(4, dtype=torch.bfloat16)
    gather = read_collective("_c10d_functional.all_gather_into_tensor.default", (shard, 8, "0"))
    assert gather is not None
    assert (gather.kind, gather.dtype, gather.bytes, gather.group_size) == ("all_gather", "bf16", 64, 8)
    assert read_collective("_c10d_functional.wait_tensor.default", (shard,)) is None
    assert read_collective("aten.add.Tensor", (shard, shard)) is None


@pytest.mark.parametrize(
    ("name", "clean", "kind"),
    [
        ("_fsdp_wrapped_module.blocks.10._fsdp_wrapped_module.attn", "blocks.10.attn", "blocks.*.attn"),
        ("_orig_mod.0._checkpoint_wrapped_module.2", "0.2", "*.*"),
        ("h.norm_1", "h.norm_1", "h.norm_1"),
        ("", "", ""),
    ],
)
def test_paths(name: str, clean: str, kind: str) -> None:
    assert clean_path(name) == clean
    assert kind_of(clean) == kind


def test_a_model_outside_training() -> None:
    model = nn.Linear(4, 4)
    with record_precision(model) as trace, torch.no_grad():
        model(torch.ones(1, 4))
    assert [(op.op, op.phase) for op in trace.ops if "addmm" in op.op] == [("aten.addmm.default", "forward")]
    assert trace.loss is not None
    assert trace.loss.dtype is None


def _modes() -> int:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return len(_get_current_dispatch_mode_stack())
