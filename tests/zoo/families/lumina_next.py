"""Lumina-Next: text to image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import randomize_constants
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import normal
from tests.zoo.gemma import gemma_tokenizer
from tests.zoo.language_models import gemma
from tests.zoo.registry import Arguments, pipeline, transformer


def lumina_next_dit() -> Any:
    """A `LuminaNextDiT2DModel`."""
    from diffusers import LuminaNextDiT2DModel

    torch.manual_seed(251)
    model: Any = LuminaNextDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=4,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=32,
    )
    # diffusers leaves it uninitialized, and its forward doesn't use it.
    model.pad_token.data = normal(32)
    return randomize_constants(model, 251).eval()


@transformer("LuminaNextDiT2DModel")
def lumina_next_transformer() -> tuple[nn.Module, Arguments]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return lumina_next_dit(), lambda: {
        "hidden_states": normal(2, 4, 8, 8),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": normal(2, 8, 32, seed=1),
        "encoder_mask": (torch.arange(8) < 6).long().repeat(2, 1),
        "cross_attention_kwargs": {},
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 8, 8),
    }


@pipeline("LuminaPipeline")
def lumina_next() -> tuple[Any, Arguments]:
    from diffusers import LuminaPipeline

    pipe = LuminaPipeline(
        transformer=lumina_next_dit(),
        scheduler=flow_scheduler(),
        # The pipeline assumes that latents are 8 times smaller.
        vae=kl_vae(4, blocks=4, shift=None),
        text_encoder=gemma(32),
        tokenizer=gemma_tokenizer(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=4.0,
        clean_caption=False,
        max_sequence_length=16,
        output_type="np",
    )
    return pipe, call
