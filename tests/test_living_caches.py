"""Caches of diffusers beside offload: what they skip is not copied, and they come and go in any order."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import SeaCacheConfig, TextKVCacheConfig

from tests import tiny
from tests.equality import Call, assert_no_hazards, build_as
from tests.living import Feature, denoisers, enable, fast_ones, ours_left, with_arguments
from tests.modes import MODES, in_every_mode
from tests.zoo import PIPELINES

STEPS = 6


def _everywhere(pipe: Any) -> dict[str, Any]:
    return {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": (-1, 1001),
        "current_timestep_callback": lambda: pipe.current_timestep,
    }


CACHES: dict[str, Callable[[Any], Any]] = {
    # So high a threshold that only the first step runs all blocks.
    "first block": lambda pipe: FirstBlockCacheConfig(threshold=100.0),
    "magnitude": lambda pipe: MagCacheConfig(
        threshold=10.0, max_skip_steps=3, retention_ratio=0.2, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
    ),
    "taylor": lambda pipe: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, use_lite_mode=True),
    "pyramid": lambda pipe: PyramidAttentionBroadcastConfig(**_everywhere(pipe)),
    "faster": lambda pipe: FasterCacheConfig(
        **_everywhere(pipe),
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BFCHW",
    ),
    "spectral": lambda pipe: SeaCacheConfig(threshold=100.0),
}
SKIPPING = ("first block", "magnitude", "taylor", "spectral")
"""Those that leave out whole blocks."""
PAIRS = {
    "FluxPipeline": ("first block", "magnitude", "taylor", "pyramid"),
    "WanPipeline": ("first block", "magnitude", "taylor", "pyramid", "spectral"),
    "CogVideoXPipeline": ("first block", "magnitude", "taylor", "pyramid", "faster"),
}
"""Pipeline class -> the caches that its DiT supports."""


def enable_cache(pipe: Any, cache: str) -> None:
    for dit in denoisers(pipe):
        dit.enable_cache(CACHES[cache](pipe))


def disable_cache(pipe: Any) -> None:
    for dit in denoisers(pipe):
        dit.disable_cache()


@functools.cache
def feature(name: str, cache: str) -> Feature:
    return Feature(
        PIPELINES[name],
        lambda pipe: enable_cache(pipe, cache),
        arguments=(("num_inference_steps", STEPS),),
    )


@pytest.mark.parametrize(
    ("name", "cache", "when"),
    fast_ones(
        [(name, cache, when) for name in PAIRS for cache in PAIRS[name] for when in ("before", "after")],
        ("FluxPipeline", "magnitude", "after"),
        ("CogVideoXPipeline", "faster", "before"),
    ),
)
@in_every_mode
def test_a_cache(mode: str, name: str, cache: str, when: str, device: torch.device) -> None:
    feature(name, cache).check(mode, when, device)


# ---------------------------------------------------------------------- bytes


def bytes_by_step(pipe: Any, call: Call) -> tuple[np.ndarray, list[int]]:
    """A call's output, and the bytes that were copied to the device in each of its steps."""
    readings = [pipe.omni_offload.bytes_moved]

    def read(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        readings.append(pipe.omni_offload.bytes_moved)
        return {}

    output = tiny.run(pipe, with_arguments(call, callback_on_step_end=read))
    return output, [after - before for before, after in itertools.pairwise(readings)]


def blocks_by_step(pipe: Any, call: Call) -> list[int]:
    """How many blocks of DiTs really run in each step: an inner module is counted, as a cache answers in a block's
    place."""
    ran, readings = [0], [0]

    def note(*_: Any) -> None:
        ran[0] += 1

    def read(*_: Any) -> dict[str, Any]:
        readings.append(ran[0])
        return {}

    stacks = (dit.blocks if hasattr(dit, "blocks") else dit.transformer_blocks for dit in denoisers(pipe))
    inner = [next(iter(block.children())) for stack in stacks for block in stack]
    removable = [module.register_forward_pre_hook(note) for module in inner]
    tiny.run(pipe, with_arguments(call, callback_on_step_end=read))
    for hook in removable:
        hook.remove()
    return [after - before for before, after in itertools.pairwise(readings)]


@pytest.mark.parametrize(
    ("name", "cache"),
    fast_ones(
        [(name, cache) for name in PAIRS for cache in PAIRS[name] if cache in SKIPPING], ("FluxPipeline", "magnitude")
    ),
)
def test_skipped_blocks_move_no_bytes(name: str, cache: str, device: torch.device) -> None:
    """A step that runs no block after one that ran none copies nothing, and the call copies less than without a
    cache."""
    plain, (expected, _) = feature(name, cache).expected(device)
    pipe, call = feature(name, cache).fresh()
    enable(pipe, "layer")
    output, full = bytes_by_step(pipe, call)
    assert np.array_equal(output, plain) and all(full)
    enable_cache(pipe, cache)
    tiny.run(pipe, call)
    output, moved = bytes_by_step(pipe, call)
    assert np.array_equal(output, expected)
    ran = blocks_by_step(pipe, call)
    # The head of a stack may run to be asked whether the rest has to.
    least = min(ran)
    idle = [step for step in range(1, STEPS) if ran[step] == ran[step - 1] == least]
    assert least < max(ran) and (cache in ("taylor", "spectral") or idle)
    if least == 0:
        assert all(moved[step] == 0 for step in idle), (ran, moved)
    assert sum(moved) < sum(full), (ran, moved, full)
    disable_cache(pipe)
    output, again = bytes_by_step(pipe, call)
    assert np.array_equal(output, plain) and all(again)


# ---------------------------------------------------------------------- any order


def walk(name: str, seed: int, steps: int, device: torch.device) -> None:
    """Offload is switched and caches come and go; after each step the output is that of the cache alone."""
    rng = random.Random(seed)
    pipe, call = build_as(PIPELINES[name])
    call = with_arguments(call, num_inference_steps=STEPS)
    mode: str | None = None
    cache: str | None = None
    log: list[tuple[str | None, str | None]] = []
    while len(log) < steps:
        if rng.random() < 0.5:
            mode = rng.choice([other for other in (None, *MODES) if other != mode])
            if mode is None:
                pipe.disable_omni_offload()
            else:
                enable(pipe, mode)
        else:
            if cache is not None:
                disable_cache(pipe)
            cache = rng.choice([other for other in (None, *PAIRS[name]) if other != cache])
            if cache is not None:
                enable_cache(pipe, cache)
        log.append((mode, cache))
        if mode is not None:
            plain, cached = feature(name, cache or PAIRS[name][0]).expected(device)
            assert np.array_equal(tiny.run(pipe, call), plain if cache is None else cached[0]), log
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []
    if cache is not None:
        disable_cache(pipe)
    assert not any(vars(module)["_diffusers_hook"].hooks for module in hooked(pipe)), log
    plain, _ = feature(name, PAIRS[name][0]).expected(device)
    assert np.array_equal(tiny.run(pipe.to(device), call), plain)


def hooked(pipe: Any) -> list[torch.nn.Module]:
    return [module for dit in denoisers(pipe) for module in dit.modules() if "_diffusers_hook" in vars(module)]


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in PAIRS for seed in range(6)])
@pytest.mark.slow
def test_caches_and_offload_in_any_order(name: str, seed: int, device: torch.device, sim: ModuleType) -> None:
    walk(name, seed, 12, device)
    assert_no_hazards(sim, f"seed {seed}")


NUCLEUS = Feature(
    PIPELINES["NucleusMoEImagePipeline"],
    lambda pipe: pipe.transformer.enable_cache(TextKVCacheConfig()),
    shows=False,
)


@pytest.mark.parametrize(
    ("mode", "when"),
    fast_ones(
        [(mode, when) for mode in MODES for when in ("before", "after")], ("layer", "before"), ("layer", "after")
    ),
)
def test_a_cache_that_uses_parts_of_a_block_itself(mode: str, when: str, device: torch.device) -> None:
    """Its hook calls them before it calls the block, so it has to run inside of ours."""
    NUCLEUS.check(mode, when, device)
