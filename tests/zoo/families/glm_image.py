"""GLM-Image: an autoregressive model makes image tokens, a DiT paints them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import QWEN_TEMPLATE, QWEN_VOCABULARY, qwen_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.language_models import byt5_encoder
from tests.zoo.registry import Arguments, pipeline, transformer


def glm_image_dit(codebook: int = 32) -> Any:
    """A `GlmImageTransformer2DModel`."""
    from diffusers import GlmImageTransformer2DModel

    return build(
        GlmImageTransformer2DModel,
        201,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=codebook,
    )


@transformer("GlmImageTransformer2DModel")
def glm_image_transformer() -> tuple[nn.Module, Arguments]:
    return glm_image_dit(), lambda: {
        "hidden_states": normal(1, 4, 8, 8),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "prior_token_id": torch.arange(16)[None] * 2,
        "prior_token_drop": torch.zeros(1, 16, dtype=torch.bool),
        "timestep": torch.tensor([500]),
        "target_size": torch.tensor([[16.0, 16.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
    }


def glm_image_writer(codebook: int = 32) -> Any:
    """A `GlmImageForConditionalGeneration`, which writes image tokens."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig(
        text_config={
            "vocab_size": QWEN_VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vision_vocab_size": codebook,
            "rope_parameters": {"mrope_section": (4, 2, 2)},
            "pad_token_id": 256,
            # Beyond the image tokens: it never ends early.
            "eos_token_id": 263,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "intermediate_size": 32,
        },
        vq_config={"embed_dim": 32, "num_embeddings": codebook, "latent_channels": 32},
        image_token_id=262,
        image_start_token_id=256,
        image_end_token_id=261,
    )
    return build(GlmImageForConditionalGeneration, 202, config=config)


def glm_image_processor() -> Any:
    """A `GlmImageProcessor` over the Qwen tokenizer, with Qwen's special tokens in the place of GLM's."""
    from transformers import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    class SmallPreviewProcessor(GlmImageProcessor):
        """Asks for a preview of four tokens before the image, not of some 256."""

        def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
            rows, columns, _, _ = super()._get_target_shape(height, width)
            return rows, columns, 2, 2

    tokenizer = qwen_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.image_token = "<|image_pad|>"
    tokenizer.grid_bos_token = "<|vision_start|>"
    tokenizer.grid_eos_token = "<|vision_end|>"
    return SmallPreviewProcessor(
        image_processor=GlmImageImageProcessorPil(), tokenizer=tokenizer, chat_template=QWEN_TEMPLATE
    )


def glm_image_vae() -> Any:
    """An `AutoencoderKL` that is 8 times smaller in space, with the statistics of its latents."""
    from diffusers import AutoencoderKL

    return build(
        AutoencoderKL,
        203,
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        sample_size=64,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


@pipeline("GlmImagePipeline")
def glm_image() -> tuple[Any, Arguments]:
    """Without a picture: this diffusers can't read what this transformers makes of one."""
    from diffusers import GlmImagePipeline
    from transformers import ByT5Tokenizer

    pipe = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=glm_image_processor(),
        text_encoder=byt5_encoder(32),
        vision_language_encoder=glm_image_writer(),
        vae=glm_image_vae(),
        transformer=glm_image_dit(),
        scheduler=flow_scheduler(),
    )
    # What is in quotes goes to ByT5.
    call = arguments(
        prompt='a sign that says "hi"',
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=1.5,
        output_type="np",
    )
    return pipe, call
