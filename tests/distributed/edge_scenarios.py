"""Scenarios at the edges of the Trainer's uses, on 2 ranks; `test_edges.py` asserts on what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_amp import FSDPAutocast

from .scenarios import Result, build, captured, units_of


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class BatchNormModel(nn.Module):
    """FSDP1 wraps its batch norms in units of their own, without mixed precision."""

    _no_split_modules = ("NormBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.blocks = nn.Sequential(NormBlock(), NormBlock())
        self.head = nn.Linear(16, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch_norm(folder: Path, version: int) -> Result:
    torch.manual_seed(0)
    with captured() as lines:
        trainer = build(folder, version, model=BatchNormModel(), callbacks=[FSDPAutocast(audit=False)])
        trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model), "lines": lines}
