"""Caches of diffusers on DiTs of many families: what works without offload works with it, and what fails, fails so."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny
from tests.equality import Call, assert_no_hazards, build_as, build_resident
from tests.living import denoisers, enable, ours_left, with_arguments
from tests.test_living_caches import CACHES, SKIPPING, STEPS, enable_cache
from tests.zoo import PIPELINES

FAMILIES: dict[str, tuple[str, ...]] = {
    # Those that adapters are for.
    "WanPipeline": ("first block", "magnitude", "taylor", "pyramid", "spectral"),
    "Flux2Pipeline": ("magnitude", "pyramid"),
    "QwenImagePipeline": ("first block", "magnitude", "taylor"),
    "LongCatImagePipeline": ("taylor", "pyramid"),
    "OvisImagePipeline": ("taylor", "pyramid"),
    "Cosmos3OmniPipeline": ("taylor", "spectral"),
    # Others, with stacks of other shapes.
    "FluxPipeline": ("first block", "magnitude", "taylor", "pyramid"),
    "CogView4Pipeline": ("first block", "magnitude", "taylor", "pyramid"),
    "CogVideoXPipeline": ("first block", "magnitude", "taylor", "pyramid", "faster"),
    "MochiPipeline": ("first block", "magnitude", "taylor", "pyramid", "faster"),
    "LTXPipeline": ("first block", "magnitude", "taylor", "pyramid"),
    "LattePipeline": ("pyramid", "faster"),
    "ChromaPipeline": ("pyramid",),
    "HunyuanVideoPipeline": ("first block", "magnitude", "taylor", "pyramid"),
    "SkyReelsV2Pipeline": ("taylor", "pyramid"),
    "Kandinsky5T2VPipeline": ("magnitude",),
    "QwenImage21Pipeline": ("taylor",),
}
"""Pipeline class -> the caches that change its output, as they are set here; diffusers fails with the others."""
ALSO_SWAPPED = ("WanPipeline", "Flux2Pipeline", "QwenImagePipeline", "CogVideoXPipeline")
"""Those that are tried in module mode, too."""

Result = np.ndarray | type[Exception]
"""Of a call: its output, or what it raises."""


def tried(name: str) -> list[str]:
    """SeaCache does nothing where it isn't supported; that isn't worth a call."""
    return [cache for cache in CACHES if cache in FAMILIES[name] or cache != "spectral"]


def cached(pipe: Any, call: Call, cache: str) -> Result:
    """The output of a call with a cache, or what enabling it or the call raises. The cache is off again after it."""
    try:
        enable_cache(pipe, cache)
        result: Result = tiny.run(pipe, call)
    except Exception as error:
        result = type(error)
    for dit in denoisers(pipe):
        if dit.is_cache_enabled:
            dit.disable_cache()
    return result


@functools.cache
def resident(name: str, device: torch.device) -> dict[str, Result]:
    """What a resident pipeline gives with each cache in turn, and at last without any."""
    pipe, call = build_resident(PIPELINES[name], device)
    call = with_arguments(call, num_inference_steps=STEPS)
    found = {cache: cached(pipe, call, cache) for cache in tried(name)}
    for cache, result in found.items():
        if isinstance(result, type):
            # The first failure leaves something on a block's class, after which it fails in another way.
            found[cache] = cached(pipe, call, cache)
    plain = tiny.run(pipe, call)
    assert np.isfinite(plain).all() and np.ptp(plain) > 0
    works = [cache for cache, result in found.items() if isinstance(result, np.ndarray)]
    assert tuple(works) == FAMILIES[name] and all((found[cache] != plain).any() for cache in works)
    return {**found, "none": plain}


@pytest.mark.parametrize(
    ("name", "mode"), [(name, "layer") for name in FAMILIES] + [(name, "module") for name in ALSO_SWAPPED]
)
@pytest.mark.slow
def test_caches_in_turn(name: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    """One after the other on one pipeline. A cache that fails leaves the pipeline as usable as without offload."""
    expected = resident(name, device)
    pipe, call = build_as(PIPELINES[name])
    call = with_arguments(call, num_inference_steps=STEPS)
    enable(pipe, mode)
    for cache in tried(name):
        assert_same(cached(pipe, call, cache), expected[cache], f"{name}, {mode}, {cache}")
    assert_same(tiny.run(pipe, call), expected["none"], f"{name}, {mode}, after all caches")
    assert_no_hazards(sim, f"{name}, {mode}")
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


def assert_same(found: Result, expected: Result, what: str) -> None:
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), f"{what}: it raises {found}"
        assert np.array_equal(found, expected), what
    else:
        assert found is expected, what


# ---------------------------------------------------------------------- loads


class Forwards:
    """Counts the blocks of a pipeline that really run: a part of each is watched, as a cache answers in a block's
    place."""

    def __init__(self, pipe: Any) -> None:
        self.count = 0
        for stack in pipe.omni_offload.plan.stacks:
            for block in stack.blocks:
                part = next(module for module in block.modules() if isinstance(module, nn.Linear))
                part.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


WITHIN = {("Cosmos3OmniPipeline", "taylor")}
"""Those that leave out parts of a block, so that each block runs."""
COUNTED = (*tuple(FAMILIES)[:7], "CogVideoXPipeline", "Kandinsky5T2VPipeline")
"""Pipeline classes whose loads are counted: those that adapters are for, and a few of other shapes."""
PARTLY = ("Kandinsky5T2VPipeline",)
"""Those whose first blocks run in each forward, also where the rest is skipped, so that what comes next changes."""


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, cache) for name in COUNTED for cache in FAMILIES[name] if cache in SKIPPING],
)
@pytest.mark.slow
def test_a_block_that_is_skipped_is_not_loaded(name: str, cache: str, device: torch.device) -> None:
    pipe, call = build_as(PIPELINES[name])
    call = with_arguments(call, num_inference_steps=STEPS)
    handle = enable(pipe, "layer")
    forwards = Forwards(pipe)

    def loads_and_forwards() -> tuple[int, int]:
        loads, ran = handle.loads, forwards.count
        tiny.run(pipe, call)
        return handle.loads - loads, forwards.count - ran

    tiny.run(pipe, call)
    loads, every = loads_and_forwards()
    assert every <= loads <= every + 1
    enable_cache(pipe, cache)
    tiny.run(pipe, call)
    loads, ran = loads_and_forwards()
    # What was prefetched and didn't come: once a call, or else at most once a forward.
    spare = 2 * STEPS if name in PARTLY else 1
    assert loads <= ran + spare
    assert (ran < every) == (loads < every) == ((name, cache) not in WITHIN)
