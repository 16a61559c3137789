"""PixArt-Alpha and PixArt-Sigma."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.text_encoders import t5_encoder
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def pixart_dit() -> Any:
    """A `PixArtTransformer2DModel` that predicts the variance, too."""
    from diffusers import PixArtTransformer2DModel

    return build(
        PixArtTransformer2DModel,
        seed=41,
        sample_size=8,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        use_additional_conditions=False,
    )


@transformer("PixArtTransformer2DModel")
def pixart_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 32, seed=1),
            "encoder_attention_mask": torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
            "timestep": torch.tensor([700, 700]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }

    return pixart_dit(), inputs


def pixart_pipeline(pipeline_class: type, **more: Any) -> tuple[Any, Arguments]:
    """A pipeline of PixArt's components and of `more`, and what makes its arguments."""
    from diffusers import DDIMScheduler

    components = {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(32),
        "vae": kl_vae(4, shift=None),
        "transformer": pixart_dit(),
        "scheduler": DDIMScheduler(),
    }
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=4.5,
        max_sequence_length=16,
        clean_caption=False,
        use_resolution_binning=False,
        output_type="np",
    )
    return assemble(pipeline_class, components, **more), call


@pipeline("PixArtAlphaPipeline")
def pixart_alpha() -> tuple[Any, Arguments]:
    from diffusers import PixArtAlphaPipeline

    return pixart_pipeline(PixArtAlphaPipeline)


@pipeline("PixArtSigmaPipeline")
def pixart_sigma() -> tuple[Any, Arguments]:
    from diffusers import PixArtSigmaPipeline

    return pixart_pipeline(PixArtSigmaPipeline)


@pipeline("PixArtSigmaPAGPipeline")
def pixart_sigma_pag() -> tuple[Any, Arguments]:
    from diffusers import PixArtSigmaPAGPipeline

    return pixart_pipeline(PixArtSigmaPAGPipeline, pag_applied_layers=["blocks.1", "blocks.3"])
