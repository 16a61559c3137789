"""CogView 3 Plus and CogView 4: text to image, and with a control image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import t5_encoder
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.language_models import glm
from tests.zoo.registry import Arguments, pipeline, transformer
from tests.zoo.seeding import seeded


def cogview3_dit() -> Any:
    """A `CogView3PlusTransformer2DModel`."""
    from diffusers import CogView3PlusTransformer2DModel

    return build(
        CogView3PlusTransformer2DModel,
        171,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    )


def cogview4_dit(in_channels: int = 4) -> Any:
    """A `CogView4Transformer2DModel`; twice the input channels hold a control image."""
    from diffusers import CogView4Transformer2DModel

    return build(
        CogView4Transformer2DModel,
        172,
        patch_size=2,
        in_channels=in_channels,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )


def _arguments() -> dict[str, Any]:
    return {
        "hidden_states": normal(1, 4, 8, 8),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([500]),
        "original_size": torch.tensor([[16.0, 16.0]]),
        "target_size": torch.tensor([[16.0, 16.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
    }


@transformer("CogView3PlusTransformer2DModel")
def cogview3_transformer() -> tuple[nn.Module, Arguments]:
    return cogview3_dit(), _arguments


@transformer("CogView4Transformer2DModel")
def cogview4_transformer() -> tuple[nn.Module, Arguments]:
    return cogview4_dit(), _arguments


def cogview_call(**more: Any) -> Arguments:
    """What makes the arguments that all CogView pipelines take, and `more`."""
    return arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        max_sequence_length=16,
        output_type="np",
        **more,
    )


def cogview4_pipeline(pipeline_class: Any, dit: Any) -> Any:
    """A CogView 4 pipeline around `dit`, with GLM as its text encoder."""
    return pipeline_class(
        tokenizer=qwen_tokenizer(),
        text_encoder=glm(32),
        vae=kl_vae(4, shift=None),
        transformer=dit,
        scheduler=flow_scheduler(),
    )


@pipeline("CogView3PlusPipeline")
def cogview3_plus() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXDDIMScheduler, CogView3PlusPipeline

    pipe = CogView3PlusPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(32),
        vae=kl_vae(4, shift=None),
        transformer=cogview3_dit(),
        scheduler=CogVideoXDDIMScheduler(),
    )
    return pipe, cogview_call()


@pipeline("CogView4Pipeline")
def cogview4() -> tuple[Any, Arguments]:
    from diffusers import CogView4Pipeline

    return cogview4_pipeline(CogView4Pipeline, cogview4_dit()), cogview_call()


@pipeline("CogView4ControlPipeline")
def cogview4_control() -> tuple[Any, Arguments]:
    from diffusers import CogView4ControlPipeline

    pipe = cogview4_pipeline(CogView4ControlPipeline, cogview4_dit(in_channels=8))
    # The control image's latents are drawn without the generator.
    return pipe, seeded(cogview_call(control_image=picture(16, 16)))
