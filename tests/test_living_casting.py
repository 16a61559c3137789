"""Dtypes beside offload: layerwise casting, casts between calls, autocast; inference mode and no_grad around calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn

from tests import tiny
from tests.equality import Build, assert_equal_outputs, assert_no_hazards, build_as, build_resident, outputs
from tests.living import Feature, denoisers, enable, fast_ones, ours_left, sd3
from tests.modes import MODES, in_every_mode
from tests.test_living_controls import load_adapters, pictured
from tests.zoo import PIPELINES

# ---------------------------------------------------------------------- layerwise casting

FLOAT8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16


def cast_dits(pipe: Any) -> None:
    for dit in denoisers(pipe):
        dit.enable_layerwise_casting(storage_dtype=FLOAT8, compute_dtype=BFLOAT16)


def cast_vae(pipe: Any) -> None:
    pipe.vae.enable_layerwise_casting(storage_dtype=FLOAT8, compute_dtype=BFLOAT16)


def cast_text_encoder(pipe: Any) -> None:
    skipped = ("norm", "embed")
    apply_layerwise_casting(pipe.text_encoder, FLOAT8, BFLOAT16, skip_modules_pattern=skipped)


def cast_all(pipe: Any) -> None:
    cast_dits(pipe)
    cast_vae(pipe)
    cast_text_encoder(pipe)


CASTS: dict[str, tuple[Build, Callable[[Any], None]]] = {
    "all, sd3": (sd3, cast_all),
    "dit, flux": (PIPELINES["FluxPipeline"], cast_dits),
    "dits, wan": (PIPELINES["WanPipeline"], cast_dits),
    "dit, cogvideox": (PIPELINES["CogVideoXPipeline"], cast_dits),
    "unet, sdxl": (PIPELINES["StableDiffusionXLPipeline"], cast_dits),
    "text encoder, flux": (PIPELINES["FluxPipeline"], cast_text_encoder),
    "vae, sdxl": (PIPELINES["StableDiffusionXLPipeline"], cast_vae),
    "vae, wan": (PIPELINES["WanPipeline"], cast_vae),
}


@functools.cache
def feature(name: str) -> Feature:
    return Feature(*CASTS[name], dtype=BFLOAT16)


@pytest.mark.parametrize(
    ("name", "when"),
    fast_ones([(name, when) for name in CASTS for when in ("before", "after")], ("all, sd3", "after")),
)
@in_every_mode
def test_layerwise_casting(mode: str, name: str, when: str, device: torch.device) -> None:
    """Each layer's weights are cast for its forward and cast back after it, in the middle of their time on the
    device."""
    feature(name).check(mode, when, device)


@in_every_mode
def test_weights_are_kept_and_moved_as_they_are_stored(mode: str, device: torch.device) -> None:
    pipe, call = feature("all, sd3").fresh()
    handle = enable(pipe, mode)
    tiny.run(pipe, call)
    pinned, moved = handle.pinned_bytes, handle.bytes_moved
    tiny.run(pipe, call)
    moved = handle.bytes_moved - moved
    cast_all(pipe)
    tiny.run(pipe, call)
    now = handle.bytes_moved
    tiny.run(pipe, call)
    linears = [part for part in pipe.transformer.transformer_blocks.modules() if isinstance(part, nn.Linear)]
    assert {part.weight.dtype for part in linears} >= {FLOAT8}
    assert {part.weight.device.type for part in linears} == {"cpu"}
    assert handle.bytes_moved - now < 0.8 * moved and handle.pinned_bytes < 0.8 * pinned


def cast_pipeline(pipe: Any) -> None:
    pipe.to(BFLOAT16)


CASTS_AFTER: dict[str, tuple[Build, Callable[[Any], None]]] = {
    "pipe.to": (sd3, cast_pipeline),
    "load_ip_adapter": (PIPELINES["StableDiffusionPipeline"], load_adapters),
}
"""What casts weights that are stored in float8: loading an IP-Adapter ends with such a cast of the UNet."""


@pytest.mark.parametrize(("name", "mode"), fast_ones(itertools.product(CASTS_AFTER, MODES), ("pipe.to", "mixed")))
def test_a_cast_of_what_layerwise_casting_stores(mode: str, name: str, device: torch.device, sim: ModuleType) -> None:
    """The first forward after it computes with the weights as they were cast, and stores them in float8 again."""
    build, change = CASTS_AFTER[name]
    found = []
    for offloaded in (False, True):
        pipe, call = build_as(build, BFLOAT16)
        call = pictured(pipe, call)
        if offloaded:
            enable(pipe, mode)
        else:
            pipe.to(device)
        cast_dits(pipe)
        before = tiny.run(pipe, call)
        change(pipe)
        found.append([before, *outputs(pipe, call, 2)])
        stored = [part.weight.dtype for dit in denoisers(pipe) for part in dit.modules() if type(part) is nn.Linear]
        assert FLOAT8 in stored
    assert_equal_outputs(found[1], found[0], f"{name}, {mode}")
    assert_no_hazards(sim, f"{name}, {mode}")


# ---------------------------------------------------------------------- casts between calls

STEPS: list[Callable[[Any], Any]] = [
    lambda pipe: pipe.to(BFLOAT16),
    lambda pipe: pipe.to(dtype=torch.float32),
    lambda pipe: pipe.transformer.to(BFLOAT16).to(dtype=torch.float32, device=pipe.device),
    lambda pipe: pipe.transformer.transformer_blocks[1].bfloat16().float(),
    lambda pipe: [part.bfloat16() for part in pipe.components.values() if isinstance(part, nn.Module)],
    lambda pipe: pipe.to(torch.float32),
    lambda pipe: pipe.vae.to(torch.float64),
    lambda pipe: pipe.vae.to(torch.float32),
]
"""None of them gives a pipeline its old weights back: bfloat16 has lost digits, float32 keeps that loss."""


@in_every_mode
def test_casts_between_calls(mode: str, device: torch.device, sim: ModuleType) -> None:
    resident, call = build_resident(sd3, device)
    pipe, _ = build_as(sd3)
    enable(pipe, mode)
    first = tiny.run(resident, call)
    assert np.array_equal(tiny.run(pipe, call), first)
    for number, step in enumerate(STEPS):
        step(resident)
        step(pipe)
        if number == 6:  # Its latents are float32.
            continue
        expected = tiny.run(resident, call)
        assert np.array_equal(tiny.run(pipe, call), expected), f"after step {number}"
        assert not np.array_equal(expected, first) and pipe.dtype == resident.dtype
    assert_no_hazards(sim, mode)


@in_every_mode
def test_moves_of_parts_leave_the_outputs(mode: str, device: torch.device) -> None:
    """A block, a layer or a part that is moved by itself is where it belongs in the next call."""
    resident, call = build_resident(sd3, device)
    expected = tiny.run(resident, call)
    pipe, _ = build_as(sd3)
    enable(pipe, mode)
    parts = (pipe.transformer.transformer_blocks[1], pipe.text_encoder.text_projection, pipe.vae.decoder.mid_block)
    homes = [[parameter.device for parameter in part.parameters()] for part in parts]
    for part in parts:
        for where in (device, torch.device("cpu")):
            part.to(where)
            assert np.array_equal(tiny.run(pipe, call), expected)
    assert [[parameter.device for parameter in part.parameters()] for part in parts] == homes


# ---------------------------------------------------------------------- contexts

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("sim", BFLOAT16),
}


@functools.cache
def within(name: str, context: str, device: torch.device) -> tuple[np.ndarray, list[np.ndarray]]:
    """The resident pipeline's output, and those of two calls within a context."""
    pipe, call = build_resident(PIPELINES[name], device)
    plain = tiny.run(pipe, call)
    with CONTEXTS[context]():
        inside = outputs(pipe, call, 2)
    assert np.array_equal(plain, inside[0]) == (context != "autocast")
    return plain, inside


@pytest.mark.parametrize(
    ("name", "context"),
    fast_ones(
        [(name, context) for name in ("StableDiffusion3Pipeline", "WanPipeline") for context in CONTEXTS],
        ("WanPipeline", "inference mode"),
        ("WanPipeline", "autocast"),
    ),
)
@pytest.mark.parametrize("what", ["calls", "enabling and calls", "enabling"])
@in_every_mode
def test_calls_and_enabling_in_a_context(
    mode: str, what: str, name: str, context: str, device: torch.device, sim: ModuleType
) -> None:
    """Within, across its end, and outside again: tensors made in one are used in the other."""
    plain, inside = within(name, context, device)
    pipe, call = build_as(PIPELINES[name])
    enter = CONTEXTS[context]
    with enter() if "enabling" in what else contextlib.nullcontext():
        enable(pipe, mode)
    if what != "enabling":
        with enter():
            assert_equal_outputs(outputs(pipe, call, 2), inside, f"{what} within {context}")
    assert_equal_outputs(outputs(pipe, call, 2), [plain] * 2, f"after {what} within {context}")
    assert_no_hazards(sim, f"{what} within {context}")
    pipe.disable_omni_offload()
    assert ours_left(pipe) == [] and np.array_equal(tiny.run(pipe.to(device), call), plain)


@in_every_mode
def test_autocast_keeps_no_cast_of_offloaded_weights(mode: str, device: torch.device) -> None:
    """It caches casts by the weight's tensor: weights that were replaced or edited in between would not count, and the
    casts would take the device memory that offload saves."""
    resident, call = build_resident(sd3, device)
    pipe, _ = build_as(sd3)
    enable(pipe, mode)
    tiny.run(pipe, call)
    found = []
    for each in (resident, pipe):
        with torch.autocast("sim", BFLOAT16):
            found.append(tiny.run(each, call))
        with torch.no_grad():
            each.transformer.transformer_blocks[0].ff.net[2].weight.mul_(1.5)
        with torch.autocast("sim", BFLOAT16):
            found.append(tiny.run(each, call))
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])
    assert not np.array_equal(found[0], found[1])
    with torch.autocast("sim", BFLOAT16):
        tiny.run(pipe, call)
        before = torch.accelerator.memory_allocated()
        tiny.run(pipe, call)
        # An edit in the middle of the region counts, as casts of offloaded weights aren't kept.
        with torch.no_grad():
            pipe.transformer.transformer_blocks[0].ff.net[2].weight.div_(1.5)
        edited = tiny.run(pipe, call)
        held = torch.accelerator.memory_allocated()
    assert np.array_equal(edited, found[0]) and held <= before
