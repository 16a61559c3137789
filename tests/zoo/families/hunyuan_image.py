"""HunyuanImage 2.1: text to image, and its refiner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen25_vl
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.language_models import byt5_encoder
from tests.zoo.registry import Arguments, pipeline, transformer


def hunyuan_image_dit() -> Any:
    """A `HunyuanImageTransformer2DModel` for the embeddings of Qwen 2.5 VL and of ByT5."""
    from diffusers import HunyuanImageTransformer2DModel

    return build(
        HunyuanImageTransformer2DModel,
        151,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_single_layers=4,
        num_refiner_layers=2,
        patch_size=(1, 1),
        text_embed_dim=32,
        text_embed_2_dim=32,
        rope_axes_dim=(8, 8),
    )


@transformer("HunyuanImageTransformer2DModel")
def hunyuan_image_transformer() -> tuple[nn.Module, Arguments]:
    return hunyuan_image_dit(), lambda: {
        "hidden_states": normal(1, 4, 6, 6),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": normal(1, 10, 32, seed=1),
        "encoder_attention_mask": (torch.arange(10) < 7).long()[None],
        "encoder_hidden_states_2": normal(1, 6, 32, seed=2),
        "encoder_attention_mask_2": (torch.arange(6) < 4).long()[None],
    }


def refiner_dit() -> Any:
    """A `HunyuanImageTransformer2DModel` for the refiner: one frame of latents beside those of the picture."""
    from diffusers import HunyuanImageTransformer2DModel

    return build(
        HunyuanImageTransformer2DModel,
        152,
        in_channels=16,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_single_layers=4,
        num_refiner_layers=2,
        patch_size=(1, 1, 1),
        guidance_embeds=True,
        text_embed_dim=32,
        rope_axes_dim=(4, 6, 6),
    )


def mixed_guider() -> Any:
    """The guider of HunyuanImage: plain guidance in the first step, projected guidance after it."""
    from diffusers.guiders import AdaptiveProjectedMixGuidance

    return AdaptiveProjectedMixGuidance(guidance_scale=3.5, adaptive_projected_guidance_start_step=1)


@pipeline("HunyuanImagePipeline")
def hunyuan_image() -> tuple[Any, Arguments]:
    from diffusers import AutoencoderKLHunyuanImage, HunyuanImagePipeline
    from transformers import ByT5Tokenizer

    vae = build(
        AutoencoderKLHunyuanImage,
        153,
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=32,
        scaling_factor=0.75,
    )
    pipe = HunyuanImagePipeline(
        scheduler=flow_scheduler(),
        vae=vae,
        text_encoder=qwen25_vl(32),
        tokenizer=qwen_tokenizer(),
        text_encoder_2=byt5_encoder(32),
        tokenizer_2=ByT5Tokenizer(),
        transformer=hunyuan_image_dit(),
        guider=mixed_guider(),
        ocr_guider=mixed_guider(),
    )
    # Plain attributes: the stock template has some 170 bytes, which are as many tokens here.
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "<|im_start|>{}<|im_end|>", 1
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = 32
    # What is in quotes goes to ByT5.
    call = arguments(
        prompt='a sign that says "hi"',
        negative_prompt="bad",
        height=32,
        width=32,
        num_inference_steps=2,
        output_type="np",
    )
    return pipe, call


@pipeline("HunyuanImageRefinerPipeline")
def hunyuan_image_refiner() -> tuple[Any, Arguments]:
    from diffusers import AutoencoderKLHunyuanImageRefiner, HunyuanImageRefinerPipeline

    vae = build(
        AutoencoderKLHunyuanImageRefiner,
        154,
        latent_channels=4,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    pipe = HunyuanImageRefinerPipeline(
        scheduler=flow_scheduler(),
        vae=vae,
        text_encoder=qwen25_vl(32),
        tokenizer=qwen_tokenizer(),
        transformer=refiner_dit(),
        guider=mixed_guider(),
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "<|im_start|>{}<|im_end|>", 1
    pipe.tokenizer_max_length = 32
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        image=picture(16, 16),
        height=16,
        width=16,
        num_inference_steps=2,
        output_type="np",
    )
    return pipe, call
