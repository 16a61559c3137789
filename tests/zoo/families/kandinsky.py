"""Kandinsky 2.1: a prior makes a picture's embedding of the text, and a UNet the picture of both."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffusers_omni_offload.demo.tiny_wan import T5_VOCABULARY, t5_tokenizer
from tests.tiny.text_encoders import clip_text
from tests.tiny.tokenizers import clip_tokenizer
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, normal, picture
from tests.zoo.families.prior import prior_dit
from tests.zoo.image_encoders import clip_processor, clip_vision_projection
from tests.zoo.stable_diffusion import SIZE, TEXT, ddim_scheduler

EMBEDDING = 32
"""Width of the embeddings of texts and pictures."""
EMBEDDED: dict[str, Any] = {"image_embeds": normal(1, EMBEDDING), "negative_image_embeds": normal(1, EMBEDDING, seed=1)}
PRIOR: dict[str, Any] = {"prior_num_inference_steps": 2, "prior_guidance_scale": 3.0}
ONLY_PRIOR: dict[str, Any] = {name: TEXT[name] for name in ("prompt", "num_inference_steps", "guidance_scale")}
FROM_IMAGE: dict[str, Any] = {"image": picture(), "num_inference_steps": 3, "strength": 0.8}
MASKED: dict[str, Any] = {"image": picture(), "mask_image": np.tri(32, dtype=np.float32)}


def movq() -> Any:
    """A `VQModel` whose norms read the latents; it is twice smaller in space."""
    from diffusers import VQModel

    return build(
        VQModel,
        81,
        # The norms that read the latents have groups of 32 channels.
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        layers_per_block=1,
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=12,
        norm_num_groups=4,
        norm_type="spatial",
    )


def image_unet(seed: int = 82, **changes: Any) -> Any:
    """A `UNet2DConditionModel` that halves and doubles by residual blocks, and predicts noise and variance."""
    from diffusers import UNet2DConditionModel

    config: dict[str, Any] = {
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 8,
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "resnet_time_scale_shift": "scale_shift",
        "attention_head_dim": 4,
        "cross_attention_dim": EMBEDDING,
        "encoder_hid_dim": EMBEDDING,
        "norm_num_groups": 4,
    }
    return build(UNet2DConditionModel, seed, **{**config, **changes})


def prior_components(prefix: str = "") -> dict[str, Any]:
    """The components of a prior's pipeline, their names with a prefix."""
    from diffusers import UnCLIPScheduler

    components = {
        "prior": prior_dit(),
        "image_encoder": clip_vision_projection(EMBEDDING),
        "text_encoder": clip_text(True, projected=EMBEDDING, seed=13),
        "tokenizer": clip_tokenizer(),
        "scheduler": UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0),
        "image_processor": clip_processor(),
    }
    return {prefix + name: component for name, component in components.items()}


def multilingual_clip() -> Any:
    """A `MultilingualCLIP` for `t5_tokenizer`."""
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        transformerDimSize=EMBEDDING,
        imageDimSize=EMBEDDING,
        vocab_size=T5_VOCABULARY,
        hidden_size=EMBEDDING,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        max_position_embeddings=100,
        pad_token_id=0,
    )
    return build(MultilingualCLIP, 83, config=config)


def kandinsky(pipeline_class: type, in_channels: int = 4) -> Any:
    """A pipeline that needs the embedding of a picture, or makes it itself."""
    unet = image_unet(in_channels=in_channels, encoder_hid_dim_type="text_image_proj", addition_embed_type="text_image")
    components = {
        "unet": unet,
        "movq": movq(),
        "scheduler": ddim_scheduler(),
        "tokenizer": t5_tokenizer(77),
        "text_encoder": multilingual_clip(),
    }
    return assemble(pipeline_class, components, **prior_components("prior_"))


def inpainting(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a mask and a masked picture beside the latents."""
    return kandinsky(pipeline_class, in_channels=9)


def prior(pipeline_class: type) -> Any:
    """A pipeline that makes the embedding of a picture."""
    return assemble(pipeline_class, prior_components())


register_all(prior, {"KandinskyPriorPipeline": {**ONLY_PRIOR, "negative_prompt": "bad"}})
register_all(
    kandinsky,
    {
        "KandinskyPipeline": {**TEXT, **SIZE, **EMBEDDED},
        "KandinskyImg2ImgPipeline": {**TEXT, **SIZE, **EMBEDDED, **FROM_IMAGE},
        "KandinskyCombinedPipeline": {**TEXT, **SIZE, **PRIOR},
        "KandinskyImg2ImgCombinedPipeline": {**TEXT, **SIZE, **PRIOR, **FROM_IMAGE},
    },
)
register_all(
    inpainting,
    {
        "KandinskyInpaintPipeline": {**TEXT, **SIZE, **EMBEDDED, **MASKED},
        "KandinskyInpaintCombinedPipeline": {**TEXT, **SIZE, **PRIOR, **MASKED},
    },
)
