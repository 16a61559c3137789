"""ControlNets and IP-Adapters beside offload, in every mode and chosen by path."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests import tiny
from tests.equality import Build, Call, assert_equal_outputs, build_as, build_resident, outputs
from tests.living import before_and_after, denoisers, enable, fast_ones, ours_left, with_arguments
from tests.modes import MODES, in_every_mode
from tests.test_cases_beside import ip_adapter
from tests.zoo import PIPELINES
from tests.zoo.assembly import assemble
from tests.zoo.building import normal, picture
from tests.zoo.image_encoders import clip_processor, clip_vision_projection

# ---------------------------------------------------------------------- ControlNets

CONTROLNETS = {
    "sd3": "StableDiffusion3ControlNetPipeline",
    "qwen_image": "QwenImageControlNetPipeline",
    "flux": "FluxControlNetPipeline",
    "sdxl": "StableDiffusionXLControlNetPipeline",
}
BY_PATH: dict[str, dict[str, Any]] = {
    "controlnet module": {"components": {"controlnet": "module"}},
    "controlnet layer": {"components": {"controlnet": "layer"}},
    "dit layer, controlnet module": {"components": {"dit": "layer", "controlnet": "module"}},
    "dit module, controlnet layer": {"components": {"dit": "module", "controlnet": "layer"}},
    "all module": {"components": dict.fromkeys(("dit", "controlnet", "text_encoder", "vae"), "module")},
    "all layer": {"components": dict.fromkeys(("dit", "controlnet", "text_encoder"), "layer")},
}
CHOICES = {**MODES, **BY_PATH}
FAST_CHOICES = ("module", "mixed", "controlnet layer", "dit layer, controlnet module")


def single(name: str) -> tuple[Any, Call]:
    return PIPELINES[CONTROLNETS[name]]()


def several(name: str) -> tuple[Any, Call]:
    """With two ControlNets of different weights, which the pipeline puts into one component."""
    pipe, call = single(name)
    other = single(name)[0].controlnet
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    pipe = assemble(type(pipe), {**pipe.components, "controlnet": [pipe.controlnet, other]})
    image = "image" if name == "sdxl" else "control_image"
    size = call()[image].size
    pictures = [picture(*size), picture(*size, seed=3)]
    more: dict[str, Any] = {image: pictures, "controlnet_conditioning_scale": [0.7, 0.4]}
    if name == "flux":
        more["control_mode"] = [None, None]
    return pipe, with_arguments(call, **more)


BUILDS: dict[str, Build] = {
    **{name: functools.partial(single, name) for name in CONTROLNETS},
    **{f"{name}, two": functools.partial(several, name) for name in ("sd3", "flux", "sdxl")},
}


@functools.cache
def controlled(name: str, device: torch.device) -> np.ndarray:
    """The resident pipeline's output, which a weight of the ControlNet changes."""
    pipe, call = build_resident(BUILDS[name], device)
    expected = tiny.run(pipe, call)
    with torch.no_grad():
        for parameter in pipe.controlnet.parameters():
            parameter.mul_(1.5)
    assert np.isfinite(expected).all() and not np.array_equal(tiny.run(pipe, call), expected)
    return expected


@pytest.mark.parametrize(
    ("name", "choice"),
    fast_ones([(name, choice) for name in BUILDS for choice in CHOICES], *(("sd3", choice) for choice in FAST_CHOICES)),
)
def test_a_controlnet(name: str, choice: str, device: torch.device) -> None:
    """It runs beside the DiT in each step; wherever its weights are, the output is that of the resident pipeline."""
    expected = controlled(name, device)
    pipe, call = build_as(BUILDS[name])
    handle = pipe.enable_omni_offload(**CHOICES[choice])
    assert_equal_outputs(outputs(pipe, call, 2), [expected] * 2, f"{name}, {choice}")
    weights = {parameter.device.type for parameter in pipe.controlnet.parameters()}
    wanted = CHOICES[choice].get("components", {}).get("controlnet", "resident")
    assert ("controlnet" in handle.plan.swapped) == (wanted == "module")
    assert any(stack.component.startswith("controlnet") for stack in handle.plan.stacks) == (wanted == "layer")
    assert weights == {"sim"} if wanted == "resident" else "cpu" in weights
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


def test_a_swapped_controlnet_and_a_streamed_dit_share_a_step(device: torch.device) -> None:
    """Nobody makes room for the other: the ControlNet comes once a call, not once a step."""
    pipe, call = build_as(BUILDS["sd3"])
    handle = pipe.enable_omni_offload(components={"dit": "layer", "controlnet": "module"})
    tiny.run(pipe, with_arguments(call, num_inference_steps=4))
    assert handle.swaps == 1


def test_a_controlnet_in_a_list_is_chosen_with_the_list(device: torch.device) -> None:
    pipe, _ = build_as(BUILDS["sd3, two"])
    with pytest.raises(ValueError, match=r"'controlnet\.nets\.0'.*doesn't have.*Did you mean 'controlnet'"):
        pipe.enable_omni_offload(components={"controlnet.nets.0": "module"})
    assert ours_left(pipe) == []


# ---------------------------------------------------------------------- IP-Adapters


def flux_ip_adapter(dit: Any, features: int = 32) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights of an IP-Adapter for a FLUX.1 DiT: a projection to four tokens, two linears a double block."""
    width, hidden = dit.config.joint_attention_dim, dit.inner_dim
    projection = {
        "proj.weight": normal(4 * width, features, seed=7) * 0.3,
        "proj.bias": normal(4 * width, seed=8) * 0.3,
        "norm.weight": 1 + normal(width, seed=9) * 0.3,
        "norm.bias": normal(width, seed=10) * 0.3,
    }
    weights = {}
    for index in range(dit.config.num_layers):
        for number, part in enumerate(("to_k_ip", "to_v_ip")):
            weights[f"{index}.{part}.weight"] = normal(hidden, width, seed=20 + 2 * index + number) * 0.3
            weights[f"{index}.{part}.bias"] = normal(hidden, seed=40 + 2 * index + number) * 0.3
    return {"image_proj": projection, "ip_adapter": weights}


def load_adapters(pipe: Any, count: int = 1) -> None:
    """An image encoder, which stock code moves to the pipeline's device itself, and so many adapters."""
    pipe.register_modules(image_encoder=clip_vision_projection(32).to(pipe.device), feature_extractor=clip_processor())
    dit = denoisers(pipe)[0]
    make = flux_ip_adapter if hasattr(pipe, "transformer") else ip_adapter
    states = [make(dit, 32) for _ in range(count)]
    for state in states[1:]:
        state["ip_adapter"] = {name: -0.5 * weight for name, weight in state["ip_adapter"].items()}
    pipe.load_ip_adapter(states, subfolder=[""] * count, weight_name=[""] * count)
    pipe.set_ip_adapter_scale(0.7 if count == 1 else [0.7] * count)


def pictured(pipe: Any, call: Call, count: int = 1) -> Call:
    """`call` with a picture for each adapter, once there are adapters."""

    def pictures() -> dict[str, Any]:
        if getattr(denoisers(pipe)[0], "encoder_hid_proj", None) is None:
            return call()
        return {**call(), "ip_adapter_image": [picture(seed=5 + index) for index in range(count)]}

    return pictures


ADAPTED = {
    "flux": ("FluxPipeline", 1),
    "sd": ("StableDiffusionPipeline", 1),
    "sdxl, two": ("StableDiffusionXLPipeline", 2),
}


@functools.cache
def adapted(name: str, device: torch.device) -> list[np.ndarray]:
    """The resident pipeline's outputs without, with, and again without adapters."""
    class_name, count = ADAPTED[name]
    pipe, call = build_resident(PIPELINES[class_name], device)
    call = pictured(pipe, call, count)
    plain = tiny.run(pipe, call)
    load_adapters(pipe, count)
    with_adapter = tiny.run(pipe, call)
    pipe.unload_ip_adapter()
    assert not np.array_equal(plain, with_adapter) and np.array_equal(tiny.run(pipe, call), plain)
    return [plain, with_adapter]


@pytest.mark.parametrize("name", fast_ones(ADAPTED, "flux"))
@before_and_after
@in_every_mode
def test_an_ip_adapter(mode: str, when: str, name: str, device: torch.device, sim: ModuleType) -> None:
    """It brings weights in and outside of blocks, and an image encoder, before offload or later; and it goes again."""
    class_name, count = ADAPTED[name]
    plain, expected = adapted(name, device)
    pipe, call = build_as(PIPELINES[class_name])
    call = pictured(pipe, call, count)
    if when == "before":
        load_adapters(pipe, count)
    handle = enable(pipe, mode)
    if when == "after":
        assert np.array_equal(tiny.run(pipe, call), plain)
        load_adapters(pipe, count)
    assert_equal_outputs(outputs(pipe, call, 2), [expected] * 2, f"{name}, {mode}, loaded {when} enabling")
    encoder = pipe.image_encoder
    streams = "image_encoder" in handle.plan.swapped
    # One that came later stays on the device, whatever was chosen for image encoders.
    assert streams == (mode == "module" and when == "before")
    assert {parameter.device.type for parameter in encoder.parameters()} == {"cpu" if streams else "sim"}
    if not streams:
        pipe.unload_ip_adapter()
        assert np.array_equal(tiny.run(pipe, call), plain)
        assert {parameter.device.type for parameter in encoder.parameters()} == {"cpu"}, "it is let go"
    assert sim.hazards() == []
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


def test_a_controlnet_joins_by_from_pipe(device: torch.device) -> None:
    """A sibling with a ControlNet more uses what is offloaded already; its ControlNet lives on the device."""
    expected = controlled("sd3", device)
    _, call = single("sd3")
    for mode in MODES:
        whole, _ = single("sd3")
        pipe = assemble(diffusers.StableDiffusion3Pipeline, whole.components)
        handle = enable(pipe, mode)
        pinned = handle.pinned_bytes
        other = diffusers.StableDiffusion3ControlNetPipeline.from_pipe(pipe, controlnet=whole.controlnet)
        enable(other, mode)
        assert other.omni_offload.backend is handle.backend and handle.pinned_bytes == pinned
        assert_equal_outputs(outputs(other, call, 2), [expected] * 2, mode)
        assert {parameter.device.type for parameter in whole.controlnet.parameters()} == {"sim"}
