"""Fused attention for fake tensors.

`scaled_dot_product_attention` picks its kernel by the device; on fake tensors it falls apart into fp32 math with whole
score matrices, which no GPU would run (torch 2.13, 2.14). This mode calls the fused op in its place, in the dtype that
autocast gives it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_HALF = (torch.bfloat16, torch.float16)
_FLASH = 1  # `torch.nn.attention.SDPBackend.FLASH_ATTENTION`, as the choosing op gives it
_MAX_FLASH_HEAD = 256


class FusedAttention(TorchFunctionMode):
    """Puts the fused op that the device would choose in place of `scaled_dot_product_attention`.

    Args:
        device_type: ``"cpu"``: the kernel that torch's own chooser gives for real tensors of those shapes.
            Else CUDA's rule: flash attention for half precision without a mask and heads of one size up to 256,
            memory-efficient attention for the rest. (cuDNN's kernel, which may run instead, has the same dtypes.)
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = (self._cast(t) for t in (query, key, value))
        mask = self._cast(attn_mask) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        if self.device_type == "cpu":
            return _on_cpu(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        return _on_cuda(query, key, value, mask, dropout_p, is_causal, scale)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """What autocast does with the op's inputs; it is on the low-precision list of both devices."""
        if not torch.is_autocast_enabled(self.device_type) or tensor.dtype is torch.float64:
            return tensor
        return tensor.to(torch.get_autocast_dtype(self.device_type))


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    if _cpu_choice(query, key, value, mask, dropout, causal, scale, gqa) != _FLASH:
        with torch.autocast("cpu", enabled=False):
            return scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout, causal, attn_mask=mask, scale=scale)[0]


def _cpu_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> int:
    """Ask torch's own chooser with real tensors of the same shapes, which are never written to and cost no memory."""

    def real(fake: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, requires_grad=fake.requires_grad)

    with torch.utils._python_dispatch._disable_current_modes():
        blank = None if mask is None else real(mask)
        return torch._fused_sdp_choice(
            real(query), real(key), real(value), blank, dropout, causal, scale=scale, enable_gqa=gqa
        )


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    fits = query.shape[-1] == value.shape[-1] and query.shape[-1] <= _MAX_FLASH_HEAD
    if query.dtype in _HALF and mask is None and fits:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout, causal, False, scale=scale)[0]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the memory-efficient kernel has no grouped heads; torch repeats them
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, mask, True, dropout, causal, scale=scale)[0]
