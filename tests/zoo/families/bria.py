"""Bria 3.2 and Bria FIBO: text to image and editing."""

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
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.language_models import smollm3
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, pipeline, transformer


def bria_dit() -> Any:
    """A `BriaTransformer2DModel`: two stacks, of double and of single blocks."""
    from diffusers import BriaTransformer2DModel

    return build(
        BriaTransformer2DModel,
        121,
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def bria_fibo_dit(in_channels: int = 16) -> Any:
    """A `BriaFiboTransformer2DModel`, each of whose blocks reads a layer of the text encoder."""
    from diffusers import BriaFiboTransformer2DModel

    return build(
        BriaFiboTransformer2DModel,
        122,
        patch_size=1,
        in_channels=in_channels,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=[4, 4, 8],
        text_encoder_dim=32,
    )


@transformer("BriaTransformer2DModel")
def bria_transformer() -> tuple[nn.Module, Arguments]:
    return bria_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([500.0]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


@transformer("BriaFiboTransformer2DModel")
def bria_fibo_transformer() -> tuple[nn.Module, Arguments]:
    return bria_fibo_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 64, seed=1),
        "text_encoder_layers": [normal(1, 8, 32, seed=layer) for layer in range(7)],
        "timestep": torch.tensor([500.0]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


def fibo_vae() -> Any:
    """An `AutoencoderKLWan` that is 16 times smaller in space, as Bria FIBO's pipelines assume."""
    from diffusers import AutoencoderKLWan

    return build(
        AutoencoderKLWan,
        123,
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, False, True, True],
    )


def fibo_pipeline(pipeline_class: Any) -> Any:
    """A Bria FIBO pipeline: its DiT has more blocks than its text encoder has layers, so the last one is repeated."""
    return pipeline_class(
        transformer=bria_fibo_dit(),
        scheduler=flow_scheduler(),
        vae=fibo_vae(),
        text_encoder=smollm3(hidden=32, layers=4),
        tokenizer=qwen_tokenizer(),
    )


COMMON = {"num_inference_steps": 2, "guidance_scale": 5.0, "max_sequence_length": 32, "output_type": "np"}


@pipeline("BriaPipeline")
def bria() -> tuple[Any, Arguments]:
    from diffusers import BriaPipeline

    pipe = BriaPipeline(
        transformer=bria_dit(),
        scheduler=flow_scheduler(),
        vae=kl_vae(4),
        text_encoder=t5_encoder(32),
        tokenizer=t5_tokenizer(),
    )
    return pipe, arguments(prompt="a cat", negative_prompt="bad", height=16, width=16, **COMMON)


@pipeline("BriaFiboPipeline")
def bria_fibo() -> tuple[Any, Arguments]:
    from diffusers import BriaFiboPipeline

    call = arguments(prompt="a cat", negative_prompt="bad", height=64, width=64, **COMMON)
    return fibo_pipeline(BriaFiboPipeline), call


@pipeline("BriaFiboEditPipeline")
def bria_fibo_edit() -> tuple[Any, Arguments]:
    from diffusers import BriaFiboEditPipeline

    call = arguments(
        prompt='{"edit_instruction": "a dog"}',
        negative_prompt="bad",
        image=picture(64, 64),
        mask=masked_half(64, 64),
        height=64,
        width=64,
        **COMMON,
    )
    return fibo_pipeline(BriaFiboEditPipeline), call
