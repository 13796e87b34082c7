"""Preset and facts in, one `PrecisionPolicy` out: the whole precision contract of a run in one object.

Pure: nothing here touches `torch.distributed`, accelerate or a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

PRESETS: dict[str, str] = {
    "amp": "gather parameters in the training dtype, autocast around the forward, reduce gradients in fp32",
    "exact": "what plain AMP on unsharded fp32 parameters computes, op for op",
    "fsdp": "FSDP's own MixedPrecision alone, no autocast",
    "stock": "what accelerate does by itself; nothing is changed, for audits and comparisons",
}

LOW_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES: dict[str, torch.dtype] = {**LOW_DTYPES, "fp32": torch.float32}
_ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}


@dataclass(frozen=True)
class PrecisionPolicy:
    """Every precision decision of one run.

    Args:
        preset: name of the preset that made it, or ``"custom"`` where the user's own FSDP policy stands.
        dtype: the training dtype, `torch.bfloat16` or `torch.float16`; what autocast casts to.
        fsdp_version: 0 (no FSDP), 1 or 2.
        device_type: device type the model computes on (``"cuda"``, ``"cpu"``, ...).
        param_dtype: dtype of the unsharded parameters and of the all-gather; None keeps the stored dtype.
        reduce_dtype: dtype gradients are reduced (and, under FSDP2, accumulated without sync) in.
        output_dtype: what FSDP2 casts the root's outputs to; None leaves them.
        buffer_dtype: what FSDP1 casts floating buffers to; None leaves them. FSDP2 never casts buffers.
        cast_forward_inputs: whether FSDP casts floating inputs to `param_dtype` at unit boundaries.
        autocast: whether the forward runs under autocast of `dtype`.
        cache_enabled: whether autocast may cache its low-precision copies of fp32 parameters until the
            outermost autocast exits. Off where parameters are gathered in fp32: the cache would keep a copy of
            every weight alive through the whole forward and undo FSDP's resharding (torch 2.4 to 2.14).
        keep_fp32: regular expressions; parameters whose name one of them matches are gathered in fp32.
    """

    preset: str
    dtype: torch.dtype
    fsdp_version: int
    device_type: str
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    autocast: bool = True
    cache_enabled: bool = True
    keep_fp32: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for logs: preset, autocast, gather, reduce and output dtypes."""
        autocast = f"autocast {dtype_name(self.dtype)} on {self.device_type}" if self.autocast else "no autocast"
        gather = dtype_name(self.param_dtype) if self.param_dtype else "as stored"
        reduce = dtype_name(self.reduce_dtype) if self.reduce_dtype else "as computed"
        output = dtype_name(self.output_dtype) if self.output_dtype else "as computed"
        return (
            f"preset {self.preset!r}, FSDP{self.fsdp_version}: {autocast}, parameters gathered {gather}, "
            f"gradients reduced {reduce}, FSDP output {output}"
        )


def dtype_name(dtype: torch.dtype | None) -> str:
    """Short name of a dtype: ``bf16``, ``fp16``, ``fp32``; torch's own name for any other, ``none`` for None."""
    if dtype is None:
        return "none"
    for name, known in _DTYPES.items():
        if dtype is known:
            return name
    return str(dtype).removeprefix("torch.")


def parse_dtype(
    value: str | torch.dtype, option: str = "dtype", allowed: dict[str, torch.dtype] | None = None
) -> torch.dtype:
    """A dtype from its name (``"bf16"``, ``"bfloat16"``, ...) or from a `torch.dtype`.

    Args:
        value: the name or dtype.
        option: name of the option, for the error.
        allowed: short names and dtypes to accept; default bf16, fp16 and fp32.

    Raises:
        ValueError: anything else, with the option and what it takes.
    """
    allowed = _DTYPES if allowed is None else allowed
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        found = allowed.get(_ALIASES.get(name, name))
    else:
        found = value if value in allowed.values() else None
    if found is None:
        raise ValueError(f"{option}={value!r} is not supported: use one of {', '.join(map(repr, allowed))}.")
    return found


def resolve_policy(
    preset: str,
    dtype: str | torch.dtype,
    *,
    fsdp_version: int = 2,
    device_type: str = "cuda",
    reduce_dtype: str | torch.dtype = "fp32",
    keep_fp32: tuple[str, ...] = (),
) -> PrecisionPolicy:
    """The policy of a preset.

    Args:
        preset: one of `PRESETS`.
        dtype: training dtype, bf16 or fp16.
        fsdp_version: 0 (no FSDP: autocast alone), 1 or 2.
        device_type: device type the model computes on.
        reduce_dtype: dtype of the gradient reduction; fp32 is what DDP does with fp32 parameters.
        keep_fp32: regular expressions of parameter names to gather in fp32 (FSDP2).

    Raises:
        ValueError: unknown preset, dtype or FSDP version.
    """
    check_preset(preset)
    low = parse_dtype(dtype, "dtype", LOW_DTYPES)
    reduce = parse_dtype(reduce_dtype, "reduce_dtype")
    if fsdp_version not in (0, 1, 2):
        raise ValueError(f"fsdp_version={fsdp_version!r} is not supported: use 0 (no FSDP), 1 or 2.")
    policy = PrecisionPolicy(
        preset=preset,
        dtype=low,
        fsdp_version=fsdp_version,
        device_type=device_type,
        param_dtype=low,
        reduce_dtype=reduce,
        keep_fp32=tuple(keep_fp32),
    )
    if fsdp_version == 0:
        return replace(
            policy, param_dtype=None, reduce_dtype=None, cast_forward_inputs=False, autocast=preset != "fsdp"
        )
    match preset:
        case "stock":
            return _stock(policy)
        case "exact":
            return _exact(policy)
        case "amp":
            # Inputs stay as they are: autocast casts what its ops want, and a cast at the boundary would round
            # what plain AMP keeps in fp32 (position biases, rotary tables, attention masks).
            return replace(policy, cast_forward_inputs=False)
        case _:  # "fsdp"
            return replace(policy, autocast=False)


def _stock(policy: PrecisionPolicy) -> PrecisionPolicy:
    """accelerate's newest known (1.16): FSDP1 autocasts and rounds its buffers, FSDP2 has no autocast.

    1.6 to 1.15 round FSDP2's output too; `hf_fsdp_amp.sharding.stock_policy` asks the accelerate that is installed.
    """
    low = policy.dtype
    if policy.fsdp_version == 1:
        return replace(policy, reduce_dtype=low, buffer_dtype=low)
    return replace(policy, reduce_dtype=low, autocast=False)


def _exact(policy: PrecisionPolicy) -> PrecisionPolicy:
    """FSDP2 gathers low what autocast casts anyway (see `hf_fsdp_amp.fp32_choice`); FSDP1 gathers all in fp32.

    FSDP1's flat parameters have one dtype per unit, so that fp32 is the only gather with plain AMP's numbers. The
    cache stays on under FSDP2, as under DDP: a weight used several times then accumulates its gradient in the low
    dtype (torch's default); under FSDP1's fp32 gather it would hold a copy of every weight, and is off.
    """
    if policy.reduce_dtype is not torch.float32:
        raise ValueError(
            f"preset='exact' reduces gradients in fp32, as DDP does: reduce_dtype={dtype_name(policy.reduce_dtype)!r} "
            "is for preset='amp'."
        )
    if policy.fsdp_version == 1:
        return replace(policy, param_dtype=None, cast_forward_inputs=False, cache_enabled=False)
    return replace(policy, cast_forward_inputs=False)


def check_preset(preset: str) -> None:
    """Raises ValueError, naming the presets there are, unless `preset` is one of them."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is not known: use one of {', '.join(map(repr, PRESETS))}.")
