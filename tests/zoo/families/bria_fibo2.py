"""Bria FIBO 2: text to image and editing in one pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.tiny.vaes import flux2_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.processors import qwen3_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer


def bria_fibo2_dit(cap_feat_dim: int = 32) -> Any:
    """A `BriaFibo2Transformer2DModel`; two of its four blocks read the text encoder, too."""
    from diffusers import BriaFibo2Transformer2DModel

    return build(
        BriaFibo2Transformer2DModel,
        131,
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=4,
        n_refiner_layers=3,
        n_heads=2,
        cap_feat_dim=cap_feat_dim,
        injection_layer_ids=(1, 2),
        perceiver_num_layers=2,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=4,
        gist_min_text_len=4,
        gist_max_text_len=32,
        axes_dims=(4, 6, 6),
        axes_lens=(32, 16, 16),
    )


@transformer("BriaFibo2Transformer2DModel")
def bria_fibo2_transformer() -> tuple[nn.Module, Arguments]:
    return bria_fibo2_dit(), lambda: {
        "hidden_states": normal(1, 4, 8, 8),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": normal(1, 3, 12, 32, seed=1),
        "context_latents": [normal(1, 4, 4, 4, seed=2)],
    }


@pipeline("BriaFibo2Pipeline")
def bria_fibo2() -> tuple[Any, Arguments]:
    """It edits a picture, which both the text encoder and the DiT see."""
    from diffusers import BriaFibo2Pipeline

    pipe = BriaFibo2Pipeline(
        transformer=bria_fibo2_dit(cap_feat_dim=3 * 16),
        scheduler=flow_scheduler(),
        vae=flux2_vae(),
        text_encoder=qwen3_vl(hidden=16, layers=4),
        processor=qwen3_vl_processor(),
    )
    # Plain attributes: which of Qwen's layers the perceiver and the two injecting blocks read, and sizes of pictures.
    pipe.text_encoder_out_layers = ((1, 2, 3), (0, 1, 2), (2, 3, 4))
    pipe.default_sample_size, pipe.text_encoder_image_size = 8, 64
    call = arguments(
        prompt="make it a cat",
        image=picture(16, 16),
        negative_prompt="bad quality",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        output_type="np",
    )
    return pipe, call
