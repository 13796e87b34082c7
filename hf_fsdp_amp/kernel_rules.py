"""Dtype mixes that real kernels reject though fake ones let them pass.

Read from the checks of the kernels in torch 2.4 to 2.14 (CUDA), and seen to fail on CPU where the comment says CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .policy import dtype_name

_HALF = (torch.bfloat16, torch.float16)


def rejection(func: Any, args: Any, kwargs: Any, device_type: str) -> str | None:
    """Why the real kernel will not take these dtypes, in one line; None where it will.

    Args:
        func: the op.
        args, kwargs: what it is called with.
        device_type: whose kernels.
    """
    name = func._schema.name.partition("::")[2]
    rule = _RULES.get(name)
    if rule is None:
        return None
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return rule(name, given, device_type)


def _same(*wanted: str) -> Callable[..., str | None]:
    """All of these arguments must have one floating dtype."""

    def check(name: str, given: dict[str, Any], device_type: str) -> str | None:
        found = {key: given[key].dtype for key in wanted if isinstance(given.get(key), torch.Tensor)}
        floating = {key: dtype for key, dtype in found.items() if dtype.is_floating_point}
        if len(set(floating.values())) < 2:
            return None
        return f"{name} of " + " and ".join(f"{key} in {dtype_name(dtype)}" for key, dtype in floating.items())

    return check


def _written(source: str) -> Callable[..., str | None]:
    """What is written must have the dtype of what it is written into."""

    def check(name: str, given: dict[str, Any], device_type: str) -> str | None:
        into, value = given.get("self"), given.get(source)
        if not isinstance(into, torch.Tensor) or not isinstance(value, torch.Tensor) or into.dtype == value.dtype:
            return None
        return f"{name} of {dtype_name(value.dtype)} values into {dtype_name(into.dtype)}"

    return check


def _norm(name: str, given: dict[str, Any], device_type: str) -> str | None:
    """CUDA's layer and group norms take one dtype; CPU's take half input with fp32 weights, but not the reverse."""
    source, weight = given["input"].dtype, given.get("weight")
    if weight is None or weight.dtype == source:
        return None
    if device_type == "cpu" and source in _HALF and weight.dtype is torch.float32:
        return None
    return f"{name} of {dtype_name(source)} input with {dtype_name(weight.dtype)} weight"


def _batch_norm(name: str, given: dict[str, Any], device_type: str) -> str | None:
    """Weights in the input's dtype or fp32; on CPU running statistics must be in the weights' dtype, too."""
    source = given["input"].dtype
    others = ("weight", "bias", "running_mean", "running_var") if device_type == "cpu" else ("weight", "bias")
    dtypes = {key: given[key].dtype for key in others if isinstance(given.get(key), torch.Tensor)}
    for key, dtype in dtypes.items():
        if dtype not in (source, torch.float32) or len(set(dtypes.values())) > 1:
            return f"{name} of {dtype_name(source)} input with {key} in {dtype_name(dtype)}"
    return None


def _not_half(name: str, given: dict[str, Any], device_type: str) -> str | None:
    tensors = [t for t in given.values() if isinstance(t, torch.Tensor)]
    half = next((t.dtype for t in tensors if t.dtype in _HALF), None)
    return None if half is None else f"{name} has no kernel for {dtype_name(half)}"


def _fft(name: str, given: dict[str, Any], device_type: str) -> str | None:
    """cuFFT does fp16 for powers of two, and no bf16; CPU's does neither."""
    source = given["self"]
    if source.dtype is torch.bfloat16 or (source.dtype is torch.float16 and device_type == "cpu"):
        return f"{name} has no kernel for {dtype_name(source.dtype)}"
    return None


_PRODUCT = _same("self", "mat2", "batch1", "batch2", "vec", "vec1", "vec2", "mat", "mat1", "tensor", "other")
_CONVOLUTION = _same("input", "weight", "bias")
_RULES: dict[str, Callable[..., str | None]] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr"), _PRODUCT),
    "_grouped_mm": _same("self", "mat2"),
    "linear": _CONVOLUTION,
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), _CONVOLUTION),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _written("values")),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), _written("source")),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"), _written("src")),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _written("source")),
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), _norm),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), _same("input", "grid")),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _fft),
    **dict.fromkeys(("_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_inv_ex", "_linalg_solve_ex"), _not_half),
    **dict.fromkeys(("linalg_cholesky_ex", "linalg_lu_factor_ex", "_cdist_forward", "_ctc_loss"), _not_half),
    "lerp": _same("self", "end"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        _same("query", "key", "value"),
    ),
}
