"""Scenarios of `FSDPAutocast` in the real Trainer on 2 ranks; `test_trainer.py` asserts on what they return.

CPU autocast's default dtype is set to fp16, as CUDA has it: CPU's own default (bf16) would hide a missing dtype.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_fsdp_amp import FSDPAutocast, enable_cpu_fsdp, is_patched, patch_model, unpatch_model
from hf_fsdp_amp.cpu import disable_cpu_fsdp
from hf_fsdp_amp.param_dtypes import canonical_name
from hf_fsdp_amp.sharding import read_units

from .training import LookingTrainer, arguments, tiny_llama, tiny_mpt, tokens

Result = dict[str, Any]


def build(
    folder: Path, version: int, model: nn.Module | None = None, amp: bool = True, **changes: Any
) -> LookingTrainer:
    """A Trainer under FSDP on CPU; with `amp=False` the stock one."""
    torch.set_autocast_dtype("cpu", torch.float16)
    enable_cpu_fsdp()
    callbacks = changes.pop("callbacks", [FSDPAutocast()] if amp else [])
    extra = {name: changes.pop(name) for name in ("compute_metrics", "compute_loss_func") if name in changes}
    return LookingTrainer(
        model=tiny_mpt() if model is None else model,
        args=arguments(folder, version, **changes),
        train_dataset=tokens(),
        eval_dataset=tokens(8, seed=1),
        callbacks=callbacks,
        **extra,
    )


def units_of(model: nn.Module) -> list[str]:
    """The distinct policies of a model's FSDP units, as text."""
    return sorted({f"{u.param_dtype} {u.reduce_dtype} {u.output_dtype} {u.buffer_dtype}" for u in read_units(model)})


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters, gathered whole, in name order."""
    sha = hashlib.sha256()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            _hash(model, sha)
    else:
        _hash(model, sha)
    return sha.hexdigest()


def _hash(model: nn.Module, sha: Any) -> None:
    for name, parameter in sorted((canonical_name(n), p) for n, p in model.named_parameters()):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        sha.update(name.encode() + full.detach().float().clone().numpy().tobytes())


def train(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    with Collectives() as collectives:
        trainer.train()
    trainer.evaluate()
    found = {"units": units_of(trainer.model), "patched": is_patched(trainer.model)}
    return {**trainer.report(), **collectives.report(), **found}


def stock(folder: Path, version: int) -> Result:
    trainer = build(folder, version, amp=False)
    with Collectives() as collectives:
        trainer.train()
    return {**trainer.report(), **collectives.report(), "units": units_of(trainer.model)}


def ddp(folder: Path, version: int) -> Result:
    """The reference: DDP with accelerate's autocast, whatever `version` says; and the callback does nothing there."""
    trainer = build(folder, 0)
    trainer.train()
    return {**trainer.report(), "patched": is_patched(trainer.model)}


def fsdp_preset(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[FSDPAutocast("fsdp")])
    trainer.train()
    return trainer.report()


def predict(folder: Path, version: int) -> Result:
    dtypes = []

    def metrics(prediction: Any) -> dict[str, float]:
        dtypes.append(str(prediction.predictions.dtype))
        return {"rows": float(len(prediction.predictions))}

    trainer = build(folder, version, compute_metrics=metrics, eval_strategy="steps", eval_steps=1)
    trainer.train()
    output = trainer.predict(tokens(8, seed=2))
    return {**trainer.report(), "dtypes": dtypes, "metrics": output.metrics, "rows": len(output.predictions)}


def accumulation(folder: Path, version: int) -> Result:
    gradients: set[str] = set()

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients.update(str(p.grad.dtype) for p in kwargs["model"].parameters() if p.grad is not None)

    callbacks = [FSDPAutocast(), Look()]
    trainer = build(folder, version, callbacks=callbacks, gradient_accumulation_steps=4, max_steps=2)
    trainer.train()
    return {**trainer.report(), "gradients": sorted(gradients)}


def label_smoothing(folder: Path, version: int) -> Result:
    trainer = build(folder, version, label_smoothing_factor=0.1)
    trainer.train()
    return trainer.report()


def outer_loss(folder: Path, version: int) -> Result:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    trainer = build(folder, version, compute_loss_func=loss)
    trainer.train()
    return trainer.report()


def checkpointing_reentrant(folder: Path, version: int) -> Result:
    return _checkpointing(folder, version, gradient_checkpointing_kwargs={"use_reentrant": True})


def checkpointing(folder: Path, version: int) -> Result:
    return _checkpointing(folder, version, gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpointing_fsdp(folder: Path, version: int) -> Result:
    return _checkpointing(folder, version, gradient_checkpointing=False, fsdp_config={"activation_checkpointing": True})


def _checkpointing(folder: Path, version: int, **changes: Any) -> Result:
    trainer = build(folder, version, model=tiny_llama(), **{"gradient_checkpointing": True, **changes})
    calls: list[bool] = []
    linear = next(m for n, m in trainer.model.named_modules() if n.endswith("up_proj"))
    linear.register_forward_pre_hook(lambda m, args: calls.append(torch.is_autocast_enabled("cpu")))
    trainer.train()
    return {**trainer.report(), "calls": len(calls), "all_autocast": all(calls)}


def compiled(folder: Path, version: int) -> Result:
    return _compiled(folder, version, amp=True)


def compiled_stock(folder: Path, version: int) -> Result:
    return _compiled(folder, version, amp=False)


def _compiled(folder: Path, version: int, amp: bool) -> Result:
    """Counts graph breaks of a whole run, and the frames compiled after step 1."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiles: list[int] = []

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            compiles.append(counters["stats"]["unique_graphs"])

    callbacks = [FSDPAutocast(), Count()] if amp else [Count()]
    trainer = build(
        folder, version, callbacks=callbacks, max_steps=4, torch_compile=True, torch_compile_backend="eager"
    )
    trainer.train()
    return {
        **trainer.report(),
        "breaks": sum(counters["graph_break"].values()),
        "why": {str(k)[:200]: v for k, v in counters["graph_break"].items()},
        "compiles": compiles,
    }


def save(folder: Path, version: int) -> Result:
    trainer = build(folder, version, save_strategy="no")
    trainer.train()
    before = digest(trainer.model)
    trainer.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
    return {"before": before, "after": digest(loaded), "dtype": str(next(loaded.parameters()).dtype)}


def resume_full(folder: Path, version: int) -> Result:
    return _resume(folder, version, "FULL_STATE_DICT")


def resume_sharded(folder: Path, version: int) -> Result:
    return _resume(folder, version, "SHARDED_STATE_DICT")


def _resume(folder: Path, version: int, kind: str) -> Result:
    options = {"fsdp_config": {"state_dict_type": kind}, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    whole = build(folder, version, **options)
    whole.train()
    resumed = build(folder, version, **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"whole": digest(whole.model), "resumed": digest(resumed.model), **resumed.report()}


def best_model(folder: Path, version: int) -> Result:
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = build(folder, version, load_best_model_at_end=True, **every)
    trainer.train()
    return {**trainer.report(), "best": trainer.state.best_metric, "now": trainer.evaluate()["eval_loss"]}


def train_twice(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    trainer.train()
    first = trainer.report()["losses"]
    trainer.train()
    return {**trainer.report(), "first": first, "units": units_of(trainer.model)}


def two_trainers(folder: Path, version: int) -> Result:
    """The second Trainer's plugin replaces the first's in accelerate's shared state; both must train right."""
    first = build(folder, version)
    second = build(folder, version, amp=False)
    first.train()
    second.train()
    return {"first": first.report(), "units": units_of(first.model), "second": second.report()}


def evaluate_first(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    evaluated = trainer.evaluate()
    return {**trainer.report(), "eval_loss": evaluated["eval_loss"]}


def evaluate_then_train(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    trainer.evaluate()
    trainer.train()
    return trainer.report()


def evaluate_then_train_exact(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[FSDPAutocast("exact")])
    evaluated = trainer.evaluate()
    trainer.train()
    return {**trainer.report(), "eval_loss": evaluated["eval_loss"]}


def evaluate_then_train_repaired(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    trainer.evaluate()
    trainer.model_wrapped = trainer.model
    trainer.train()
    return trainer.report()


def own_policy(folder: Path, version: int) -> Result:
    own: Any = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if version == 2:
        own = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)

    class Own(TrainerCallback):
        """Sets it on accelerate's plugin before `FSDPAutocast` sees it, as the user's own code would."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            AcceleratorState().fsdp_plugin.mixed_precision_policy = own

    with captured() as lines:
        trainer = build(folder, version, callbacks=[Own(), FSDPAutocast()])
        trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model), "lines": lines}


def late_callback(folder: Path, version: int) -> Result:
    trainer = build(folder, version, amp=False)
    trainer.add_callback(FSDPAutocast())
    with captured() as lines, Collectives() as collectives:
        trainer.train()
    return {**trainer.report(), **collectives.report(), "units": units_of(trainer.model), "lines": lines}


def late_callback_after_training(folder: Path, version: int) -> Result:
    trainer = build(folder, version, amp=False)
    trainer.train()
    trainer.seen = {key: set() for key in trainer.seen}
    trainer.add_callback(FSDPAutocast())
    trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model)}


def environment(folder: Path, version: int) -> Result:
    """FSDP chosen by `accelerate launch`'s variables alone."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION=str(version),
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_SHARDING_STRATEGY="FULL_SHARD",
        FSDP_RESHARD_AFTER_FORWARD="true" if version == 2 else "FULL_SHARD",
        FSDP_USE_ORIG_PARAMS="true",
        ACCELERATE_MIXED_PRECISION="bf16",
    )
    trainer = build(folder, 0, bf16=False)
    trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model)}


def plugin_object(folder: Path, version: int) -> Result:
    """FSDP chosen by a plugin object in an Accelerator of the user's own."""
    enable_cpu_fsdp()
    wrap: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "fsdp_version": version}
    wrap |= {"use_orig_params": True} if version == 1 else {}
    Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin(**wrap))
    trainer = build(folder, 0, accelerator_config={"use_configured_state": True})
    trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model)}


def sharded_at_load(folder: Path, version: int) -> Result:
    """A model sharded by transformers' `DistributedConfig` while it is loaded."""
    from transformers import DistributedConfig

    if torch.distributed.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "source")
    torch.distributed.barrier()
    config = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "source", distributed_config=config, dtype=torch.float32)
    trainer = build(folder, 0, model=model)
    trainer.train()
    return {**trainer.report(), "units": units_of(trainer.model)}


def fp16(folder: Path, version: int) -> Result:
    with captured() as lines:
        trainer = build(folder, version, model=tiny_llama(attn_implementation="eager"), bf16=False, fp16=True)
        trainer.train()
    return {**trainer.report(), "lines": lines}


def lora(folder: Path, version: int) -> Result:
    from peft import LoraConfig, get_peft_model

    base = tiny_llama().to(torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer = build(folder, version, model=model)
    trainer.train()
    stored = {bool(p.requires_grad): str(p.dtype) for p in trainer.model.parameters()}
    return {**trainer.report(), "stored": {str(k): v for k, v in stored.items()}, "patched": is_patched(trainer.model)}


def generate(folder: Path, version: int) -> Result:
    trainer = build(folder, version)
    trainer.train()
    trainer.model.eval()
    inputs = torch.tensor([[1, 2, 3]])
    output = trainer.model.generate(input_ids=inputs, max_new_tokens=4, do_sample=False, use_cache=True)
    return {**trainer.report(), "length": output.shape[1]}


def master_weights(folder: Path, version: int) -> Result:
    """A model loaded in bf16 has fp32 master weights once accelerate has prepared it for bf16 training."""
    trainer = build(folder, version, model=tiny_mpt().to(torch.bfloat16))
    trainer.train()
    return {**trainer.report(), "master": sorted({str(p.dtype) for p in trainer.model.parameters()})}


def cpu_without_shim(folder: Path, version: int) -> Result:
    disable_cpu_fsdp()
    try:
        with captured() as lines:
            trainer = LookingTrainer(
                model=tiny_mpt(), args=arguments(folder, version), train_dataset=tokens(), callbacks=[FSDPAutocast()]
            )
            trainer.train()
    finally:
        enable_cpu_fsdp()
    return {**trainer.report(), "lines": lines, "wrapper": type(trainer.model_wrapped).__name__}


def contradiction(folder: Path, version: int) -> Result:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    build(folder, version)
    return {}


def without_trainer(folder: Path, version: int) -> Result:
    """accelerate alone, then plain FSDP, with `patch_model` and its undo."""
    torch.set_autocast_dtype("cpu", torch.float16)
    model = tiny_llama()
    low, fp32 = torch.bfloat16, torch.float32
    wrapped: nn.Module = model
    if version == 2:
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=fp32, cast_forward_inputs=False)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        mixed = MixedPrecision(param_dtype=low, reduce_dtype=fp32)
        wrapped = FullyShardedDataParallel(model, mixed_precision=mixed, device_id=torch.device("cpu"))
    patch_model(wrapped, "bf16")
    ids = torch.randint(0, 100, (2, 8))
    states = []
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a: states.append(str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off")
    )
    output = wrapped(input_ids=ids, labels=ids)
    output.loss.backward()
    unpatch_model(wrapped)
    wrapped(input_ids=ids, labels=ids)
    return {"states": states, "loss": str(output.loss.dtype), "logits": str(output.logits.dtype)}


class Collectives(TorchDispatchMode):
    """Notes the dtypes that all-gathers (the Trainer's own of the loss among them) and reduce-scatters carry."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: set[str] = set()
        self.reduced: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = self.gathered if "allgather" in func.name() else self.reduced
            if "allgather" in func.name() or "reduce_scatter" in func.name():
                kind.update(str(x.dtype) for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))

    def report(self) -> dict[str, list[str]]:
        return {"gathered": sorted(self.gathered), "reduced": sorted(self.reduced)}


class captured:  # noqa: N801
    """Collects what the package logs."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logger = logging.getLogger("transformers.hf_fsdp_amp.callback")
        self.previous, self.logger = logger.level, logger
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logger.setLevel(logging.INFO)
        logger.addHandler(self.handler)
        return self.lines

    def __exit__(self, *exc: Any) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.previous)
