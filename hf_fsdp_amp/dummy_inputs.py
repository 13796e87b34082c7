"""Dummy inputs for a transformers model, made from its config and its forward's signature; no architecture is named."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_TEXT = ("input_ids", "decoder_input_ids")


def candidate_inputs(
    model: nn.Module, device: str | torch.device, batch_size: int = 2, seq_len: int = 32
) -> Iterator[dict[str, torch.Tensor]]:
    """Keyword arguments that `model.forward` may take, the most telling first: with labels, then without.

    Args:
        model: a transformers model, or a PEFT model around one.
        device: where the tensors are made; under a `FakeTensorMode` they are fake.
        batch_size: examples.
        seq_len: tokens of text inputs.

    Yields:
        Dictionaries to try in turn. Labels may be per token or per example, which only a run can tell.
    """
    config = getattr(model, "config", None)
    names = _forward_parameters(model)
    inputs = _main_input(model, config, names, device, batch_size, seq_len)
    for label in _labels(inputs, names, device, batch_size, seq_len):
        yield {**inputs, **label}


def _forward_parameters(model: nn.Module) -> set[str]:
    base: Any = model
    if callable(getattr(base, "get_base_model", None)):  # PEFT
        base = base.get_base_model()
    return set(inspect.signature(base.forward).parameters)


def _main_input(
    model: nn.Module, config: Any, names: set[str], device: Any, batch_size: int, seq_len: int
) -> dict[str, torch.Tensor]:
    main = getattr(model, "main_input_name", "input_ids")
    if main not in names and "input_ids" in names:
        main = "input_ids"
    ids = {"size": (batch_size, seq_len), "device": device, "dtype": torch.int64}
    inputs: dict[str, torch.Tensor] = {}
    if "input_ids" in names and main in ("input_ids", *_TEXT):
        inputs["input_ids"] = torch.ones(**ids)
    if main == "pixel_values" or ("pixel_values" in names and not inputs):
        inputs["pixel_values"] = torch.ones(_image_shape(config, batch_size), device=device)
    if main == "input_features":
        inputs["input_features"] = torch.ones(_spectrogram_shape(config, batch_size), device=device)
    if main == "input_values":
        inputs["input_values"] = torch.ones(batch_size, 16000, device=device)
    if not inputs:
        inputs[main] = torch.ones(**ids)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = torch.ones(**ids)
    return inputs


def _labels(
    inputs: dict[str, torch.Tensor], names: set[str], device: Any, batch_size: int, seq_len: int
) -> Iterator[dict[str, torch.Tensor]]:
    if "labels" in names:
        per_token = (batch_size, seq_len)
        per_example = (batch_size,)
        order = [per_token, per_example] if set(inputs) & set(_TEXT) else [per_example, per_token]
        for shape in order:
            yield {"labels": torch.ones(shape, device=device, dtype=torch.int64)}
    yield {}


def _setting(config: Any, *names: str, default: int) -> int:
    """The first of these settings that the config, or a config inside it, has."""
    inner = [c for c in vars(config).values() if hasattr(c, "to_dict")] if config is not None else []
    for place in [config, *inner]:
        for name in names:
            value = getattr(place, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int):
                return value
    return default


def _image_shape(config: Any, batch_size: int) -> tuple[int, ...]:
    side = _setting(config, "image_size", "input_size", default=224)
    channels = _setting(config, "num_channels", "in_channels", "num_input_channels", default=3)
    frames = _setting(config, "num_frames", default=0)
    return (batch_size, frames, channels, side, side) if frames else (batch_size, channels, side, side)


def _spectrogram_shape(config: Any, batch_size: int) -> tuple[int, ...]:
    bins = _setting(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    frames = 2 * _setting(config, "max_source_positions", default=500)
    return (batch_size, bins, frames)
