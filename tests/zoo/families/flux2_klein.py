"""FLUX.2: the dev pipeline; Klein with text to image, inpainting, and cached keys and values of a reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.transformers import flux2_transformer as flux2_dit
from tests.tiny.vaes import flux2_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.language_models import qwen3_causal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("Flux2Transformer2DModel")
def flux2_transformer() -> tuple[nn.Module, Arguments]:
    return flux2_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 48, seed=1),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": grid_ids(4, 4, axes=4),
        "txt_ids": torch.zeros(8, 4),
    }


def klein_pipeline(pipeline_class: Any, **more: Any) -> Any:
    """A Klein pipeline, whose DiT takes no guidance scale; it reads three layers of Qwen 3."""
    from diffusers import Flux2Transformer2DModel

    dit = build(
        Flux2Transformer2DModel,
        105,
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return pipeline_class(
        scheduler=flow_scheduler(),
        vae=flux2_vae(),
        text_encoder=qwen3_causal(hidden=16, layers=3),
        tokenizer=qwen_tokenizer(),
        transformer=dit,
        **more,
    )


def klein_call(**more: Any) -> Arguments:
    """What makes the arguments that all Klein pipelines take, and `more`."""
    common = {
        "prompt": "a dog is dancing",
        "height": 16,
        "width": 16,
        "num_inference_steps": 2,
        "max_sequence_length": 64,
        "text_encoder_out_layers": (1, 2, 3),
        "output_type": "np",
    }
    return arguments(**{**common, **more})


# The smallest picture that Klein takes.
REFERENCE = picture(64, 64)


@pipeline("Flux2Pipeline")
def flux2() -> tuple[Any, Arguments]:
    return tiny.build_flux2()


@pipeline("Flux2KleinPipeline")
def flux2_klein() -> tuple[Any, Arguments]:
    from diffusers import Flux2KleinPipeline

    return klein_pipeline(Flux2KleinPipeline), klein_call(guidance_scale=4.0, image=REFERENCE)


@pipeline("Flux2KleinInpaintPipeline")
def flux2_klein_inpaint() -> tuple[Any, Arguments]:
    from diffusers import Flux2KleinInpaintPipeline

    call = klein_call(
        guidance_scale=4.0,
        image=picture(16, 16),
        mask_image=masked_half(16, 16),
        image_reference=picture(16, 16, seed=1),
        strength=0.8,
        num_inference_steps=3,
    )
    return klein_pipeline(Flux2KleinInpaintPipeline), call


@pipeline("Flux2KleinKVPipeline")
def flux2_klein_kv() -> tuple[Any, Arguments]:
    from diffusers import Flux2KleinKVPipeline

    return klein_pipeline(Flux2KleinKVPipeline), klein_call(image=REFERENCE, num_inference_steps=3)
