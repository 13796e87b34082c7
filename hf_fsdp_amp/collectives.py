"""Read c10d ops as a dispatch mode sees them.

What shows there (torch 2.4 to 2.14): FSDP2 ``c10d._allgather_base_`` and ``c10d._reduce_scatter_base_``; FSDP1 on gloo
``c10d.allgather_`` (a list of views), elsewhere ``_allgather_base_``, and ``_reduce_scatter_base_``; DDP
``c10d.allreduce_``; functional collectives as ``_c10d_functional.*``. What DTensor does inside (the norm of sharded
gradients when clipping) does not show: its inner ops run below the mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .policy import dtype_name
from .trace import CollectiveKind, CollectiveRecord

_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("broadcast", "broadcast"),
)


def read_collective(name: str, args: tuple[Any, ...]) -> CollectiveRecord | None:
    """The record of one collective, module and phase left open; None where the op is none, or only waits.

    Args:
        name: the op as torch prints it.
        args: its arguments.
    """
    if not name.startswith(("c10d.", "_c10d_functional.", "c10d_functional.")) or "wait_tensor" in name:
        return None
    kind: CollectiveKind = next((kind for part, kind in _KINDS if part in name), "other")
    first, second = _tensors(args, 0), _tensors(args, 1)
    if not first:
        return CollectiveRecord(kind, name, "none", "", "outside", 1)
    if name.startswith("c10d.") and second and kind in ("all_gather", "reduce_scatter"):
        whole, part = (first, second) if kind == "all_gather" else (second, first)
        size, group = _bytes(whole), max(1, _bytes(whole) // max(1, _bytes(part)))
    else:  # functional: (input, ..., group_size, group_name); in place: (tensors, group, ...)
        group = next((a for a in reversed(args) if isinstance(a, int) and not isinstance(a, bool)), 0)
        group = group if kind in ("all_gather", "reduce_scatter") else _world_size()
        size = _bytes(first) * (group if kind == "all_gather" else 1)
    return CollectiveRecord(kind, name, dtype_name(first[0].dtype), "", "outside", 1, size, group)


def _tensors(args: tuple[Any, ...], index: int) -> list[torch.Tensor]:
    value = args[index] if index < len(args) else None
    while isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = value[0]
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, list | tuple) else []


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
