"""HiDream: text to image with four text encoders, and a mixture of experts in each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import clip_text, t5_encoder
from tests.tiny.tokenizers import clip_tokenizer, qwen_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.language_models import llama
from tests.zoo.registry import Arguments, pipeline, transformer


def hidream_dit() -> Any:
    """A `HiDreamImageTransformer2DModel`, each of whose blocks reads a layer of Llama."""
    from diffusers import HiDreamImageTransformer2DModel

    return build(
        HiDreamImageTransformer2DModel,
        161,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[32, 32],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(16, 16),
        llama_layers=[0, 1, 2, 0, 1, 2],
    )


@transformer("HiDreamImageTransformer2DModel")
def hidream_transformer() -> tuple[nn.Module, Arguments]:
    return hidream_dit(), lambda: {
        "hidden_states": normal(1, 4, 8, 8),
        "timesteps": torch.tensor([500.0]),
        "encoder_hidden_states_t5": normal(1, 8, 32, seed=1),
        "encoder_hidden_states_llama3": normal(3, 1, 8, 32, seed=2),
        "pooled_embeds": normal(1, 64, seed=3),
    }


@pipeline("HiDreamImagePipeline")
def hidream() -> tuple[Any, Arguments]:
    from diffusers import HiDreamImagePipeline

    pipe = HiDreamImagePipeline(
        scheduler=flow_scheduler(),
        vae=kl_vae(4),
        text_encoder=clip_text(True, seed=3),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(True, seed=13),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(32),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=llama(hidden=32, layers=3),
        tokenizer_4=qwen_tokenizer(),
        transformer=hidream_dit(),
    )
    # A plain attribute: pictures are scaled to this many latent pixels a side.
    pipe.default_sample_size = 8
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        max_sequence_length=16,
        output_type="np",
    )
    return pipe, call
