"""Lumina Image 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.gemma import gemma2, gemma_tokenizer
from tests.zoo.registry import Arguments, pipeline, transformer


def lumina2_dit() -> Any:
    """A `Lumina2Transformer2DModel`: it runs the refiner of the text before that of the noise, then the layers."""
    from diffusers import Lumina2Transformer2DModel

    return build(
        Lumina2Transformer2DModel,
        seed=42,
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=4,
        num_refiner_layers=3,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(128, 64, 64),
        cap_feat_dim=16,
    )


@transformer("Lumina2Transformer2DModel")
def lumina2_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": torch.tensor([0.3, 0.3]),
            "encoder_hidden_states": normal(2, 5, 16, seed=1),
            "encoder_attention_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        }

    return lumina2_dit(), inputs


@pipeline("Lumina2Pipeline")
def lumina2() -> tuple[Any, Arguments]:
    from diffusers import Lumina2Pipeline

    pipe = Lumina2Pipeline(
        transformer=lumina2_dit(),
        scheduler=flow_scheduler(),
        vae=kl_vae(4),
        text_encoder=gemma2(16),
        tokenizer=gemma_tokenizer(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        system_prompt="Paint",
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=4.0,
        max_sequence_length=32,
        output_type="np",
    )
    return pipe, call
