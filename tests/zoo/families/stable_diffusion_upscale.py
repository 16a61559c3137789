"""Stable Diffusion's upscalers, and UnCLIP: UNets that are told more than the time and the text."""

from __future__ import annotations

from typing import Any

from tests.tiny.text_encoders import clip_text
from tests.tiny.tokenizers import clip_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, picture
from tests.zoo.families.prior import prior_dit
from tests.zoo.image_encoders import clip_processor, clip_vision_projection
from tests.zoo.stable_diffusion import SIZE, TEXT, sd_components

EMBEDDING = 32
"""Width of CLIP's embeddings of texts and pictures."""


def latent_upscaler(pipeline_class: type) -> Any:
    """A pipeline that doubles a picture in size; its UNet has no middle block."""
    from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

    unet = build(
        UNet2DConditionModel,
        61,
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        # Its norms have groups of 32 channels; its last two widths are equal, and twice the first.
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        time_cond_proj_dim=128 + EMBEDDING,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=EMBEDDING,
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        in_channels=8,
        mid_block_type=None,
        only_cross_attention=False,
        out_channels=5,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
    )
    return assemble(
        pipeline_class, sd_components(), unet=unet, scheduler=EulerDiscreteScheduler(prediction_type="sample")
    )


def upscaler(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a small picture beside the latents, and how much noise that was given."""
    from diffusers import DDPMScheduler

    return assemble(
        pipeline_class,
        sd_components(in_channels=7, num_class_embeds=1000),
        vae=kl_vae(4, blocks=3, shift=None, scaling=0.18215, quant=True),
        low_res_scheduler=DDPMScheduler(),
        max_noise_level=350,
    )


def unclip(pipeline_class: type) -> Any:
    """A pipeline whose UNet is told CLIP's embedding of a picture, which a prior makes or an encoder."""
    from diffusers import DDPMScheduler
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

    components = sd_components(class_embed_type="projection", projection_class_embeddings_input_dim=2 * EMBEDDING)
    return assemble(
        pipeline_class,
        components,
        prior_tokenizer=clip_tokenizer(),
        prior_text_encoder=clip_text(True, projected=EMBEDDING, seed=13),
        prior=prior_dit(),
        prior_scheduler=DDPMScheduler(
            variance_type="fixed_small_log",
            prediction_type="sample",
            clip_sample=True,
            clip_sample_range=5.0,
            beta_schedule="squaredcos_cap_v2",
        ),
        feature_extractor=clip_processor(),
        image_encoder=clip_vision_projection(EMBEDDING),
        image_normalizer=build(StableUnCLIPImageNormalizer, 63, embedding_dim=EMBEDDING),
        image_noising_scheduler=DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    )


register_all(latent_upscaler, {"StableDiffusionLatentUpscalePipeline": {**TEXT, "image": picture(16, 16)}})
register_all(upscaler, {"StableDiffusionUpscalePipeline": {**TEXT, "image": picture(16, 16), "noise_level": 20}})
register_all(
    unclip,
    {
        "StableUnCLIPPipeline": {**TEXT, **SIZE, "prior_num_inference_steps": 2},
        "StableUnCLIPImg2ImgPipeline": {**TEXT, **SIZE, "image": picture()},
    },
)
