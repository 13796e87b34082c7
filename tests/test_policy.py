"""`resolve_policy`: presets, versions and bad options."""

from __future__ import annotations

import pytest
import torch

from hf_fsdp_amp import FSDPAutocast, resolve_policy
from hf_fsdp_amp.policy import PRESETS, dtype_name, parse_dtype


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_amp(version: int, dtype: str) -> None:
    policy = resolve_policy("amp", dtype, fsdp_version=version)
    low = parse_dtype(dtype)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (low, torch.float32, None)
    assert (policy.buffer_dtype, policy.cast_forward_inputs, policy.autocast) == (None, False, True)


def test_fsdp_preset_has_no_autocast() -> None:
    policy = resolve_policy("fsdp", "bf16")
    assert not policy.autocast
    assert policy.cast_forward_inputs
    assert policy.reduce_dtype is torch.float32


def test_reduce_dtype() -> None:
    assert resolve_policy("amp", "bf16", reduce_dtype="bf16").reduce_dtype is torch.bfloat16


def test_no_fsdp_is_autocast_alone() -> None:
    policy = resolve_policy("amp", "bf16", fsdp_version=0)
    assert policy.autocast
    assert policy.param_dtype is None
    assert policy.reduce_dtype is None


def test_every_preset_resolves_and_describes_itself() -> None:
    for preset in PRESETS:
        for version in (0, 1, 2):
            line = resolve_policy(preset, "bf16", fsdp_version=version).describe()
            assert preset in line
            assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fast", "bf16"), "preset='fast' is not known: use one of 'amp'"),
        (("amp", "fp32"), "dtype='fp32' is not supported: use one of 'bf16', 'fp16'."),
        (("amp", "int8"), "dtype='int8' is not supported"),
    ],
)
def test_bad_options(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_policy(*arguments)


def test_bad_version_and_reduce_dtype() -> None:
    with pytest.raises(ValueError, match="fsdp_version=3 is not supported"):
        resolve_policy("amp", "bf16", fsdp_version=3)
    with pytest.raises(ValueError, match="reduce_dtype='fp8' is not supported"):
        resolve_policy("amp", "bf16", reduce_dtype="fp8")


def test_callback_checks_its_options_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="preset='fast' is not known"):
        FSDPAutocast("fast")
    with pytest.raises(ValueError, match="dtype='fp32' is not supported"):
        FSDPAutocast(dtype="fp32")
    with pytest.raises(ValueError, match="reduce_dtype='x' is not supported"):
        FSDPAutocast(reduce_dtype="x")


def test_dtype_names() -> None:
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.int64, None)] == [
        "bf16",
        "fp16",
        "fp32",
        "int64",
        "none",
    ]
