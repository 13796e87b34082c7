"""Tiny models that the audit's tests plant faults in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hf_fsdp_amp.audit import record_precision
from hf_fsdp_amp.trace import Trace

WIDTH = 16


class LowPrecisionNorm(nn.LayerNorm):
    """A norm of MPT's low-precision kind: input and weights go to autocast's dtype, then autocast is off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(low), weight.to(low), bias.to(low)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class BiasedAttention(nn.Module):
    """Unfused attention with an fp32 position bias: plain AMP's softmax runs on fp32, promoted by the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("bias", torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2) + self.bias, -1) @ v


class Router(nn.Linear):
    """A router that computes in the dtype of its weights, whatever autocast says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias).softmax(-1)


class Experts(nn.Module):
    """Two experts behind a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    """Norm, attention, experts, each added to the residual stream."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.attn = norm(WIDTH), BiasedAttention()
        self.norm_2, self.moe = norm(WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.moe(self.norm_2(x))


class Toy(nn.Module):
    """A 2-layer language model; `wrap` runs each layer, e.g. under a checkpoint."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)
        self.wrap = wrap

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.wte(ids)
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap is not None else block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


class ForgetfulCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint that recomputes without the forward's autocast."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad.to(y.dtype))
        return None, x.grad


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """CPU autocast of a dtype; None for none."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def train_step(
    model: nn.Module,
    dtype: torch.dtype | None = torch.bfloat16,
    micro_batches: int = 1,
    call: Callable[[torch.Tensor], Any] | None = None,
    **options: Any,
) -> Trace:
    """The trace of one step of AdamW; autocast of `dtype` around the forward alone, as the Trainer has it.

    Args:
        model: its output has a ``"loss"``.
        dtype: autocast's; None for no autocast.
        micro_batches: backwards per step.
        call: how to run the model on token ids; default is ``model(ids)``.
        options: of `record_precision`.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16).reshape(2, 8)
    run = model if call is None else call
    with record_precision(model, **options) as trace:
        for _ in range(micro_batches):
            with autocast(dtype):
                loss = run(ids)["loss"]
            loss.backward()
        optimizer.step()
    return trace
