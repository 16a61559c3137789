"""Chroma: text to image, image to image and inpainting."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import t5_encoder
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, pipeline, transformer


def chroma_dit() -> Any:
    """A `ChromaTransformer2DModel`, whose modulations come from one small network and not from its blocks."""
    from diffusers import ChromaTransformer2DModel

    return build(
        ChromaTransformer2DModel,
        111,
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )


@transformer("ChromaTransformer2DModel")
def chroma_transformer() -> tuple[nn.Module, Arguments]:
    return chroma_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([0.5]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
        "attention_mask": torch.ones(1, 24, dtype=torch.bool),
    }


def chroma_pipeline(pipeline_class: Any) -> Any:
    """A Chroma pipeline, with a T5 text encoder."""
    return pipeline_class(
        scheduler=flow_scheduler(),
        vae=kl_vae(4),
        text_encoder=t5_encoder(32),
        tokenizer=t5_tokenizer(),
        transformer=chroma_dit(),
    )


def chroma_call(**more: Any) -> Arguments:
    """What makes the arguments that all Chroma pipelines take, and `more`."""
    common = {
        "prompt": "a cat",
        "negative_prompt": "bad",
        "height": 16,
        "width": 16,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
        "output_type": "np",
    }
    return arguments(**{**common, **more})


@pipeline("ChromaPipeline")
def chroma() -> tuple[Any, Arguments]:
    from diffusers import ChromaPipeline

    return chroma_pipeline(ChromaPipeline), chroma_call()


@pipeline("ChromaImg2ImgPipeline")
def chroma_img2img() -> tuple[Any, Arguments]:
    from diffusers import ChromaImg2ImgPipeline

    call = chroma_call(image=picture(16, 16), strength=0.8, num_inference_steps=3)
    return chroma_pipeline(ChromaImg2ImgPipeline), call


@pipeline("ChromaInpaintPipeline")
def chroma_inpaint() -> tuple[Any, Arguments]:
    from diffusers import ChromaInpaintPipeline

    call = chroma_call(image=picture(16, 16), mask_image=masked_half(16, 16), strength=0.8, num_inference_steps=3)
    pipe = chroma_pipeline(ChromaInpaintPipeline)
    # The pipeline asks for it; the model's constructor doesn't know it, checkpoints' configurations have it.
    pipe.transformer.register_to_config(guidance_embeds=False)
    return pipe, call
