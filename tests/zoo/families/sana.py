"""Sana, Sana Sprint and Sana ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.gemma import gemma2, gemma_tokenizer
from tests.zoo.registry import Arguments, pipeline, transformer


def sana_dit(guidance_embeds: bool = False, qk_norm: str | None = None, num_layers: int = 4) -> Any:
    """A `SanaTransformer2DModel`; Sprint's has an embedding of the guidance and normalised queries and keys."""
    from diffusers import SanaTransformer2DModel

    return build(
        SanaTransformer2DModel,
        seed=40,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=32,
        guidance_embeds=guidance_embeds,
        qk_norm=qk_norm,
    )


@transformer("SanaTransformer2DModel")
def sana_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 16, seed=1),
            "encoder_attention_mask": torch.ones(2, 5),
            "timestep": torch.tensor([700.0, 700.0]),
        }

    return sana_dit(), inputs


def sana_controlnet() -> Any:
    """A `SanaControlNetModel` of three blocks, which are added to the DiT's first ones."""
    from diffusers import SanaControlNetModel

    return build(
        SanaControlNetModel,
        seed=61,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=32,
    )


def dc_vae(latent_channels: int = 4) -> Any:
    """An `AutoencoderDC` that is 4x smaller in space."""
    from diffusers import AutoencoderDC

    return build(
        AutoencoderDC,
        seed=62,
        latent_channels=latent_channels,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )


def sana_pipeline(pipeline_class: type, **more: Any) -> Any:
    """A pipeline of Sana's components and of `more`."""
    components = {
        "tokenizer": gemma_tokenizer(),
        "text_encoder": gemma2(16),
        "vae": dc_vae(),
        "transformer": sana_dit(),
        "scheduler": flow_scheduler(),
    }
    return assemble(pipeline_class, {**components, **more})


def sana_call(**more: Any) -> Arguments:
    """What makes the arguments that all Sana pipelines take, and `more`."""
    return arguments(
        prompt="a cat",
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=4.5,
        max_sequence_length=16,
        complex_human_instruction=["Describe it"],
        use_resolution_binning=False,
        output_type="np",
        **more,
    )


@pipeline("SanaPipeline")
def sana() -> tuple[Any, Arguments]:
    from diffusers import SanaPipeline

    return sana_pipeline(SanaPipeline), sana_call(negative_prompt="bad")


@pipeline("SanaPAGPipeline")
def sana_pag() -> tuple[Any, Arguments]:
    from diffusers import SanaPAGPipeline

    pipe = sana_pipeline(SanaPAGPipeline, pag_applied_layers=["transformer_blocks.1", "transformer_blocks.3"])
    return pipe, sana_call(negative_prompt="bad", pag_scale=3.0)


@pipeline("SanaControlNetPipeline")
def sana_with_controlnet() -> tuple[Any, Arguments]:
    from diffusers import SanaControlNetPipeline

    pipe = sana_pipeline(SanaControlNetPipeline, controlnet=sana_controlnet())
    return pipe, sana_call(negative_prompt="bad", control_image=picture(), controlnet_conditioning_scale=0.7)


def sprint_parts() -> dict[str, Any]:
    """What Sprint has of its own: a DiT that is told the guidance, and a scheduler of consistency models."""
    from diffusers import SCMScheduler

    return {"transformer": sana_dit(guidance_embeds=True, qk_norm="rms_norm_across_heads"), "scheduler": SCMScheduler()}


@pipeline("SanaSprintPipeline")
def sana_sprint() -> tuple[Any, Arguments]:
    from diffusers import SanaSprintPipeline

    return sana_pipeline(SanaSprintPipeline, **sprint_parts()), sana_call()


@pipeline("SanaSprintImg2ImgPipeline")
def sana_sprint_img2img() -> tuple[Any, Arguments]:
    from diffusers import SanaSprintImg2ImgPipeline

    pipe = sana_pipeline(SanaSprintImg2ImgPipeline, **sprint_parts())
    return pipe, sana_call(image=picture(), strength=0.9, max_timesteps=1.2, intermediate_timesteps=0.8)
