"""The contract of `patch_model`, point by point, on real transformers models on one device."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.operations import ConvertOutputsToFp32, convert_outputs_to_fp32
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, MptForCausalLM

from hf_fsdp_amp import is_patched, patch_model, unpatch_model
from hf_fsdp_amp.patching import compute_device_type, unwrap_model

from .distributed.training import tiny_llama, tiny_mpt

IDS = torch.arange(1, 17).reshape(2, 8)


@pytest.fixture(autouse=True)
def _fp16_is_the_default_autocast_dtype() -> Any:
    """As on CUDA; CPU's own default would hide a missing dtype."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    yield
    torch.set_autocast_dtype("cpu", before)


@pytest.fixture
def model() -> MptForCausalLM:
    return tiny_mpt()


def autocast_inside(model: nn.Module) -> list[str]:
    """Run a forward and note autocast's state inside a submodule."""
    seen: list[str] = []
    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    handle = inner.register_forward_pre_hook(lambda m, args: seen.append(autocast_state()))
    try:
        model(input_ids=IDS, labels=IDS)
    finally:
        handle.remove()
    return seen


def autocast_state() -> str:
    return str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"


def wrap_like_accelerate(model: nn.Module, **autocast: Any) -> None:
    """accelerate's own wrapper as `prepare_model` applies it; 0.23 passed no dtype under FSDP."""
    model._original_forward = model.forward  # type: ignore[assignment]
    context = torch.autocast(device_type="cpu", **autocast)
    model.forward = MethodType(convert_outputs_to_fp32(context(model.forward.__func__)), model)


def test_forward_runs_under_autocast_and_leaves_no_state(model: nn.Module) -> None:
    assert autocast_inside(model) == ["off"]
    assert patch_model(model, "bf16") is model
    assert autocast_inside(model) == ["torch.bfloat16"]
    assert autocast_state() == "off"


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "bfloat16", "fp16", torch.float16])
def test_dtype_names(model: nn.Module, dtype: Any) -> None:
    expected = "torch.float16" if dtype in ("fp16", torch.float16) else "torch.bfloat16"
    assert autocast_inside(patch_model(model, dtype)) == [expected]


def test_fp32_switches_an_outer_autocast_off(model: nn.Module) -> None:
    patch_model(model, "fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_inside(model) == ["off"]


def test_wins_over_a_wrong_outer_autocast(model: nn.Module) -> None:
    patch_model(model, "bf16")
    with torch.autocast("cpu", torch.float16):
        assert autocast_inside(model) == ["torch.bfloat16"]


def test_loss_equals_plain_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=IDS, labels=IDS).loss
    assert torch.equal(patch_model(model, "bf16")(input_ids=IDS, labels=IDS).loss, expected)


def test_signature_is_the_models_own(model: nn.Module) -> None:
    before = inspect.signature(model.forward)
    assert inspect.signature(patch_model(model, "bf16").forward) == before
    assert next(iter(before.parameters)) == "input_ids"


def test_docstring_and_name_are_kept(model: nn.Module) -> None:
    patch_model(model, "bf16")
    assert model.forward.__name__ == "forward"
    assert model.forward.__doc__ == MptForCausalLM.forward.__doc__


def test_pickle_loads_as_an_unpatched_model(model: nn.Module) -> None:
    loaded = pickle.loads(pickle.dumps(patch_model(model, "bf16")))
    assert not is_patched(loaded)
    assert autocast_inside(loaded) == ["off"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_deepcopy_runs_its_own_weights(model: nn.Module) -> None:
    twin = copy.deepcopy(patch_model(model, "bf16"))
    assert is_patched(twin)
    with torch.no_grad():
        before = model(input_ids=IDS).logits.clone()
        for parameter in twin.parameters():
            parameter.zero_()
        assert twin(input_ids=IDS).logits.abs().max() == 0
        assert torch.equal(model(input_ids=IDS).logits, before)
    unpatch_model(twin)
    assert not is_patched(twin)
    assert is_patched(model)


def test_state_dict_is_untouched(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = patch_model(model, "bf16").state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_exception_in_the_forward_leaves_autocast_clean(model: nn.Module, error: type[BaseException]) -> None:
    patch_model(model, "bf16")

    def fail(module: nn.Module, args: Any) -> None:
        raise error("planted")

    handle = model.transformer.norm_f.register_forward_pre_hook(fail)
    with pytest.raises(error, match="planted"):
        model(input_ids=IDS)
    assert autocast_state() == "off"
    assert not torch.is_autocast_enabled("cuda")
    handle.remove()
    assert autocast_inside(model) == ["torch.bfloat16"]
    assert "forward" not in vars(unpatch_model(model))


def test_patching_again_replaces_and_never_stacks(model: nn.Module) -> None:
    patch_model(model, "bf16")
    patch_model(model, "bf16")
    patch_model(model, "fp16")
    assert autocast_inside(model) == ["torch.float16"]
    depth, function = 0, model.forward.__func__
    while hasattr(function, "__wrapped__") and function is not MptForCausalLM.forward:
        depth, function = depth + 1, function.__wrapped__
    assert depth == 1
    assert "forward" not in vars(unpatch_model(model))


def test_unpatch_is_exact_and_harmless_elsewhere(model: nn.Module) -> None:
    before = dict(vars(model))
    unpatch_model(model)
    assert vars(model) == before
    unpatch_model(patch_model(model, "bf16"))
    assert vars(model) == before
    assert not is_patched(model)


def test_forward_set_on_the_instance_is_put_back(model: nn.Module) -> None:
    def own(self: nn.Module, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return MptForCausalLM.forward(self, input_ids=input_ids, labels=labels)

    model.forward = MethodType(own, model)
    patch_model(model, "bf16")
    assert autocast_inside(model) == ["torch.bfloat16"]
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels"]
    assert unpatch_model(model).forward.__func__ is own


def test_plain_callable_set_on_the_instance(model: nn.Module) -> None:
    """As accelerate's hooks set it: a partial that takes no self."""
    plain = functools.partial(MptForCausalLM.forward, model)
    model.forward = plain  # type: ignore[method-assign]
    before = inspect.signature(plain)
    patch_model(model, "bf16")
    assert autocast_inside(model) == ["torch.bfloat16"]
    assert inspect.signature(model.forward) == before
    assert unpatch_model(model).forward is plain


def test_accelerate_023_wrapper_without_dtype_is_replaced_and_put_back(model: nn.Module) -> None:
    wrap_like_accelerate(model)
    wrong = model.forward
    assert autocast_inside(model) == ["torch.float16"]
    patch_model(model, "bf16")
    assert autocast_inside(model) == ["torch.bfloat16"]
    assert "_original_forward" not in vars(model)
    assert model(input_ids=IDS, labels=IDS).logits.dtype is torch.bfloat16  # no fp32 copy of the logits
    unpatch_model(model)
    assert model.forward.__func__ is wrong.__func__
    assert model._original_forward.__func__ is MptForCausalLM.forward
    assert autocast_inside(model) == ["torch.float16"]


def test_both_levels_of_a_double_wrapper_are_stripped(model: nn.Module) -> None:
    """transformers 4.34 prepares twice under FSDP1."""
    wrap_like_accelerate(model)
    wrap_like_accelerate(model)
    patch_model(model, "bf16")
    assert model.forward.__func__.__wrapped__ is MptForCausalLM.forward


def test_accelerate_wrapper_around_ours_is_stripped(model: nn.Module) -> None:
    """The order in the Trainer: the callback patches first, then accelerate prepares the model."""
    patch_model(model, "bf16")
    wrap_like_accelerate(model)
    assert is_patched(model)
    assert autocast_inside(model) == ["torch.bfloat16"]
    patch_model(model, "bf16")
    assert model.forward.__func__.__wrapped__ is MptForCausalLM.forward
    unpatch_model(model)
    assert not {"forward", "_original_forward"} & set(vars(model))


def test_models_own_decorator_is_kept(model: nn.Module) -> None:
    calls = []

    def decorator(forward: Any) -> Any:
        @functools.wraps(forward)
        def decorated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(self, *args, **kwargs)

        return decorated

    model.forward = MethodType(decorator(MptForCausalLM.forward), model)
    wrap_like_accelerate(model)
    patch_model(model, "bf16")
    autocast_inside(model)
    assert calls == [1]


def test_third_partys_wrapper_around_ours_survives_unpatching(model: nn.Module) -> None:
    patch_model(model, "bf16")
    ours = model.forward.__func__

    @functools.wraps(ours)
    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    model.forward = MethodType(theirs, model)
    patch_model(model, "bf16")
    unpatch_model(model)
    assert model.forward.__func__ is theirs


def test_real_accelerator_prepare_and_unwrap() -> None:
    """The installed accelerate's own wrapper, not our copy of it: fails when its shape changes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = tiny_mpt()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model)
    assert isinstance(prepared.forward.__func__.__wrapped__, ConvertOutputsToFp32)
    assert prepared(input_ids=IDS, labels=IDS).logits.dtype is torch.float32
    patch_model(prepared, "bf16")
    assert prepared(input_ids=IDS, labels=IDS).logits.dtype is torch.bfloat16
    assert prepared.forward.__func__.__wrapped__ is MptForCausalLM.forward
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert is_patched(model)
    unpatch_model(prepared)
    assert prepared(input_ids=IDS, labels=IDS).logits.dtype is torch.float32
    AcceleratorState._reset_state(reset_partial_state=True)


def test_torch_compile_before_and_after(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    patch_model(compiled, "bf16")
    assert is_patched(compiled)
    assert is_patched(model)
    assert unwrap_model(compiled) is model
    output = compiled(input_ids=IDS, labels=IDS)
    assert output.loss.dtype is torch.float32
    assert output.logits.dtype is torch.bfloat16
    model.eval()
    assert compiled(input_ids=IDS).logits.dtype is torch.float32


def test_gradient_checkpointing_recomputes_under_autocast(model: nn.Module) -> None:
    seen: list[str] = []
    model.transformer.blocks[0].ffn.up_proj.register_forward_pre_hook(lambda m, a: seen.append(autocast_state()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    patch_model(model.train(), "bf16")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen == ["torch.bfloat16"] * 2


def test_peft_model_is_patched_inside() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_llama()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    wrap_like_accelerate(model)
    patch_model(model, "bf16")
    assert is_patched(model)
    assert is_patched(base)
    assert "_original_forward" not in vars(model)
    assert unwrap_model(model) is base
    assert autocast_inside(model) == ["torch.bfloat16"]
    unpatch_model(model)
    assert not is_patched(model)


def test_prompt_learning_computes_under_autocast_too() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(), config)
    seen: list[str] = []
    encoder = next(m for n, m in model.named_modules() if "prompt_encoder" in n and isinstance(m, nn.Linear))
    encoder.register_forward_pre_hook(lambda m, args: seen.append(autocast_state()))
    patch_model(model.train(), "bf16")
    loss = model(input_ids=IDS, labels=IDS).loss
    assert set(seen) == {"torch.bfloat16"}
    assert loss.dtype is torch.float32
    unpatch_model(model)
    assert "forward" not in vars(model)


def test_model_with_a_head_of_its_own() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=3, **sizes))
    patch_model(model.train(), "bf16")
    output = model(input_ids=IDS, labels=torch.tensor([0, 1]))
    assert output.loss.dtype is torch.float32
    assert output.logits.dtype is torch.bfloat16
    assert model.eval()(input_ids=IDS).logits.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not supported: use one of 'bf16', 'fp16', 'fp32'."),
        ({"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
        ({"dtype": "bf16", "output_dtype": "fp64"}, "output_dtype='fp64' is not known: use one of 'auto', 'fp32'"),
    ],
)
def test_bad_options_patch_nothing(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        patch_model(model, **options)
    assert "forward" not in vars(model)


def test_model_without_parameters_is_refused() -> None:
    empty = nn.Identity()
    with pytest.raises(ValueError, match="Identity has no parameters"):
        patch_model(empty, "bf16")
    assert not is_patched(empty)


def test_model_on_meta_needs_a_device_type() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass device_type="):
        patch_model(model, "bf16")
    assert is_patched(patch_model(model, "bf16", device_type="cpu"))


def test_compute_device_type(model: nn.Module) -> None:
    assert compute_device_type(model) == "cpu"


def test_other_device_types_rules_do_not_apply(model: nn.Module) -> None:
    patch_model(model, "bf16", device_type="cuda")
    assert autocast_inside(model) == ["off"]


def test_cache_can_be_switched_off(model: nn.Module) -> None:
    for cache_enabled in (True, False):
        seen: list[bool] = []
        handle = model.transformer.norm_f.register_forward_pre_hook(
            lambda m, a, seen=seen: seen.append(torch.is_autocast_cache_enabled())
        )
        patch_model(model, "bf16", cache_enabled=cache_enabled)(input_ids=IDS)
        handle.remove()
        assert seen == [cache_enabled]
