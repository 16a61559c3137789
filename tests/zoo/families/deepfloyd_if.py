"""DeepFloyd IF: UNets that work on pixels, the second one on a small picture, with T5 for the text."""

from __future__ import annotations

from typing import Any

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.text_encoders import t5_encoder
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, masked_half, picture
from tests.zoo.stable_diffusion import SIZE, TEXT

SMALL = 16
"""The side of what the first UNet paints; the second one's is twice that."""
FROM_IMAGE: dict[str, Any] = {"num_inference_steps": 3, "strength": 0.8}


def if_unet(seed: int = 101, **changes: Any) -> Any:
    """A `UNet2DConditionModel` that reads the text's embeddings for its time embedding, too."""
    from diffusers import UNet2DConditionModel

    config: dict[str, Any] = {
        "sample_size": SMALL,
        "layers_per_block": 1,
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "in_channels": 3,
        "out_channels": 6,
        "cross_attention_dim": 32,
        "encoder_hid_dim": 32,
        "attention_head_dim": 4,
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "resnet_time_scale_shift": "scale_shift",
        "act_fn": "gelu",
        "norm_num_groups": 4,
    }
    return build(UNet2DConditionModel, seed, **{**config, **changes})


def scheduler(**changes: Any) -> Any:
    """A `DDPMScheduler` with the noise of DeepFloyd IF."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(beta_schedule="squaredcos_cap_v2", thresholding=True, variance_type="learned_range", **changes)


def first_stage(pipeline_class: type, **more: Any) -> Any:
    """A pipeline that paints a small picture."""
    components = {
        "tokenizer": t5_tokenizer(77),
        "text_encoder": t5_encoder(32, num_layers=3),
        "unet": if_unet(),
        "scheduler": scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "watermarker": None,
        "requires_safety_checker": False,
    }
    return assemble(pipeline_class, components, **more)


def second_stage(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a small picture, made larger, and how much noise that was given."""
    unet = if_unet(seed=102, sample_size=2 * SMALL, in_channels=6, class_embed_type="timestep")
    noising = {"image_noising_scheduler": scheduler(prediction_type="epsilon")}
    return first_stage(pipeline_class, unet=unet, **noising)


LITTLE = picture(SMALL, SMALL, seed=1)
register_all(
    first_stage,
    {
        "IFPipeline": TEXT,
        "IFImg2ImgPipeline": {**TEXT, **FROM_IMAGE, "image": picture(SMALL, SMALL)},
        "IFInpaintingPipeline": {
            **TEXT,
            **FROM_IMAGE,
            "image": picture(SMALL, SMALL),
            "mask_image": masked_half(SMALL, SMALL),
        },
    },
)
register_all(
    second_stage,
    {
        "IFSuperResolutionPipeline": {**TEXT, **SIZE, "image": LITTLE, "noise_level": 50},
        "IFImg2ImgSuperResolutionPipeline": {
            **TEXT,
            **FROM_IMAGE,
            "image": LITTLE,
            "original_image": picture(),
            "noise_level": 50,
        },
        "IFInpaintingSuperResolutionPipeline": {
            **TEXT,
            **FROM_IMAGE,
            "image": LITTLE,
            "original_image": picture(),
            "mask_image": masked_half(),
            "noise_level": 50,
        },
    },
)
