"""UNets that several families share."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.tiny.transformers import sdxl_unet
from tests.zoo.building import normal
from tests.zoo.controls import controlnet_xs, motion_adapter
from tests.zoo.families.dreamlite import dreamlite_unet
from tests.zoo.registry import Arguments, transformer
from tests.zoo.stable_diffusion import sd_unet

LATENTS: dict[str, Any] = {"timestep": 500, "encoder_hidden_states": normal(2, 12, 32, seed=1)}


@transformer("UNet2DConditionModel")
def unet_2d_condition() -> tuple[nn.Module, Arguments]:
    """The shape of Stable Diffusion XL, which reads the pooled text and the picture's size, too."""
    return sdxl_unet(), lambda: {
        "sample": normal(2, 4, 16, 16),
        "timestep": 500,
        "encoder_hidden_states": normal(2, 12, 64, seed=1),
        "added_cond_kwargs": {"text_embeds": normal(2, 32, seed=2), "time_ids": normal(2, 6, seed=3)},
    }


@transformer("UNetMotionModel")
def unet_motion() -> tuple[nn.Module, Arguments]:
    from diffusers import UNetMotionModel

    unet = sd_unet()
    model = UNetMotionModel.from_unet2d(unet, motion_adapter(unet)).eval()
    return model, lambda: {
        **LATENTS,
        # One text for all frames of a clip.
        "sample": normal(2, 4, 3, 8, 8),
        "encoder_hidden_states": normal(6, 12, 32, seed=1),
    }


@transformer("UNetControlNetXSModel")
def unet_controlnet_xs() -> tuple[nn.Module, Arguments]:
    from diffusers import UNetControlNetXSModel

    unet = sd_unet(layers_per_block=2)
    model = UNetControlNetXSModel.from_unet(unet, controlnet_xs(unet)).eval()
    return model, lambda: {**LATENTS, "sample": normal(2, 4, 8, 8), "controlnet_cond": normal(2, 3, 16, 16, seed=2)}


@transformer("DreamLiteUNetModel")
def unet_dreamlite() -> tuple[nn.Module, Arguments]:
    return dreamlite_unet(), lambda: {
        "sample": normal(2, 4, 8, 8),
        "timestep": 500,
        "encoder_hidden_states": normal(2, 12, 16, seed=1),
    }
