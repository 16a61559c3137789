"""A VAE's tiling and slicing beside offload, another VAE in its place, and previews, in every mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.equality import build_as, build_resident, outputs
from tests.living import Feature, enable, fast_ones, ours_left, sd3, with_arguments
from tests.modes import MODES, chosen, in_every_mode
from tests.occupancy import Occupancy
from tests.zoo import PIPELINES

TILE_SIZES = {
    "tile_sample_min_size": 16,
    "tile_latent_min_size": 8,
    "tile_sample_min_height": 16,
    "tile_sample_min_width": 16,
    "tile_sample_stride_height": 12,
    "tile_sample_stride_width": 12,
}


def tile(pipe: Any) -> None:
    for name, size in TILE_SIZES.items():
        if hasattr(pipe.vae, name):
            setattr(pipe.vae, name, size)
    pipe.vae.enable_tiling()


def slice_batches(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def tile_and_slice(pipe: Any) -> None:
    tile(pipe)
    slice_batches(pipe)


PICTURES: dict[str, tuple[str, int]] = {
    "StableDiffusion3Pipeline": ("num_images_per_prompt", 48),
    "StableDiffusionXLPipeline": ("num_images_per_prompt", 48),
    "QwenImagePipeline": ("num_images_per_prompt", 32),
    "WanPipeline": ("num_videos_per_prompt", 32),
}
"""Pipeline class -> the argument that asks for two pictures, and how large they have to be for several tiles."""
CHANGES: dict[str, Callable[[Any], None]] = {"tiles": tile, "slices": slice_batches, "both": tile_and_slice}


@functools.cache
def feature(name: str, change: str) -> Feature:
    count, size = PICTURES[name]
    arguments = ((count, 2), ("height", size), ("width", size))
    return Feature(PIPELINES[name], CHANGES[change], arguments=arguments)


@pytest.mark.parametrize(
    ("name", "change", "when"),
    fast_ones(
        [(name, change, when) for name in PICTURES for change in CHANGES for when in ("before", "after")],
        ("StableDiffusion3Pipeline", "both", "after"),
    ),
)
@in_every_mode
def test_a_vae_in_tiles_and_slices(mode: str, name: str, change: str, when: str, device: torch.device) -> None:
    feature(name, change).check(mode, when, device)


@in_every_mode
def test_a_vae_comes_once_however_many_tiles_there_are(mode: str, device: torch.device) -> None:
    pipe, call = feature("StableDiffusion3Pipeline", "both").fresh()
    handle = enable(pipe, mode)
    tile_and_slice(pipe)
    tiles: list[Any] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: tiles.append(None))
    with Occupancy(handle) as record:
        tiny.run(pipe, call)
    assert len(tiles) > 4
    assert record.loads.count("vae") == (chosen(mode, "vae") == "module")


# ---------------------------------------------------------------------- previews


def preview(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Decode what there is so far, and let it show in the rest of the call."""
    latents = tensors["latents"]
    with torch.no_grad():
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        again = pipe.vae.encode(image).latent_dist.mean
    return {"latents": latents + 0.1 * again}


@in_every_mode
def test_a_callback_that_decodes_and_encodes(mode: str, device: torch.device, sim: ModuleType) -> None:
    """The VAE takes its turn between two steps, and the DiT comes back after it."""
    resident, call = build_resident(sd3, device)
    plain = tiny.run(resident, with_arguments(call, num_inference_steps=3))
    call = with_arguments(call, num_inference_steps=3, callback_on_step_end=preview)
    expected = tiny.run(resident, call)
    assert not np.array_equal(plain, expected)
    pipe, _ = build_as(sd3)
    enable(pipe, mode)
    for output in outputs(pipe, call, 2):
        assert np.array_equal(output, expected)
    assert sim.hazards() == []


# ---------------------------------------------------------------------- another VAE


def tiny_autoencoder(seed: int) -> Any:
    from diffusers import AutoencoderTiny

    torch.manual_seed(seed)
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
        shift_factor=0.0,
    )
    return vae.eval()


@in_every_mode
def test_a_tiny_vae_in_its_place(mode: str, device: torch.device) -> None:
    """Taken in where the old one lives on the device; refused by name where that was packed; the old one goes back."""
    resident, call = build_resident(sd3, device)
    plain = tiny.run(resident, call)
    resident.vae = tiny_autoencoder(5).to(device)
    expected = tiny.run(resident, call)
    assert not np.array_equal(plain, expected)
    pipe, _ = build_as(sd3)
    enable(pipe, mode)
    assert np.array_equal(tiny.run(pipe, call), plain)
    old, pipe.vae = pipe.vae, tiny_autoencoder(5)
    if chosen(mode, "vae") == "module":
        with pytest.raises(RuntimeError, match=r"^vae is offloaded and was replaced.*enable_omni_offload\(\) again"):
            tiny.run(pipe, call)
        pipe.enable_omni_offload("layer")
        pipe.enable_omni_offload(**MODES[mode])
    assert np.array_equal(tiny.run(pipe, call), expected)
    pipe.vae = old
    if chosen(mode, "vae") == "module":
        pipe.disable_omni_offload()
        pipe.enable_omni_offload(**MODES[mode])
    assert np.array_equal(tiny.run(pipe, call), plain)
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []
