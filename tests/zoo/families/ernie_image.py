"""ERNIE-Image: text to image, with a prompt enhancer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import mistral3
from tests.tiny.tokenizers import mistral_tokenizer
from tests.tiny.vaes import flux2_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.language_models import ministral3
from tests.zoo.registry import Arguments, pipeline, transformer
from tests.zoo.seeding import seeded


def ernie_image_dit() -> Any:
    """An `ErnieImageTransformer2DModel`, whose blocks share one modulation."""
    from diffusers import ErnieImageTransformer2DModel

    return build(
        ErnieImageTransformer2DModel,
        211,
        hidden_size=32,
        num_attention_heads=2,
        num_layers=4,
        ffn_hidden_size=64,
        in_channels=16,
        out_channels=16,
        patch_size=1,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )


@transformer("ErnieImageTransformer2DModel")
def ernie_image_transformer() -> tuple[nn.Module, Arguments]:
    return ernie_image_dit(), lambda: {
        "hidden_states": normal(2, 16, 4, 4),
        "timestep": torch.tensor([500.0, 500.0]),
        "text_bth": normal(2, 8, 16, seed=1),
        "text_lens": torch.tensor([8, 5]),
    }


@pipeline("ErnieImagePipeline")
def ernie_image() -> tuple[Any, Arguments]:
    """With its prompt enhancer, a language model that rewrites the prompt."""
    from diffusers import ErnieImagePipeline

    enhancer_tokenizer = mistral_tokenizer()
    # As many tokens as the enhancer writes.
    enhancer_tokenizer.model_max_length = 6
    pipe = ErnieImagePipeline(
        transformer=ernie_image_dit(),
        vae=flux2_vae(),
        text_encoder=mistral3(hidden=16).model,
        tokenizer=mistral_tokenizer(),
        scheduler=flow_scheduler(),
        pe=ministral3(16),
        pe_tokenizer=enhancer_tokenizer,
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=4.0,
        output_type="np",
    )
    # The enhancer draws its tokens without the generator.
    return pipe, seeded(call)
