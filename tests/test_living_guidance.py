"""Guidance that leaves out layers or steers attention beside offload: skip-layer guidance, hooks, modular guiders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.modular_pipelines import WanBlocks
from diffusers.modular_pipelines.qwenimage.modular_blocks_qwenimage import QwenImageAutoBlocks
from diffusers.modular_pipelines.stable_diffusion_3.modular_blocks_stable_diffusion_3 import StableDiffusion3AutoBlocks
from diffusers.modular_pipelines.stable_diffusion_xl.modular_blocks_stable_diffusion_xl import (
    StableDiffusionXLAutoBlocks,
)

from tests import tiny
from tests.equality import Build, Call, assert_no_hazards, build_resident
from tests.living import Feature, before_and_after, denoisers, enable, fast_ones, ours_left, sd3, with_arguments
from tests.modes import in_every_mode
from tests.zoo import PIPELINES
from tests.zoo.building import generator

# ---------------------------------------------------------------------- layers that are skipped for good


def skip_layers(pipe: Any) -> None:
    for dit in denoisers(pipe):
        apply_layer_skip(dit, LayerSkipConfig(indices=[1, 2]))


SKIPPED: dict[str, Feature] = {
    "sd3": Feature(sd3, skip_layers),
    "flux": Feature(PIPELINES["FluxPipeline"], skip_layers),
    "wan": Feature(PIPELINES["WanPipeline"], skip_layers),
}


@pytest.mark.parametrize("name", fast_ones(SKIPPED, "sd3"))
@before_and_after
@in_every_mode
def test_the_layer_skip_hook(mode: str, when: str, name: str, device: torch.device) -> None:
    SKIPPED[name].check(mode, when, device)


def test_skipped_layers_move_no_bytes(device: torch.device) -> None:
    pipe, call = SKIPPED["sd3"].fresh()
    call = with_arguments(call, num_inference_steps=4)
    handle = enable(pipe, "layer")
    tiny.run(pipe, call)
    before = handle.bytes_moved
    tiny.run(pipe, call)
    full = handle.bytes_moved - before
    skip_layers(pipe)
    tiny.run(pipe, call)
    before, loads = handle.bytes_moved, handle.loads
    tiny.run(pipe, call)
    # Two blocks of four are left, one for each slot: each is copied once a call.
    assert handle.loads - loads == 2 and handle.bytes_moved - before < full / 4


# ---------------------------------------------------------------------- Stable Diffusion 3's own


@in_every_mode
def test_skip_layer_guidance(mode: str, device: torch.device, sim: ModuleType) -> None:
    """A third forward of each step leaves two layers out; the next call has it, or hasn't."""
    resident, call = build_resident(sd3, device)
    guided = with_arguments(
        call, num_inference_steps=3, skip_guidance_layers=[1, 2], skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    )  # fmt: skip
    plain, expected = tiny.run(resident, call), tiny.run(resident, guided)
    assert not np.array_equal(tiny.run(resident, with_arguments(call, num_inference_steps=3)), expected)
    pipe, _ = sd3()
    enable(pipe, mode)
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, guided), expected)
        assert np.array_equal(tiny.run(pipe, call), plain)
    assert_no_hazards(sim, mode)


# ---------------------------------------------------------------------- guiders of modular pipelines


def modular(blocks: type, class_name: str) -> tuple[Any, Call]:
    """A modular pipeline with the components of a tiny stock one."""
    stock, call = PIPELINES[class_name]()
    pipe = blocks().init_pipeline()
    known = {name for name in pipe.component_names if getattr(stock, name, None) is not None}
    pipe.update_components(**{name: getattr(stock, name) for name in known})
    taken = ("prompt", "negative_prompt", "height", "width", "num_frames", "max_sequence_length")

    def arguments() -> dict[str, Any]:
        given = call()
        found = {name: given[name] for name in taken if name in given}
        return {**found, "num_inference_steps": 3, "generator": generator(), "output_type": "np"}

    return pipe, arguments


MODULAR: dict[str, Build] = {
    "sd3": lambda: modular(StableDiffusion3AutoBlocks, "StableDiffusion3Pipeline"),
    "wan": lambda: modular(WanBlocks, "WanPipeline"),
    "qwen": lambda: modular(QwenImageAutoBlocks, "QwenImagePipeline"),
    "sdxl": lambda: modular(StableDiffusionXLAutoBlocks, "StableDiffusionXLPipeline"),
}
# In the UNet the layers are named; elsewhere they are found.
STACK = {"sdxl": ("mid_block.attentions.0.transformer_blocks", [0])}


def layers(name: str, **skipped: bool) -> LayerSkipConfig:
    stack, indices = STACK.get(name, ("auto", [1, 2]))
    return LayerSkipConfig(indices=list(indices), fqn=stack, **skipped)


GUIDERS: dict[str, Callable[[str], Any]] = {
    "classifier-free": lambda name: diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    "skip layers": lambda name: diffusers.SkipLayerGuidance(
        guidance_scale=3.0, skip_layer_config=layers(name), skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    ),
    "skip feed-forwards": lambda name: diffusers.SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_config=layers(name, skip_attention=False),
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    ),
    "perturbed attention": lambda name: diffusers.PerturbedAttentionGuidance(
        guidance_scale=3.0,
        perturbed_guidance_config=layers(name, skip_attention=False, skip_attention_scores=True, skip_ff=False),
        perturbed_guidance_start=0.0,
        perturbed_guidance_stop=1.0,
    ),
    "auto": lambda name: diffusers.AutoGuidance(guidance_scale=3.0, auto_guidance_config=layers(name), dropout=None),
    "adaptive projected": lambda name: diffusers.AdaptiveProjectedGuidance(guidance_scale=3.0),
    "zero star": lambda name: diffusers.ClassifierFreeZeroStarGuidance(guidance_scale=3.0),
    "tangential": lambda name: diffusers.TangentialClassifierFreeGuidance(guidance_scale=3.0),
    "adaptive projected, mixed": lambda name: diffusers.AdaptiveProjectedMixGuidance(
        guidance_scale=3.0, adaptive_projected_guidance_start_step=1
    ),
    "smoothed energy": lambda name: diffusers.SmoothedEnergyGuidance(
        guidance_scale=3.0,
        seg_guidance_config=diffusers.SmoothedEnergyGuidanceConfig(indices=layers(name).indices, fqn=layers(name).fqn),
        seg_guidance_start=0.0,
        seg_guidance_stop=1.0,
    ),
}


UNSUPPORTED = {("sd3", "perturbed attention"), ("wan", "perturbed attention"), ("qwen", "zero star")}
"""Diffusers doesn't know these DiTs' attention processors, and Qwen-Image divides by the norm of what is zero."""


@functools.cache
def guided(name: str, guider: str) -> Feature:
    def guide(pipe: Any) -> None:
        pipe.update_components(guider=GUIDERS[guider](name))

    return Feature(MODULAR[name], guide)


@pytest.mark.parametrize(
    ("name", "guider"),
    fast_ones(
        [(name, guider) for name in MODULAR for guider in GUIDERS if (name, guider) not in UNSUPPORTED],
        ("wan", "skip layers"),
    ),
)
@in_every_mode
def test_a_guider(mode: str, name: str, guider: str, device: torch.device) -> None:
    """It puts hooks on the DiT before each of a step's forwards, and takes them off again."""
    guided(name, guider).check(mode, "after", device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "wan"])
@in_every_mode
def test_a_guider_that_fails(mode: str, name: str, device: torch.device, sim: ModuleType) -> None:
    """As without offload; and the next guider works."""
    resident, call = build_resident(MODULAR[name], device)
    pipe, _ = MODULAR[name]()
    enable(pipe, mode)
    errors, found = [], []
    for each in (resident, pipe):
        found.append([tiny.run(each, call)])
        each.update_components(guider=GUIDERS["perturbed attention"](name))
        with pytest.raises(Exception) as raised:
            tiny.run(each, call)
        errors.append((raised.type, str(raised.value)))
        each.update_components(guider=GUIDERS["skip layers"](name))
        found[-1].append(tiny.run(each, call))
    assert errors[0] == errors[1]
    assert all(map(np.array_equal, *found)) and not np.array_equal(*found[0])
    assert_no_hazards(sim, f"{name}, {mode}")
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


class Steps:
    """The modular pipelines of Stable Diffusion 3's text encoders and of all that comes after them."""

    def __init__(self, components: dict[str, Any]) -> None:
        blocks = StableDiffusion3AutoBlocks()
        self.encoding = blocks.sub_blocks.pop("text_encoder").init_pipeline()
        self.rest = blocks.init_pipeline()
        for pipe in (self.encoding, self.rest):
            pipe.update_components(**{name: part for name, part in components.items() if name in pipe.component_names})

    def embeddings(self) -> dict[str, torch.Tensor]:
        values = self.encoding(prompt="a cat", negative_prompt="bad", max_sequence_length=16).values
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def image(self, embedded: dict[str, torch.Tensor]) -> np.ndarray:
        arguments = {"height": 16, "width": 16, "num_inference_steps": 2, "generator": generator(), "output_type": "np"}
        return tiny.to_array(self.rest(**embedded, **arguments))


@in_every_mode
def test_steps_of_a_modular_pipeline_one_by_one(mode: str, device: torch.device) -> None:
    """Pipelines of some of the steps use the components of one that is offloaded, whether they are offloaded too."""
    resident, call = build_resident(MODULAR["sd3"], device)
    whole = tiny.run(resident, call)
    steps = Steps(resident.components)
    embedded = steps.embeddings()
    expected = steps.image(embedded)
    pipe, _ = MODULAR["sd3"]()
    handle = enable(pipe, mode)
    steps = Steps(pipe.components)
    for _ in range(2):
        found = steps.embeddings()
        assert found.keys() == embedded.keys() and all(torch.equal(found[name], embedded[name]) for name in embedded)
        assert np.array_equal(steps.image(found), expected)
        assert np.array_equal(tiny.run(pipe, call), whole)
        enable(steps.rest, mode)
        assert steps.rest.omni_offload.backend is handle.backend
    assert (handle.swaps > 0) == (mode != "layer")
    pipe.disable_omni_offload()
    steps.rest.disable_omni_offload()
    assert ours_left(pipe) == [] and ours_left(steps.rest) == []
