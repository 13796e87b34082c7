"""Scenarios of preset `exact` and of `keep_fp32`, on 2 ranks; `test_exact.py` asserts on what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, TrainerCallback

from hf_fsdp_amp import FSDPAutocast, patch_model, resolve_policy
from hf_fsdp_amp.costs import gathered_bytes_per_step
from hf_fsdp_amp.fp32_choice import choose_fp32
from hf_fsdp_amp.param_dtypes import pin_fp32
from hf_fsdp_amp.sharding import to_torch_policy

from .scenarios import Collectives, Result, build, captured, digest
from .training import tiny_llama, tiny_mpt

STEPS = {"max_steps": 20, "max_grad_norm": 0.0}


def run(folder: Path, version: int, model: nn.Module, **changes: Any) -> Result:
    """20 AdamW steps with preset `exact` under FSDP of `version`, or under DDP for 0, where the callback is idle."""
    callbacks = changes.pop("callbacks", None) or [FSDPAutocast("exact", audit=False)]
    changes = {**STEPS, **changes}
    with captured() as lines:
        trainer = build(folder, version, model=model, callbacks=callbacks, **changes)
        with Collectives() as collectives:
            trainer.train()
    return {**trainer.report(), **collectives.report(), "digest": digest(trainer.model), "lines": lines}


def mpt(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt())


def llama(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_llama())


def llama_tied(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_llama(tie_word_embeddings=True))


def accumulation(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), gradient_accumulation_steps=4)


def clipped(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), max_grad_norm=0.5)


def fp16(folder: Path, version: int) -> Result:
    """accelerate opens no fp16 autocast on CPU, so that the DDP reference is patched here."""
    callbacks = [PatchDDP()] if version == 0 else None
    return run(folder, version, tiny_mpt(), bf16=False, fp16=True, callbacks=callbacks)


class PatchDDP(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        patch_model(kwargs["model"], "fp16")


def no_reshard(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), fsdp_config={"reshard_after_forward": False} if version == 2 else None)


def offload(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), fsdp_config={"cpu_offload": True})


def checkpointing(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), fsdp_config={"activation_checkpointing": True})


def compiled(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), torch_compile=True, torch_compile_backend="eager")


def ram_efficient(folder: Path, version: int) -> Result:
    """Rank 0 alone loads the weights; the others start from empty ones."""
    source = folder / "source"
    if torch.distributed.get_rank() == 0:
        tiny_llama().save_pretrained(source)
    torch.distributed.barrier()
    build(folder, version, fsdp_config={"cpu_ram_efficient_loading": True})  # sets what from_pretrained looks at
    model = AutoModelForCausalLM.from_pretrained(source)
    return run(folder, version, model, fsdp_config={"cpu_ram_efficient_loading": True})


def lora(folder: Path, version: int) -> Result:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = tiny_llama().to(torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    result = run(folder, version, model)
    dtypes = sorted({f"{p.requires_grad} {p.dtype}" for p in model.parameters()})
    return {**result, "dtypes": dtypes}


def mixtral(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mixtral())


def tiny_mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=128, num_local_experts=4, num_key_value_heads=2, **sizes))


def saved(folder: Path, version: int) -> Result:
    trainer = build(folder, version, callbacks=[FSDPAutocast("exact", audit=False)], **STEPS)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
    return {"before": digest(trainer.model), "after": digest(loaded)}


def resumed(folder: Path, version: int) -> Result:
    options = {**STEPS, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    options["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
    whole = build(folder, version, callbacks=[FSDPAutocast("exact", audit=False)], **options)
    whole.train()
    again = build(folder, version, callbacks=[FSDPAutocast("exact", audit=False)], **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"whole": digest(whole.model), "resumed": digest(again.model)}


def keep_fp32(folder: Path, version: int) -> Result:
    """Preset `amp`, with one matmul weight of each block in fp32."""
    model = tiny_mpt()
    dtypes: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, name=name: dtypes.__setitem__(name, str(m.weight.dtype).removeprefix("torch."))
            )
    return {
        **run(folder, version, model, callbacks=[FSDPAutocast(keep_fp32=[r"\d\.ffn\.up_proj"], audit=False)]),
        "dtypes": dtypes,
    }


def keep_fp32_low_reduction(folder: Path, version: int) -> Result:
    callback = FSDPAutocast(keep_fp32="up_proj", reduce_dtype="bf16", audit=False)
    return run(folder, version, tiny_mpt(), callbacks=[callback])


def keep_fp32_typo(folder: Path, version: int) -> Result:
    return run(folder, version, tiny_mpt(), callbacks=[FSDPAutocast(keep_fp32=["nrom_1"], audit=False)])


def measured_bytes(folder: Path, version: int) -> Result:
    """All-gathered bytes and calls of a real step, and the package's formula for them."""
    found: Result = {}
    for name, make in (("mpt", tiny_mpt), ("llama", tiny_llama), ("llama odd", lambda: tiny_llama(vocab_size=131))):
        for preset in ("exact", "amp"):
            model = make()
            policy = resolve_policy(preset, "bf16", device_type="cpu")
            names = choose_fp32(model, policy).names
            formula = gathered_bytes_per_step(model, policy.dtype, names, world_size=2)
            callback = FSDPAutocast(preset)
            build(folder, version, model=model, callbacks=[callback], max_steps=1).train()
            assert callback.report is not None
            gathers = [c for c in callback.report.trace.collectives if c.kind == "all_gather" and c.phase != "outside"]
            found[f"{name} {preset}"] = [sum(c.bytes for c in gathers), formula, sum(c.count for c in gathers)]
    return found


def hybrid(folder: Path, version: int) -> Result:
    """Without a Trainer, on a 2-D mesh that replicates over 2 ranks; `version` 0 is plain autocast and all-reduce."""
    return _by_hand(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if version else None)


def by_hand(folder: Path, version: int) -> Result:
    return _by_hand(init_device_mesh("cpu", (2,)) if version else None)


def _by_hand(mesh: Any) -> Result:
    model = tiny_llama()
    torch.manual_seed(torch.distributed.get_rank())
    batches = [torch.randint(0, 128, (2, 16)) for _ in range(6)]
    if mesh is not None:
        policy = resolve_policy("exact", "bf16", device_type="cpu")
        choice = choose_fp32(model, policy)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=to_torch_policy(policy))
        fully_shard(model, mesh=mesh, mp_policy=to_torch_policy(policy))
        pin_fp32(model, choice.names)
        patch_model(model, policy.dtype, cache_enabled=policy.cache_enabled)
    else:
        model = nn.parallel.DistributedDataParallel(model)
        patch_model(model, "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return {"losses": losses, "digest": digest(model.module if mesh is None else model)}
