"""Pipelines that share components or threads, and modules that others patch while they are offloaded."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload.hooks import BLOCK_HOOK, COMPONENT_HOOK, owned_hook
from tests import tiny
from tests.comparing import leftovers
from tests.tiny.toy import ToyPipeline, build_toy


def expected_of(device: torch.device, **arguments: Any) -> np.ndarray:
    twin, call = build_toy(4, **arguments)
    return tiny.run(twin.to(device), call)


def pinned_bytes(sim: ModuleType) -> int:
    """Pinned bytes of this process, less what earlier tests have left in cycles."""
    gc.collect()
    return int(sim.stats()["pinned_current"])


def test_a_pipeline_rebound_by_from_pipe_can_be_disabled_and_enabled_anew(
    device: torch.device, sim: ModuleType
) -> None:
    expected = expected_of(device, vae=True)
    pinned = pinned_bytes(sim)
    pipe, call = build_toy(4, vae=True)
    pipe.enable_omni_offload("layer")
    pipe = ToyPipeline.from_pipe(pipe)
    gc.collect()
    assert pipe.omni_offload is None and np.array_equal(tiny.run(pipe, call), expected)
    pipe.enable_omni_offload("layer", slots=3)
    assert np.array_equal(tiny.run(pipe, call), expected)
    pipe = ToyPipeline.from_pipe(pipe)
    gc.collect()
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and pinned_bytes(sim) == pinned


def test_pipelines_that_share_only_a_vae(device: torch.device) -> None:
    expected = expected_of(device, vae=True)
    first, call = build_toy(4, vae=True)
    second, _ = build_toy(4, vae=True)
    second.vae = first.vae
    first.enable_omni_offload("layer")
    handle = second.enable_omni_offload("layer")
    assert handle.backend is not first.omni_offload.backend
    for pipe in (first, second, first):
        assert np.array_equal(tiny.run(pipe, call), expected)
    # The owner of the VAE's hook goes; the borrower takes the VAE in at its next call.
    first.disable_omni_offload()
    assert first.vae.decoder.weight.device.type == "cpu"
    assert np.array_equal(tiny.run(second, call), expected)
    assert owned_hook(second.vae, COMPONENT_HOOK).owner is handle.backend
    second.disable_omni_offload()
    assert leftovers(first) == [] and leftovers(second) == []


def test_disabling_beside_a_sibling_lets_go_of_what_only_it_used(device: torch.device, sim: ModuleType) -> None:
    start = pinned_bytes(sim)
    first, _ = build_toy(4, two_stage=True, vae=True)
    second = ToyPipeline.from_pipe(first, transformer_2=None)
    first.enable_omni_offload("layer")
    second.enable_omni_offload("layer")
    pinned = pinned_bytes(sim) - start
    first.disable_omni_offload()
    own = first.transformer_2
    assert {tensor.device.type for tensor in (*own.parameters(), *own.buffers())} == {"cpu"}
    assert all(owned_hook(block, BLOCK_HOOK) is None for block in own.blocks)
    assert pinned_bytes(sim) - start == pinned // 2 > 0
    assert second.omni_offload.is_enabled() and owned_hook(second.transformer.blocks[0], BLOCK_HOOK) is not None
    second.disable_omni_offload()
    assert pinned_bytes(sim) == start


def test_no_thread_can_disable_or_change_what_another_is_running(device: torch.device) -> None:
    expected = expected_of(device, vae=True)
    pipe, call = build_toy(4, vae=True)
    pipe.enable_omni_offload("layer")
    inside, errors = threading.Event(), []
    done = threading.Event()

    def change() -> None:
        inside.wait(20)
        for action in (pipe.disable_omni_offload, lambda: pipe.enable_omni_offload("layer", slots=3)):
            try:
                action()
            except RuntimeError as error:
                errors.append(str(error))
        done.set()

    def hold(*_: Any) -> dict[str, Any]:
        inside.set()
        assert done.wait(20)
        return {}

    with ThreadPoolExecutor(1) as pool:
        pool.submit(change)
        output = tiny.run(pipe, lambda: {**call(), "callback_on_step_end": hold})
    assert len(errors) == 2 and all("while a call is running" in error for error in errors)
    assert np.array_equal(output, expected)


def test_a_worker_thread_may_run_a_resident_component_during_a_call(device: torch.device) -> None:
    pipe, call = build_toy(4, vae=True)
    pipe.enable_omni_offload("layer")
    previews = []

    def preview(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            latents = torch.zeros(1, 2, pipe.vae.config.channels, device=device)
            previews.append(pool.submit(pipe.vae, latents).result(timeout=20))
        return values

    tiny.run(pipe, lambda: {**call(), "callback_on_step_end": preview})
    assert previews


@pytest.mark.parametrize("module", ["transformer", "transformer.blocks.1"])
def test_a_forward_that_was_patched_meanwhile_stays_patched(device: torch.device, module: str) -> None:
    def patch(pipe: Any) -> None:
        target = pipe.transformer.get_submodule(module.partition(".")[2]) if "." in module else pipe.transformer
        original = target.forward
        target.forward = lambda *args, **kwargs: original(*args, **kwargs) * 1.25

    twin, call = build_toy(4)
    twin.to(device)
    plain = tiny.run(twin, call)
    patch(twin)
    expected = tiny.run(twin, call)
    pipe, _ = build_toy(4)
    backend = weakref.ref(pipe.enable_omni_offload("layer").backend)
    patch(pipe)
    assert np.array_equal(tiny.run(pipe, call), expected) and not np.array_equal(plain, expected)
    pipe.disable_omni_offload()
    gc.collect()
    assert backend() is None, "the patch's closure holds what streamed the blocks"
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


def test_a_handle_keeps_no_pipeline_alive(device: torch.device, sim: ModuleType) -> None:
    pinned, allocated = pinned_bytes(sim), torch.accelerator.memory_allocated()
    pipe, call = build_toy(4, vae=True)
    handle = pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    loads = handle.loads
    del pipe, call
    gc.collect()
    assert pinned_bytes(sim) == pinned and torch.accelerator.memory_allocated() == allocated
    assert handle.loads == loads > 0 and handle.pinned_bytes == handle.device_bytes == 0
    assert not handle.is_enabled() and "disabled" in repr(handle)


def test_data_that_blocks_swap_is_swapped(device: torch.device) -> None:
    def swap(pipe: Any) -> None:
        first, second = (pipe.transformer.blocks[index].expand.weight for index in (0, 2))
        first.data, second.data = second.data, first.data

    twin, call = build_toy(4)
    pipe, _ = build_toy(4)
    twin.to(device)
    pipe.enable_omni_offload("layer")
    before = tiny.run(pipe, call)
    swap(twin)
    swap(pipe)
    expected = tiny.run(twin, call)
    assert np.array_equal(tiny.run(pipe, call), expected) and not np.array_equal(before, expected)


def test_the_line_after_a_pageable_call_does_not_call_it_compute_bound(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, call = build_toy(4)
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        pipe.enable_omni_offload("layer", pin_memory=False)
        tiny.run(pipe, call)
    (line,) = [message for message in caplog.messages if "loads on demand" in message]
    assert "0% of it pinned" in line and "transfer-bound" in line and "compute-bound" not in line


def test_a_conjugated_weight_is_refused_by_name(device: torch.device) -> None:
    pipe, _ = build_toy(4)
    pipe.transformer.blocks[1].phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(TypeError, match=r"blocks\.1\.phase is a conjugated.*resolve_conj"):
        pipe.enable_omni_offload("layer")
    assert leftovers(pipe) == []


def test_a_block_that_keeps_a_view_of_its_weights_is_refused_by_name(device: torch.device) -> None:
    pipe, call = build_toy(4)
    block = pipe.transformer.blocks[1]
    original = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        block.kept = block.expand.weight.detach().t()
        return original(x)

    block.forward = forward
    pipe.enable_omni_offload("layer")
    with pytest.raises(RuntimeError, match=r"blocks\.1\.kept keeps a view of its own weights"):
        tiny.run(pipe, call)
