"""What torch.compile must be told about the patched forward.

The only file that touches dynamo's internals: ``torch._dynamo.decorators.skip``, read in torch 2.4 to 2.14.
`tests/distributed/test_trainer.py` (compiled) fails when it moves: the count of graph breaks then differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def skip_own_frame(function: FunctionType) -> Callable[..., Any]:
    """A twin of `function` whose own frame torch.compile leaves alone, while it still compiles what it calls.

    Under FSDP the units' hooks break the graph, and every Python frame around a break costs one more: traced, the
    wrapper would turn the 5 graph breaks of a 2-layer model into 6. Skipped, it enters autocast eagerly and what it
    calls is compiled under that autocast state, which dynamo guards on.

    Args:
        function: a plain Python function; left as it is, for skipping is a mark on a code object, which closures of
            one definition share. The twin gets a code object of its own.
    """
    from torch._dynamo.decorators import skip

    code = function.__code__.replace(co_name=f"{function.__name__}_under_fsdp")
    twin = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    functools.update_wrapper(twin, function, assigned=("__module__", "__qualname__", "__doc__", "__annotations__"))
    twin.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]
    return skip(twin)
