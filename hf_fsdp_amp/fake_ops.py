"""Runs ops on fake tensors as a device's real kernels would take or refuse them, and hands each to a recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .fake_answers import NOT_HANDLED, answer
from .fake_results import FakeResults
from .kernel_rules import rejection
from .policy import dtype_name
from .recorder import Recorder, tensors_in
from .shadows import Shadows

_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Refusal:
    """An op that the device's kernels will not take.

    Args:
        op: the op as torch prints it.
        module: path of the module it ran in.
        phase: forward or backward.
        why: the dtypes, in one line.
    """

    op: str
    module: str
    phase: str
    why: str


class DryRunMode(TorchDispatchMode):
    """To be entered above a `FakeTensorMode`.

    Args:
        recorder: gets every op.
        shadows: the data that is known.
        device_type: whose kernels decide what is refused.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch: as `recorder.RecordingMode` says; it also saves a detour through dynamo on every op."""
        return True

    def __init__(self, recorder: Recorder, shadows: Shadows, device_type: str) -> None:
        super().__init__()
        self.recorder = recorder
        self.shadows = shadows
        self._results = FakeResults()
        self.device_type = device_type
        self.guesses: dict[str, int] = {}
        self.refusals: list[Refusal] = []
        self.failure: tuple[BaseException, Refusal, bool] | None = None
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # autocast asks it of every argument: more often than there are ops
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if (why := rejection(func, args, kwargs, self.device_type)) is not None:
            self.refusals.append(self._refusal(func, why))
        try:
            result = answer(func, args, kwargs, self.shadows, self._guess)
            if result is NOT_HANDLED:
                result = self._results.run(func, args, kwargs)
        except Exception as error:
            self._note_failure(func, args, kwargs, error)
            raise
        self.shadows.follow(func, args, kwargs, result)
        self.recorder.note_op(func, args, kwargs, result)
        self._note_storages(result)
        return result

    def live_bytes(self, but: set[int]) -> int:
        """Bytes of all storages made under this mode that something still holds, without those given.

        Args:
            but: storages to leave out, as `storage_of` gives them.
        """
        return sum(size for key, (ref, size) in self._storages.items() if key not in but and not ref.expired())

    def _guess(self, line: str) -> None:
        where = self.recorder.running_module()
        text = f"{where or 'model'}: {line}"
        self.guesses[text] = self.guesses.get(text, 0) + 1

    def _refusal(self, func: Any, why: str) -> Refusal:
        return Refusal(str(func), self.recorder.running_module(), self.recorder.phase, why)

    def _note_failure(self, func: Any, args: Any, kwargs: Any, error: BaseException) -> None:
        if self.failure is not None and self.failure[0] is error:
            return
        dtypes = dict.fromkeys(dtype_name(t.dtype) for t in tensors_in((args, kwargs)) if t.is_floating_point())
        name = func._schema.name.partition("::")[2]
        why = f"{name} of {' and '.join(dtypes) or 'no floating dtype'}: {_first_line(error)}"
        mixed = len(dtypes) > 1 and any(word in str(error) for word in ("dtype", "type", "scalar"))
        self.failure = (error, self._refusal(func, why), mixed)

    def _note_storages(self, result: Any) -> None:
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None or known[0].expired():
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
