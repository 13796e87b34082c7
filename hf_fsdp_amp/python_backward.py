"""A backward pass walked in Python, node by node: torch's engine asks for the device, and fake cuda tensors have none.

Rests on semi-private names of autograd's nodes, read in torch 2.4 to 2.14: ``Node._sequence_nr`` and
``Node._input_metadata``. `tests/test_python_backward.py` holds it against the engine on real tensors, and fails when
one of them moves.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from .autograd import walking


def walk_backward(loss: torch.Tensor) -> None:
    """What ``loss.backward()`` does, in the engine's order: gradients end up in the leaves' ``.grad``.

    Hooks on tensors and nodes don't run.

    Args:
        loss: a floating scalar with a history; fake or real.

    Raises:
        ValueError: it is no scalar, or nothing in it requires grad.
    """
    if loss.numel() != 1 or loss.grad_fn is None:
        raise ValueError("walk_backward needs a scalar that has a history.")
    root = loss.grad_fn
    waiting = _count_dependencies(root)
    with torch.no_grad():
        start = torch.ones_like(loss)
        inputs: dict[Node, list[torch.Tensor | None]] = {root: _slots(root)}
        inputs[root][loss.output_nr] = start
        number = itertools.count()
        ready = [(_priority(root), next(number), root)]
        while ready:
            _, _, node = heapq.heappop(ready)
            with walking(node):  # the engine sums what several nodes hand on in the context of the one that hands on
                gradients = _run(node, inputs.pop(node))
                for gradient, (target, slot) in zip(gradients, node.next_functions, strict=False):
                    if target is None:
                        continue
                    slots = inputs.setdefault(target, _slots(target))
                    if gradient is not None:
                        slots[slot] = _add(slots[slot], gradient, target, slot)
                    waiting[target] -= 1
                    if not waiting[target]:
                        heapq.heappush(ready, (_priority(target), next(number), target))


def _count_dependencies(root: Node) -> dict[Node, int]:
    counts: dict[Node, int] = {}
    pending, seen = [root], {root}
    while pending:
        for target, _ in pending.pop().next_functions:
            if target is None:
                continue
            counts[target] = counts.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return counts


def _priority(node: Node) -> int:
    """Smaller runs first: gradients that can be stored, then the nodes made last."""
    return -(2**63) if node.name().endswith("AccumulateGrad") else -node._sequence_nr()


def _slots(node: Node) -> list[torch.Tensor | None]:
    return [None] * len(node._input_metadata)


def _add(old: torch.Tensor | None, new: torch.Tensor, target: Node, slot: int) -> torch.Tensor:
    """Sum in the dtype and shape that the target's output had, which the engine enforces."""
    wanted: Any = target._input_metadata[slot]
    if tuple(new.shape) != tuple(wanted.shape):
        new = new.sum_to_size(wanted.shape)
    if new.dtype != wanted.dtype:
        new = new.to(wanted.dtype)
    return new if old is None else old + new


def _run(node: Any, gradients: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    if all(gradient is None for gradient in gradients):
        return (None,) * len(node.next_functions)
    metadata = node._input_metadata
    if isinstance(node, BackwardCFunction):  # an autograd.Function, which gets zeros for what has no gradient
        filled = [_zeros(m) if g is None else g for g, m in zip(gradients, metadata, strict=True)]
        result = node.apply(*filled)
    else:
        result = node(*gradients)
    return result if isinstance(result, tuple) else (result,)


def _zeros(metadata: Any) -> torch.Tensor:
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
