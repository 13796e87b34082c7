"""Fake tensors in place of a model's parameters, buffers and inputs, sharded and gathered as FSDP does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .shadows import Shadows


class FakeParameters:
    """Each parameter's fake as it is stored, and as its module computes with it.

    Model code that reads a parameter's dtype where its unit isn't gathered sees the stored one, as in a live run.
    Make it in a `FakeTensorMode`; it changes the modules' dictionaries, which `fake_device.left_as_it_is` takes back.

    Args:
        model: the model.
        stored, gathered: dtypes of each parameter by id.
        device_type: where the fakes are.
    """

    def __init__(
        self, model: nn.Module, stored: dict[int, torch.dtype], gathered: dict[int, torch.dtype], device_type: str
    ) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self._stored: dict[int, torch.Tensor] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                key = id(parameter)
                self._places.setdefault(key, []).append((module, name))
                if key not in self._gathered:
                    self._gathered[key] = _twin(parameter, gathered[key], device_type)
                    same = stored[key] is gathered[key]
                    self._stored[key] = self._gathered[key] if same else _twin(parameter, stored[key], device_type)
        for key in self._places:
            self._put(key, self._stored[key])

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the gathered fakes of these parameters (the model's own) in place."""
        for parameter in parameters:
            self._put(id(parameter), self._gathered[id(parameter)])

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the stored fakes back."""
        for parameter in parameters:
            self._put(id(parameter), self._stored[id(parameter)])

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the backward left on a parameter's gathered fake."""
        return self._gathered[id(parameter)].grad

    def tensors(self) -> list[torch.Tensor]:
        """All fakes."""
        return [*self._stored.values(), *self._gathered.values()]

    def _put(self, key: int, fake: torch.Tensor) -> None:
        for module, name in self._places[key]:
            module._parameters[name] = fake  # type: ignore[assignment]


def _twin(parameter: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    fake = torch.empty(parameter.shape, dtype=dtype, device=device_type).requires_grad_(parameter.requires_grad)
    fake._is_param = True  # how nn.Parameter marks tensors of other classes
    return fake


def install_buffers(
    model: nn.Module, buffer_dtype: torch.dtype | None, device_type: str, shadows: Shadows
) -> list[torch.Tensor]:
    """Put fakes in place of a model's buffers, and of tensors on the meta device that are its modules' attributes.

    Args:
        model: its modules' dictionaries are changed.
        buffer_dtype: what floating buffers are cast to, as FSDP1 does; None leaves them.
        device_type: where the fakes are.
        shadows: gets the values of small buffers.

    Returns:
        The fakes.
    """
    twins: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = torch.empty(tensor.shape, dtype=dtype, device=device_type)
            shadows.copy(twins[id(tensor)], tensor)
        return twins[id(tensor)]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                cast = buffer_dtype if buffer.is_floating_point() else None
                module._buffers[name] = twin(buffer, cast or buffer.dtype)
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                module.__dict__[name] = twin(value, value.dtype)
    return list(twins.values())


def fake_inputs(inputs: Mapping[str, Any], device_type: str, shadows: Shadows) -> dict[str, Any]:
    """Fakes of real inputs; small integer and bool tensors keep their values. Call it in a `FakeTensorMode`."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty(value.shape, dtype=value.dtype, device=device_type)
        if not value.is_floating_point():
            shadows.copy(made, value)
        return made

    return {name: tree_map(fake, value) for name, value in inputs.items()}
