"""Something to do right before a model's first call as a sharded model, ahead of FSDP's own hooks.

The Trainer shards a model in `evaluate()` as well as in `train()`, and between the two things there (accelerate's
`prepare`, the forward) no callback is asked. FSDP2 puts its hooks in front of a module's others, so only a hook on all
modules (`torch.nn.modules.module.register_module_forward_pre_hook`) comes before it fixes its dtypes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .sharding import read_units


class BeforeFirstCall:
    """Runs `action` once, and takes itself away: then, when it is cancelled, or when the model is gone.

    Args:
        model: the model, before it is sharded; calls of it until then don't count.
        action: gets the model, sharded.
    """

    def __init__(self, model: nn.Module, action: Callable[[nn.Module], object]) -> None:
        self._action = action
        self._handle = register_module_forward_pre_hook(self._before)
        self._model = weakref.ref(model, lambda _: self.cancel())

    def cancel(self) -> None:
        """Take the hook away."""
        self._handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        model: nn.Module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper is called first
        if model is self._model() and read_units(model):
            self.cancel()
            self._action(model)
