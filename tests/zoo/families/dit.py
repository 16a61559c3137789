"""DiT: class to image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def class_dit() -> Any:
    """A `DiTTransformer2DModel`, which reads the first block's time embedding again after the last block."""
    from diffusers import DiTTransformer2DModel

    return build(
        DiTTransformer2DModel,
        191,
        sample_size=8,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )


@transformer("DiTTransformer2DModel")
def dit_transformer() -> tuple[nn.Module, Arguments]:
    return class_dit(), lambda: {
        "hidden_states": normal(2, 4, 8, 8),
        "timestep": torch.tensor([500, 500]),
        "class_labels": torch.tensor([3, 1000]),
    }


@pipeline("DiTPipeline")
def dit() -> tuple[Any, Arguments]:
    from diffusers import DDIMScheduler, DiTPipeline

    pipe = DiTPipeline(transformer=class_dit(), vae=kl_vae(4, shift=None), scheduler=DDIMScheduler())
    return pipe, arguments(class_labels=[3], guidance_scale=4.0, num_inference_steps=2, output_type="np")
