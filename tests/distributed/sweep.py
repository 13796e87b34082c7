"""Train tiny architectures one step under plain AMP and under presets with FSDP2, and compare op by op.

One process, a group of one gloo rank: dtypes and their rounding don't depend on the ranks. ``python -m
tests.distributed.sweep OUT.json [every Nth]`` writes one record per architecture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fsdp_amp import patch_model, resolve_policy
from hf_fsdp_amp.fp32_choice import choose_fp32
from hf_fsdp_amp.param_dtypes import pin_fp32
from hf_fsdp_amp.sharding import to_torch_policy
from tests.architectures import Tiny, build, loss_of, names

# What moves, casts or allocates; FSDP does it too, for its gathers. Casts show in the dtypes of the next op.
MOVES = frozenset(
    (
        *("_to_copy", "copy_", "clone", "detach", "alias", "view", "_unsafe_view", "t", "transpose", "permute"),
        *("expand", "slice", "select", "split", "split_with_sizes", "split_with_sizes_copy", "unsqueeze", "squeeze"),
        *("as_strided", "as_strided_", "empty", "empty_like", "empty_strided", "_foreach_copy_", "chunk_cat"),
        *("cat", "set_", "resize_", "unbind", "zeros", "_reshape_alias", "new_empty", "view_as", "new_zeros"),
    )
)


class Ops(TorchDispatchMode):
    """The computing ops in order, each with the dtypes of its floating inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("aten", "transformers") and name not in MOVES:
            floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if floats:
                self.seen.append(f"{name} {' '.join(str(t.dtype).removeprefix('torch.') for t in floats)}")
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[str], dict[str, torch.Tensor]]:
    """Loss, forward ops and full gradients of one step."""
    with Ops() as ops:
        loss = loss_of(model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    return loss.detach(), ops.seen, full


def shard(model: nn.Module, preset: str, cast_inputs: bool | None = None) -> None:
    """What the callback and accelerate do: choose, shard per block and root, pin, patch."""
    policy = resolve_policy(preset, "bf16", device_type="cpu")
    choice = choose_fp32(model, policy)
    torch_policy = to_torch_policy(policy)
    if cast_inputs is not None:
        torch_policy = type(torch_policy)(torch.bfloat16, torch.float32, cast_forward_inputs=cast_inputs)
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in reversed([m for m in model.modules() if type(m).__name__ in blocks]):
        if not shares_parameters(module, model):  # torch refuses it, accelerate or not
            fully_shard(module, mp_policy=torch_policy)
    fully_shard(model, mp_policy=torch_policy)
    pin_fp32(model, choice.names)
    patch_model(model, policy.dtype, cache_enabled=policy.cache_enabled)


def shares_parameters(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of `module` is also one of a module outside it."""
    inside = set(module.modules())
    own = {id(p) for p in module.parameters()}
    return any(id(p) in own for m in model.modules() if m not in inside for p in m._parameters.values())


def compare(tiny: Tiny, presets: Sequence[str] = ("exact", "amp")) -> dict[str, Any]:
    """One architecture: plain AMP against each preset (``amp+cast``: with FSDP2's cast of unit inputs)."""
    record: dict[str, Any] = {"name": tiny.name, "kind": tiny.kind}
    reference = patch_model(tiny.model, "bf16")
    try:
        loss, ops, gradients = step(reference, tiny.inputs)
    except Exception as error:  # plain AMP itself fails: nothing to compare with
        return {**record, "plain": _line(error)}
    for preset in presets:
        model = build(tiny.name, tiny.kind).model  # seeded: the same weights
        try:
            shard(model, preset.partition("+")[0], True if preset.endswith("+cast") else None)
            other_loss, other_ops, other = step(model, tiny.inputs)
        except Exception as error:  # recorded; the test asserts on it
            record[preset] = {"error": _line(error)}
            continue
        differing = [f"{a} | {b}" for a, b in zip(ops, other_ops, strict=False) if a != b]
        record[preset] = {
            "ops": len(ops),
            "ops_differ": len(differing) + abs(len(ops) - len(other_ops)),
            "first": differing[:1],
            "loss_error": abs(float(loss) - float(other_loss)),
            "loss_equal": bool(torch.equal(loss, other_loss)),
            "gradients_differ": [n for n, g in gradients.items() if n not in other or not torch.equal(g, other[n])][:3],
            "gradient_error": max((error_of(g, other.get(n)) for n, g in gradients.items()), default=0.0),
        }
    return record


def error_of(gradient: torch.Tensor, other: torch.Tensor | None) -> float:
    """Norm of the difference over the gradient's own norm; infinite where the other is missing."""
    if other is None:
        return float("inf")
    difference = float((gradient.double() - other.double()).norm())
    return difference / max(float(gradient.double().norm()), 1e-12) if difference else 0.0


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def sweep(every: int = 1, presets: Sequence[str] = ("exact", "amp")) -> list[dict[str, Any]]:
    """Every Nth architecture that builds; ones that don't are left out."""
    records = []
    for name, kind in names()[::every]:
        try:
            tiny = build(name, kind)
        except Exception as error:  # not buildable by the rule; `python -m tests.architectures` tells them
            records.append({"name": name, "kind": kind, "unbuildable": _line(error)})
            continue
        records.append(compare(tiny, presets))
        torch.clear_autocast_cache()
    return records


def main(out: str, every: str = "1", *presets: str) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        records = sweep(int(every), presets or ("exact", "amp"))
    finally:
        dist.destroy_process_group()
    with open(out, "w") as stream:
        json.dump(records, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
