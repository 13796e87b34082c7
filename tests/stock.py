"""What the installed accelerate does by itself, where releases differ: what tests of stock runs expect."""

from __future__ import annotations

import accelerate
import torch
from packaging.version import Version

from hf_fsdp_amp.sharding import stock_policy

ROUNDS_OUTPUT = stock_policy(2, torch.bfloat16).output_dtype is not None
"""FSDP2 rounds the model's outputs, the loss among them: accelerate 1.6 to 1.15, not 1.16."""

EVALUATES_FIRST = Version(accelerate.__version__) >= Version("1.16")
"""FSDP2 prepares a model without its optimizer, so that `evaluate()` before `train()` works."""
