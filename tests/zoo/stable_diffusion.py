"""What the families of Stable Diffusion share: UNet, scheduler, components and arguments of a call."""

from __future__ import annotations

from typing import Any

from tests.tiny.text_encoders import clip_text
from tests.tiny.tokenizers import clip_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.building import build, masked_half, picture

TEXT: dict[str, Any] = {
    "prompt": "A squirrel",
    "negative_prompt": "bad",
    "num_inference_steps": 2,
    "guidance_scale": 5.0,
    "output_type": "np",
}
SIZE: dict[str, Any] = {"height": 32, "width": 32}
# Two steps of three: the picture is kept in part.
FROM_IMAGE: dict[str, Any] = {**TEXT, "num_inference_steps": 3, "strength": 0.8, "image": picture()}
INPAINT: dict[str, Any] = {**FROM_IMAGE, **SIZE, "mask_image": masked_half()}
CONTROL: dict[str, Any] = {"controlnet_conditioning_scale": 0.5}
CONTROL_IMAGE: dict[str, Any] = {**CONTROL, "control_image": picture(seed=1)}
PERTURBED: dict[str, Any] = {"pag_applied_layers": ["down", "mid", "up"]}
"""Perturbed attention guidance replaces attention processors in every block."""


def ddim_scheduler() -> Any:
    """A `DDIMScheduler` with the noise of Stable Diffusion."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )


def sd_unet(seed: int = 42, **changes: Any) -> Any:
    """A `UNet2DConditionModel` of the shape of Stable Diffusion 1: two blocks with cross attention and a plain one."""
    from diffusers import UNet2DConditionModel

    config: dict[str, Any] = {
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": 2,
        "cross_attention_dim": 32,
        "norm_num_groups": 4,
    }
    return build(UNet2DConditionModel, seed, **{**config, **changes})


def sd_components(**unet_changes: Any) -> dict[str, Any]:
    """The components of a `StableDiffusionPipeline` without safety checker, whose UNet differs in `unet_changes`."""
    return {
        "unet": sd_unet(**unet_changes),
        "vae": kl_vae(4, shift=None, scaling=0.18215, quant=True),
        "text_encoder": clip_text(False),
        "tokenizer": clip_tokenizer(),
        "scheduler": ddim_scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
