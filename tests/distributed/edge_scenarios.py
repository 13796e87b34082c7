"""Scenarios at the edges of the Trainer's uses, on 2 ranks; `test_edges.py` asserts on what they return."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_fsdp_amp import FSDPAutocast, is_patched

from .scenarios import Result, build, captured, units_of
from .training import tiny_mpt


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


def sharded_at_load_evaluates_first(folder: Path, version: int) -> Result:
    """Stock can do it for a model that comes sharded; the parameters in fp32 must be there for the evaluation too."""
    from transformers import DistributedConfig

    if torch.distributed.get_rank() == 0:
        tiny_mpt().save_pretrained(folder / "source")
    torch.distributed.barrier()
    losses: Result = {}
    for preset in ("amp", "exact"):
        config = DistributedConfig(fsdp_size=2)
        model = AutoModelForCausalLM.from_pretrained(folder / "source", distributed_config=config, dtype=torch.float32)
        callbacks = [FSDPAutocast(preset, audit=False)]
        trainer = build(folder, 0, model=model, callbacks=callbacks, max_grad_norm=0.0)
        trainer.evaluate()
        trainer.train()
        losses[preset] = trainer.report()["losses"]
    reference = build(folder, 0, amp=False, max_grad_norm=0.0)
    reference.train()
    return {**losses, "ddp": reference.report()["losses"]}


class RunsTheModel(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ids = torch.ones(2, 8, dtype=torch.int64)
        kwargs["model"](input_ids=ids, labels=ids)


def earlier_callback_runs_the_model(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[RunsTheModel(), FSDPAutocast("exact", audit=False)])
    trainer.train()
    return trainer.report()


def late_callback_after_the_model_ran(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[RunsTheModel()])
    trainer.add_callback(FSDPAutocast("exact", audit=False))
    trainer.train()
    return trainer.report()


def later_callback_runs_the_model(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[FSDPAutocast("exact", audit=False), RunsTheModel()])
    trainer.train()
    return trainer.report()


def offload(folder: Path, version: int) -> Result:
    trainer = build(folder, version, fsdp_config={"cpu_offload": True})
    trainer.train()
    return trainer.report()


def hangs(folder: Path, version: int) -> Result:
    """Rank 0 waits for a collective that rank 1 never joins."""
    (folder / f"pid{torch.distributed.get_rank()}").write_text(str(os.getpid()))
    if torch.distributed.get_rank() == 1:
        time.sleep(600)
    torch.distributed.barrier()
    return {}


def refused(folder: Path, version: int) -> Result:
    """A setting that is refused when the Trainer is built changes neither the model nor accelerate's plugin."""
    model = tiny_mpt()
    policies = []
    for callbacks in ([], [FSDPAutocast(keep_fp32="no such parameter")]):
        try:
            build(folder, version, model=model, callbacks=callbacks)
        except ValueError as error:
            message = str(error)
        policies.append(str(AcceleratorState().fsdp_plugin.mixed_precision_policy))
    return {"message": message, "policies": policies, "patched": is_patched(model)}
