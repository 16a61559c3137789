"""AuraFlow: text to image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer, umt5_encoder
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def aura_flow_dit() -> Any:
    """An `AuraFlowTransformer2DModel`: two stacks, of joint and of single blocks."""
    from diffusers import AuraFlowTransformer2DModel

    return build(
        AuraFlowTransformer2DModel,
        181,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=3,
        num_single_dit_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    )


@transformer("AuraFlowTransformer2DModel")
def aura_flow_transformer() -> tuple[nn.Module, Arguments]:
    return aura_flow_dit(), lambda: {
        "hidden_states": normal(2, 4, 8, 8),
        "encoder_hidden_states": normal(2, 8, 32, seed=1),
        "timestep": torch.tensor([0.5, 0.5]),
    }


@pipeline("AuraFlowPipeline")
def aura_flow() -> tuple[Any, Arguments]:
    from diffusers import AuraFlowPipeline

    pipe = AuraFlowPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(32),
        vae=kl_vae(4, shift=None),
        transformer=aura_flow_dit(),
        scheduler=flow_scheduler(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=3.5,
        max_sequence_length=16,
        output_type="np",
    )
    return pipe, call
