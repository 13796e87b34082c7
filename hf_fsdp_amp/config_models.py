"""A model without weights, from a config: hub id, folder, file, object, or a model type and settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, PretrainedConfig

# tried in turn where the config names no class that transformers has
_AUTO = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSpeechSeq2Seq"),
    *("AutoModelForCTC", "AutoModelForAudioClassification", "AutoModelForImageClassification"),
    *("AutoModelForSequenceClassification", "AutoModel"),
)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length")


def load_model(source: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """The model that `source` stands for, without weights where it is not one already.

    Args:
        source: a model (returned as it is), a transformers config, a hub id, a folder, or a ``config.json``.
        trust_remote_code: run code that comes with a hub id or folder.

    Raises:
        ValueError: no config is there, or no model can be made from it; one line that says why.
    """
    if isinstance(source, nn.Module):
        return source
    config = source if isinstance(source, PretrainedConfig) else load_config(source, trust_remote_code)
    errors = []
    for make in _makers(config, trust_remote_code):
        try:
            return _without_weights(make)
        except Exception as error:  # another class may fit; the reasons are told where none does
            errors.append(f"{type(error).__name__}: {_first_line(error)}")
    raise ValueError(f"no model could be made from the config of {config.model_type!r}: {errors[0]}")


def load_config(source: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config at a hub id, in a folder or in a file.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        advice = ""
        if not Path(source).exists():
            advice = " (neither a folder nor a file here; from the hub it needs a network or a cached copy)"
        raise ValueError(f"{source}: no config could be loaded{advice}: {_first_line(error)}") from error


def make_config(model_type: str, settings: Iterable[str] = ()) -> PretrainedConfig:
    """The default config of a model type, with settings changed.

    Args:
        model_type: transformers' name of it, ``"llama"``, ``"mpt"``, ...
        settings: ``name=value`` each; a value is read as JSON, and as text where it is none.

    Raises:
        ValueError: unknown model type or setting (with near ones), or no ``name=value``.
    """
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        near = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING.keys()), 3)
        raise ValueError(f"--model-type {model_type}: not known. Near ones: {', '.join(near) or 'none'}.") from error
    known = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as name=value.")
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 3)
            raise ValueError(f"--set {name}: {model_type} has no such setting. Near ones: {', '.join(near) or 'none'}.")
        changes[name] = _value(value)
    try:
        return AutoConfig.for_model(model_type, **changes)
    except Exception as error:  # configs check their values in ways of their own
        raise ValueError(f"--set: {type(error).__name__}: {_first_line(error)}") from error


def longest_sequence(model: nn.Module) -> int | None:
    """Tokens that the model's positions reach to, as its config says; None where it says nothing."""
    config = getattr(model, "config", None)
    decoder = getattr(config, "get_text_config", lambda: config)()
    for place in (config, decoder):
        for name in _LENGTHS:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _makers(config: PretrainedConfig, trust_remote_code: bool) -> list[Any]:
    makers: list[Any] = []
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is not None:
            makers.append(lambda cls=cls: cls(config))
    remote: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    for name in _AUTO:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping or (trust_remote_code and name in remote):
            makers.append(lambda auto=auto: auto.from_config(config, trust_remote_code=trust_remote_code))
    return makers


def _without_weights(make: Any) -> nn.Module:
    """On the meta device; a constructor that reads values it makes there gets real buffers, and meta parameters."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError):
        with init_empty_weights(include_buffers=False):
            return make()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
