"""What the recorder asks autograd: is this thread in a backward, and whose node is it running.

The only file that touches autograd's private names, read in torch 2.4 to 2.14: ``torch._C._current_graph_task_id``
and ``torch._C._current_autograd_node``. `tests/test_trace.py` (autograd) fails when one of them moves. The labels
themselves are public: `torch.autograd.graph.Node.metadata`. On CUDA the backward runs in a thread of the engine's own;
both names are per thread and the engine carries dispatch modes over to it, so the recorder sees it as it sees CPU's.
A backward that is walked in Python (`python_backward`) says so through `walking`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch.autograd.graph import Node

_LABEL = "hf_fsdp_amp"
_Marks = dict[str, tuple[int, str]]
_walked: list[Node] = []  # innermost last; empty where no backward is walked in Python


@contextlib.contextmanager
def walking(node: Node) -> Iterator[None]:
    """Inside, this process is in a backward that runs `node`."""
    _walked.append(node)
    try:
        yield
    finally:
        _walked.pop()


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return bool(_walked) or torch._C._current_graph_task_id() != -1


def current_node() -> Node | None:
    """The autograd node this thread is running; None between nodes (sums of gradients, final callbacks)."""
    return _walked[-1] if _walked else torch._C._current_autograd_node()


def label_nodes(tensors: Iterable[torch.Tensor], owner: int, path: str) -> None:
    """Mark every node that leads to `tensors` and has no mark yet as made by module `path`.

    Called with a module's inputs when it is entered (what is unmarked then, its caller made) and with its outputs
    when it is left. Each node is walked once: the walk stops at marked ones.

    Args:
        tensors: tensors whose history to walk.
        owner: number of who marks; the marks of another count as none, and stay on nodes that outlive a step.
        path: module path.
    """
    mark = (owner, path)
    pending = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while pending:
        node = pending.pop()
        metadata = _metadata(node)
        if _owner(metadata) == mark[0]:
            continue
        metadata[_LABEL] = mark
        pending.extend(following for following, _ in node.next_functions if following is not None)


def label_of(node: Node | None, owner: int) -> str | None:
    """The module path `owner` marked a node with; None where it did not."""
    if node is None:
        return None
    metadata = _metadata(node)
    return metadata[_LABEL][1] if _owner(metadata) == owner else None


def _owner(metadata: _Marks) -> int | None:
    return metadata[_LABEL][0] if _LABEL in metadata else None


def _metadata(node: Node) -> _Marks:
    return cast(_Marks, node.metadata)  # torch's stub declares the property as a method
