"""Latent consistency models: Stable Diffusion's UNet that is told the guidance scale and needs few steps."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import picture
from tests.zoo.stable_diffusion import SIZE, sd_components

CALL: dict[str, Any] = {"prompt": "A squirrel", "guidance_scale": 5.0, "output_type": "np"}


def latent_consistency(pipeline_class: type) -> Any:
    """A pipeline whose UNet has an embedding for the guidance scale."""
    from diffusers import LCMScheduler

    scheduler = LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    return assemble(pipeline_class, sd_components(time_cond_proj_dim=32), scheduler=scheduler)


register_all(
    latent_consistency,
    {
        "LatentConsistencyModelPipeline": {**CALL, **SIZE, "num_inference_steps": 2},
        "LatentConsistencyModelImg2ImgPipeline": {
            **CALL,
            "num_inference_steps": 2,
            "original_inference_steps": 10,
            "strength": 0.8,
            "image": picture(),
        },
    },
)
