"""FLUX.1: text to image, image to image, inpainting, Kontext, and the prior that reads pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import clip_text, t5_encoder
from tests.tiny.tokenizers import clip_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, pipeline, transformer


def flux_dit(in_channels: int = 16, out_channels: int | None = None) -> Any:
    """A `FluxTransformer2DModel` for packed latents of 4 channels; more input channels hold the condition."""
    from diffusers import FluxTransformer2DModel

    return build(
        FluxTransformer2DModel,
        101,
        patch_size=1,
        in_channels=in_channels,
        out_channels=out_channels,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def flux_fill_dit() -> Any:
    """A DiT that reads the latents, those of the masked picture, and the mask: 16 pixels of it a token."""
    return flux_dit(in_channels=16 + 16 + 16, out_channels=16)


def flux_pipeline(pipeline_class: type, dit: Any, **more: Any) -> Any:
    """A pipeline of FLUX.1's components around `dit`, with two text encoders: CLIP and T5."""
    from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer

    components = {
        "scheduler": flow_scheduler(),
        "vae": kl_vae(4),
        "text_encoder": clip_text(False),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_encoder(32),
        "tokenizer_2": t5_tokenizer(),
        "transformer": dit,
    }
    return assemble(pipeline_class, components, **more)


def flux_call(**more: Any) -> Arguments:
    """What makes the arguments that all FLUX.1 pipelines take, and `more`."""
    common = {
        "prompt": "a cat",
        "height": 16,
        "width": 16,
        "num_inference_steps": 2,
        "guidance_scale": 3.5,
        "max_sequence_length": 16,
        "output_type": "np",
    }
    return arguments(**{**common, **more})


@transformer("FluxTransformer2DModel")
def flux_transformer() -> tuple[nn.Module, Arguments]:
    return flux_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "pooled_projections": normal(1, 32, seed=2),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}


@pipeline("FluxPipeline")
def flux() -> tuple[Any, Arguments]:
    from diffusers import FluxPipeline

    return flux_pipeline(FluxPipeline, flux_dit()), flux_call(**GUIDED)


@pipeline("FluxImg2ImgPipeline")
def flux_img2img() -> tuple[Any, Arguments]:
    from diffusers import FluxImg2ImgPipeline

    call = flux_call(image=picture(16, 16), strength=0.8, num_inference_steps=3, **GUIDED)
    return flux_pipeline(FluxImg2ImgPipeline, flux_dit()), call


@pipeline("FluxInpaintPipeline")
def flux_inpaint() -> tuple[Any, Arguments]:
    from diffusers import FluxInpaintPipeline

    call = flux_call(
        image=picture(16, 16), mask_image=masked_half(16, 16), strength=0.8, num_inference_steps=3, **GUIDED
    )
    return flux_pipeline(FluxInpaintPipeline, flux_dit()), call


@pipeline("FluxFillPipeline")
def flux_fill() -> tuple[Any, Arguments]:
    from diffusers import FluxFillPipeline

    call = flux_call(image=picture(16, 16), mask_image=masked_half(16, 16))
    return flux_pipeline(FluxFillPipeline, flux_fill_dit()), call


@pipeline("FluxKontextPipeline")
def flux_kontext() -> tuple[Any, Arguments]:
    from diffusers import FluxKontextPipeline

    call = flux_call(image=picture(16, 16), max_area=16 * 16, _auto_resize=False, **GUIDED)
    return flux_pipeline(FluxKontextPipeline, flux_dit()), call


@pipeline("FluxKontextInpaintPipeline")
def flux_kontext_inpaint() -> tuple[Any, Arguments]:
    from diffusers import FluxKontextInpaintPipeline

    call = flux_call(
        image=picture(16, 16),
        mask_image=masked_half(16, 16),
        max_area=16 * 16,
        _auto_resize=False,
        **GUIDED,
    )
    return flux_pipeline(FluxKontextInpaintPipeline, flux_dit()), call


@pipeline("FluxPriorReduxPipeline")
def flux_prior_redux() -> tuple[Any, Arguments]:
    """It has no DiT: a picture's embedding goes to the DiT of another pipeline."""
    from diffusers import FluxPriorReduxPipeline
    from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
    from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    pipe = flux_pipeline(
        FluxPriorReduxPipeline,
        None,
        image_encoder=build(SiglipVisionModel, 102, config=vision),
        feature_extractor=SiglipImageProcessorPil(size={"height": 16, "width": 16}),
        image_embedder=build(ReduxImageEncoder, 103, redux_dim=16, txt_in_features=32),
    )
    return pipe, lambda: {"image": picture(16, 16), "prompt": "a cat"}
