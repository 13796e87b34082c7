"""`enable_cpu_fsdp`: what it changes in accelerate, what it refuses, and its undo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState

from hf_fsdp_amp import cpu


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    cpu.disable_cpu_fsdp()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_twice_is_once_and_undo_is_exact() -> None:
    before = [vars(owner)[name] for owner, name, _ in cpu._PATCHES]
    assert not cpu.is_cpu_fsdp_enabled()
    cpu.enable_cpu_fsdp()
    once = [vars(owner)[name] for owner, name, _ in cpu._PATCHES]
    cpu.enable_cpu_fsdp()
    assert [vars(owner)[name] for owner, name, _ in cpu._PATCHES] == once
    assert cpu.is_cpu_fsdp_enabled()
    cpu.disable_cpu_fsdp()
    assert [vars(owner)[name] for owner, name, _ in cpu._PATCHES] == before


def test_fsdp1_plugin_needs_it_on_cpu() -> None:
    """Without it accelerate looks for a GPU to synchronise module states on."""
    with pytest.raises(RuntimeError, match=r"no available devices|not supported on cpu"):
        FullyShardedDataParallelPlugin(fsdp_version=1, sync_module_states=True)
    cpu.enable_cpu_fsdp()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sync_module_states=True)
    assert plugin.sync_module_states is False


def test_sync_is_off_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where accelerate 0.23 to 0.33 reads it, whatever the plugin was given."""
    cpu.enable_cpu_fsdp()
    for before in ("true", None):
        monkeypatch.delenv("FSDP_SYNC_MODULE_STATES", raising=False)
        if before is not None:
            monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", before)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        assert plugin.sync_module_states is False
        assert os.environ.get("FSDP_SYNC_MODULE_STATES") == before


@pytest.mark.parametrize("version", [1, 2])
def test_offloaded_parameters_are_not_pinned(version: int) -> None:
    cpu.enable_cpu_fsdp()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=True)
    assert not getattr(plugin.cpu_offload, "pin_memory", False)
    assert not getattr(plugin.cpu_offload, "offload_params", False)


def test_full_state_dict_stays_where_it_is() -> None:
    cpu.enable_cpu_fsdp()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
    assert plugin.state_dict_config.offload_to_cpu is False
    assert plugin.optim_state_dict_config.offload_to_cpu is False


def test_cpu_ram_efficient_loading_under_fsdp1_is_refused_in_one_line() -> None:
    cpu.enable_cpu_fsdp()
    with pytest.raises(ValueError, match="cpu_ram_efficient_loading needs sync_module_states") as error:
        FullyShardedDataParallelPlugin(fsdp_version=1, cpu_ram_efficient_loading=True)
    assert "FSDP2" in str(error.value)
    assert "\n" not in str(error.value)


def test_one_process_is_left_alone() -> None:
    from accelerate import Accelerator

    cpu.enable_cpu_fsdp()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert str(accelerator.distributed_type).endswith("NO")
    assert getattr(AcceleratorState(), "fsdp_plugin", None) is None
    assert PartialState().device.type == "cpu"
