"""DreamLite: a UNet that edits pictures, with guidance, and makes them from texts, without."""

from __future__ import annotations

from typing import Any

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, picture
from tests.zoo.processors import qwen3_vl_processor
from tests.zoo.registry import Arguments, pipeline


def dreamlite_unet() -> Any:
    """A `DreamLiteUNetModel` of three levels, the outer ones without self-attention."""
    from diffusers import DreamLiteUNetModel

    return build(
        DreamLiteUNetModel,
        261,
        sample_size=8,
        down_block_types=(
            "DreamLiteCrossAttnNoSelfAttnDownBlock2D",
            "DreamLiteCrossAttnNoSelfAttnDownBlock2D",
            "DreamLiteCrossAttnDownBlock2D",
        ),
        up_block_types=(
            "DreamLiteCrossAttnUpBlock2D",
            "DreamLiteCrossAttnNoSelfAttnUpBlock2D",
            "DreamLiteUpBlock2D",
        ),
        block_out_channels=(8, 16, 16),
        cross_attention_dim=16,
        attention_head_dim=2,
        layers_per_block=1,
        norm_num_groups=4,
    )


def dreamlite_pipeline(pipeline_class: Any) -> Any:
    """A DreamLite pipeline; its text encoder is Qwen 3 VL."""
    from diffusers import AutoencoderTiny

    vae = build(
        AutoencoderTiny,
        262,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
    )
    return pipeline_class(
        text_encoder=qwen3_vl(hidden=16, layers=4),
        tokenizer=qwen_tokenizer(),
        processor=qwen3_vl_processor(),
        vae=vae,
        unet=dreamlite_unet(),
        scheduler=flow_scheduler(),
    )


def dreamlite_call(**more: Any) -> Arguments:
    """What makes the arguments that both DreamLite pipelines take, and `more`."""
    return arguments(prompt="a small dog", height=32, width=32, num_inference_steps=2, output_type="np", **more)


@pipeline("DreamLitePipeline")
def dreamlite() -> tuple[Any, Arguments]:
    from diffusers import DreamLitePipeline

    return dreamlite_pipeline(DreamLitePipeline), dreamlite_call(
        negative_prompt="bad", guidance_scale=3.5, image=picture(32, 32), image_guidance_scale=1.5
    )


@pipeline("DreamLiteMobilePipeline")
def dreamlite_mobile() -> tuple[Any, Arguments]:
    from diffusers import DreamLiteMobilePipeline

    return dreamlite_pipeline(DreamLiteMobilePipeline), dreamlite_call()
