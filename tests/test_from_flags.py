"""Module mode from configurations in the older form of flags, from the compact form, and by its backend alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diffusers_omni_offload import OffloadConfig
from diffusers_omni_offload.backends import ModelLevelBackend, get_offload_backend
from diffusers_omni_offload.pipeline import enable_from_config
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.tiny import build_toy, build_wan, run

COMPACT = {"mode": "module", "components": ["dit", "text_encoder"]}
EVERY_FORM: dict[str, Any] = {
    "flag": {"enable_cpu_offload": True},
    "flag of an object": SimpleNamespace(enable_cpu_offload=True, enable_layerwise_offload=None),
    "flag, and nothing pinned": {"enable_cpu_offload": True, "pin_cpu_memory": False},
    "compact form": {"diffusion_offload_config": COMPACT},
    "compact form beside its flag": {"diffusion_offload_config": COMPACT, "enable_cpu_offload": True},
    "ready-made": {"diffusion_offload_config": OffloadConfig.from_options("module"), "enable_cpu_offload": True},
}


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(3, two_stage=True, text_encoder=True, vae=True)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_module_mode_from_every_form(device: torch.device, sim: ModuleType, form: str) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    before = State.of(pipe)
    config = OffloadConfig.from_od_config(EVERY_FORM[form])
    handle = enable_from_config(pipe, config)
    assert enable_from_config(pipe, config) is handle is pipe.omni_offload
    assert handle.plan.swapped == ("transformer", "transformer_2", "text_encoder")
    assert (handle.pinned_bytes > 0) == ("nothing pinned" not in form)
    for index in range(3):
        assert_equal(run(pipe, call), reference)
        assert handle.swaps == 3 * (index + 1) and handle.device_bytes == 0
    assert pipe.vae.decoder.weight.device.type == "sim"
    assert sim.hazards() == []
    pipe.disable_omni_offload()
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == []


@pytest.mark.parametrize("form", ["flag", "compact form beside its flag"])
def test_the_backend_alone(device: torch.device, sim: ModuleType, form: str) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    before, allocated = State.of(pipe), torch.accelerator.memory_allocated()
    backend = get_offload_backend(OffloadConfig.from_od_config(EVERY_FORM[form]), device, pipe)
    assert type(backend) is ModelLevelBackend and not backend.is_enabled()
    before.assert_same(State.of(pipe))
    for _ in range(2):
        backend.enable(pipe)
        assert backend.is_enabled() and pipe._execution_device == torch.device("sim:0")
        # Without a composed class a pipeline's call is no scope: each component comes and goes for itself.
        for _ in range(2):
            assert_equal(run(pipe, call), reference)
            assert backend.counters().device_bytes == 0
        assert backend.counters().swaps > 0
        backend.disable()
        assert not backend.is_enabled() and leftovers(pipe) == []
        before.assert_same(State.of(pipe))
    assert torch.accelerator.memory_allocated() == allocated and sim.hazards() == []
    backend.disable()


def test_flags_without_encoders_warn_and_do_nothing(
    device: torch.device, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """With a selection the DiT alone is swapped, since that was asked for."""
    reference = resident_output(lambda: build_toy(4, vae=True), device)
    pipe, call = build_toy(4, vae=True)
    before, pinned = State.of(pipe), sim.stats()["pinned_current"]
    config = OffloadConfig.from_od_config({"enable_cpu_offload": True})
    with pytest.warns(UserWarning, match=r"ToyPipeline has no encoders.*nothing is offloaded"):
        with pytest.raises(ValueError, match="ToyPipeline has no encoders"):
            enable_from_config(pipe, config)
    backend = get_offload_backend(config, device, pipe)
    assert backend is not None
    with caplog.at_level(logging.WARNING, logger="diffusers_omni_offload"), pytest.warns(UserWarning, match="no enc"):
        backend.enable(pipe)
    assert "Nothing was offloaded" in caplog.text and not backend.is_enabled()
    backend.disable()
    before.assert_same(State.of(pipe))
    assert pipe.omni_offload is None and leftovers(pipe) == [] and sim.stats()["pinned_current"] == pinned
    selected = {"diffusion_offload_config": {"mode": "module", "components": ["dit"]}}
    handle = enable_from_config(pipe, OffloadConfig.from_od_config(selected))
    assert handle.plan.swapped == ("transformer",)
    assert_equal(run(pipe, call), reference)


def test_flags_without_a_dit_warn_and_do_nothing(device: torch.device) -> None:
    pipe, _ = build_toy(4, text_encoder=True)
    pipe.transformer = None
    before = State.of(pipe)
    with pytest.warns(UserWarning, match="no DiT"), pytest.raises(ValueError, match="no DiT"):
        enable_from_config(pipe, OffloadConfig.from_od_config({"enable_cpu_offload": True}))
    before.assert_same(State.of(pipe))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"enable_layerwise_offload": True},
            "'model-level'.*enable_layerwise_offload.*'layerwise'.*leave the flag out",
        ),
        (
            {"enable_cpu_offload": True, "enable_distributed_layerwise_offload": True},
            "'model-level'.*enable_distributed_layerwise_offload",
        ),
        ({"enable_cpu_offload": True, "dlo_resident_layers": 2}, "dlo_resident_layers=2.*resident_layers"),
        ({"enable_cpu_offload": True, "dlo_use_allgather": False}, "dlo_use_allgather=False.*weight_transfer"),
        ({"enable_cpu_offload": True, "dlo_host_registration_limit_gib": 2}, "dlo_host_registration_limit_gib=2"),
        ({"enable_cpu_offload": True, "fullgraph": True}, "'model-level' works between blocks.*full graph"),
    ],
)
def test_flags_that_contradict_the_compact_form(device: torch.device, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OffloadConfig.from_od_config({"diffusion_offload_config": COMPACT, **fields})


@pytest.mark.parametrize(
    ("compact", "flag", "pinned"),
    [
        (COMPACT, False, False),
        ({**COMPACT, "pin_memory": True}, False, True),
        ({**COMPACT, "pin_memory": False}, True, False),
    ],
)
def test_the_compact_form_goes_before_the_flag_for_pinning(
    device: torch.device, sim: ModuleType, compact: dict[str, Any], flag: bool, pinned: bool
) -> None:
    pipe, call = full_toy()
    fields = {"diffusion_offload_config": compact, "enable_cpu_offload": True, "pin_cpu_memory": flag}
    handle = enable_from_config(pipe, OffloadConfig.from_od_config(fields))
    assert (handle.pinned_bytes > 0) is pinned
    assert_equal(run(pipe, call), resident_output(full_toy, device))


def test_the_flag_for_layers_goes_before_the_one_for_modules(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    both = {"enable_cpu_offload": True, "enable_layerwise_offload": True}
    handle = enable_from_config(pipe, OffloadConfig.from_od_config(both))
    assert handle.plan.swapped == () and len(handle.plan.stacks) == 2
    assert_equal(run(pipe, call), reference)
    # And from there to module mode, by the flag alone.
    handle = enable_from_config(pipe, OffloadConfig.from_od_config({"enable_cpu_offload": True}))
    assert handle.plan.stacks == () and len(handle.plan.swapped) == 3
    assert_equal(run(pipe, call), reference)


@pytest.mark.parametrize("components", [["dit"], ["text_encoder"], ["dit", "text_encoder"]])
def test_a_selection_in_the_compact_form(device: torch.device, components: list[str]) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    fields = {"diffusion_offload_config": {"mode": "module", "components": components}, "enable_cpu_offload": True}
    handle = enable_from_config(pipe, OffloadConfig.from_od_config(fields))
    paths = {"dit": ("transformer", "transformer_2"), "text_encoder": ("text_encoder",)}
    assert handle.plan.swapped == tuple(path for name in components for path in paths[name])
    for _ in range(2):
        assert_equal(run(pipe, call), reference)


def test_a_stock_pipeline_by_the_flag(device: torch.device, sim: ModuleType) -> None:
    reference = resident_output(build_wan, device)
    pipe, call = build_wan()
    handle = enable_from_config(pipe, OffloadConfig.from_od_config({"enable_cpu_offload": True}))
    assert handle.plan.swapped == ("transformer", "transformer_2", "text_encoder")
    for _ in range(2):
        assert_equal(run(pipe, call), reference)
    assert sim.hazards() == []
