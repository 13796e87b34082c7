"""torch.compile and a recording: what stands aside, what stays compiled, what cannot be recorded.

The only file that touches, for that, ``nn.Module._compiled_call_impl``, ``OptimizedModule._orig_mod``, the autograd
node ``CompiledFunctionBackward`` (torch 2.4 to 2.14), ``TorchDispatchMode.ignore_compile_internals`` (2.13, 2.14) and
transformers' ``config._attn_implementation`` (4.36 to 5.24). `tests/test_trace.py` (compile) fails when one moves.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .patching import unwrap_model
from .trace import Trace, kind_of

KEEPS_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch can run compiled code under a dispatch mode (2.13 and 2.14 can)."""


def why_not_recordable(model: nn.Module, compiled: bool = False) -> str | None:
    """One line saying why recording a step would harm this run; None where it would not.

    Args:
        model: the model.
        compiled: torch.compile is known to wrap it from outside.
    """
    compiled = compiled or any(is_compiled(module) for module in model.modules())
    if compiled and not hasattr(torch.compiler, "set_stance"):
        return "torch < 2.6 gives up a model's compiled code for good once a dispatch mode has been on: not audited."
    config = getattr(unwrap_model(model), "config", None)
    flex = getattr(config, "_attn_implementation", None) == "flex_attention"
    if flex and (compiled or not KEEPS_COMPILED):
        return "flex attention would run uncompiled and build its whole score matrix: not audited."
    return None


def compile_stands_aside() -> contextlib.AbstractContextManager[Any]:
    """Compiled code runs eagerly inside, and is neither compiled anew nor given up for good after it.

    A dispatch mode alone makes dynamo skip the frames it meets, in torch 2.4 to 2.13 for the rest of the process.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch >= 2.6
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")


def compiled_inside(trace: Trace) -> set[str]:
    """Modules in which a function ran compiled: autograd shows its backward as one node."""
    return {op.module for op in trace.ops if op.node is not None and "CompiledFunction" in op.node}


def compile_notes(trace: Trace, compiled: set[str]) -> list[str]:
    """What the reader must know: which modules ran eagerly instead, and in which something ran compiled."""
    notes = []
    if compiled:
        where = ", ".join(path or "the whole model" for path in sorted(compiled)[:4])
        notes.append(
            f"torch.compile stood aside during this step ({where}): these are the ops of the eager model; "
            "what the compiled code fuses or keeps in another dtype is not seen."
        )
    if inside := sorted({kind_of(path) for path in compiled_inside(trace)}):
        where = ", ".join(path or "the whole model" for path in inside[:4])
        notes.append(
            f"a compiled function ran in {where}: the ops inside it are not seen, only its inputs' and outputs'."
        )
    return notes


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is torch.compile's wrapper, or was compiled in place (``module.compile()``)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
