"""PRX, in latents and in pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.gemma import GEMMA_VOCABULARY, gemma_tokenizer
from tests.zoo.registry import Arguments, pipeline, transformer


def prx_dit(in_channels: int = 4, **config: Any) -> Any:
    """A `PRXTransformer2DModel`."""
    from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

    return build(
        PRXTransformer2DModel,
        seed=45,
        in_channels=in_channels,
        patch_size=2,
        context_in_dim=16,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=4,
        axes_dim=[8, 8],
        **config,
    )


@transformer("PRXTransformer2DModel")
def prx_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": torch.tensor([0.7, 0.7]),
            "encoder_hidden_states": normal(2, 5, 16, seed=1),
            "attention_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        }

    return prx_dit(), inputs


def t5gemma_encoder(hidden: int = 16) -> Any:
    """The encoder of a T5Gemma."""
    from transformers import T5GemmaConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    half = {
        "vocab_size": GEMMA_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "max_position_embeddings": 512,
    }
    config = T5GemmaConfig(encoder=half, decoder=half, vocab_size=GEMMA_VOCABULARY)
    return build(T5GemmaEncoder, seed=68, config=config.encoder)


def prx_call(**more: Any) -> Arguments:
    """What makes the arguments that both pipelines take, and `more`."""
    return arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=4.0,
        use_resolution_binning=False,
        output_type="np",
        **more,
    )


@pipeline("PRXPipeline")
def prx() -> tuple[Any, Arguments]:
    from diffusers import PRXPipeline

    pipe = PRXPipeline(
        transformer=prx_dit(),
        scheduler=flow_scheduler(),
        text_encoder=t5gemma_encoder(),
        tokenizer=gemma_tokenizer(),
        vae=kl_vae(4),
    )
    return pipe, prx_call(tokenizer_max_length=16)


@pipeline("PRXPixelPipeline")
def prx_pixel() -> tuple[Any, Arguments]:
    from diffusers import PRXPixelPipeline

    pipe = PRXPixelPipeline(
        transformer=prx_dit(in_channels=3, bottleneck_size=8, resolution_embeds=True),
        scheduler=flow_scheduler(),
        text_encoder=qwen3(16),
        tokenizer=qwen_tokenizer(),
        prompt_max_tokens=16,
    )
    return pipe, prx_call()
