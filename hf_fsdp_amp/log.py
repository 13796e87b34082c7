"""Loggers of the package: under transformers' root logger, so that `TrainingArguments(log_level=...)` governs them."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging as transformers_logging

ROOT = "transformers.hf_fsdp_amp"


def get_logger(name: str) -> Any:
    """The logger of one of the package's modules, by its ``__name__``."""
    return transformers_logging.get_logger(f"transformers.{name}")
