"""HunyuanVideo: text and image to video, SkyReels, FramePack."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import QWEN_VOCABULARY, clip_tokenizer, qwen_tokenizer
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.image_encoders import clip_processor, siglip_vision
from tests.zoo.language_models import llama
from tests.zoo.registry import Arguments, pipeline, transformer

HUNYUAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 3,
    "num_single_layers": 4,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}


def hunyuan_video_transformer(**config: Any) -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    return build(HunyuanVideoTransformer3DModel, 60, **{**HUNYUAN, "in_channels": 4, "out_channels": 4, **config})


def framepack_transformer(**config: Any) -> Any:
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "has_image_proj": True, "image_proj_dim": 16}
    return build(
        HunyuanVideoFramepackTransformer3DModel, 61, **{**HUNYUAN, **sizes, "has_clean_x_embedder": True, **config}
    )


def hunyuan_arguments(frames: int = 2) -> dict[str, Any]:
    """One forward of either DiT, with a padded text."""
    return {
        "hidden_states": normal(1, 4, frames, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": normal(1, 8, 16, seed=1),
        "encoder_attention_mask": (torch.arange(8) < 6)[None],
        "pooled_projections": normal(1, 8, seed=2),
        "guidance": torch.tensor([6000.0]),
    }


@transformer("HunyuanVideoTransformer3DModel")
def hunyuan_video() -> tuple[Any, Arguments]:
    return hunyuan_video_transformer(), hunyuan_arguments


@transformer("HunyuanVideoFramepackTransformer3DModel")
def framepack() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            **hunyuan_arguments(),
            "image_embeds": normal(1, 3, 16, seed=3),
            "indices_latents": torch.arange(7, 9),
            "latents_clean": normal(1, 4, 2, 4, 4, seed=4),
            "indices_latents_clean": torch.tensor([0, 6]),
            "latents_history_2x": normal(1, 4, 2, 4, 4, seed=5),
            "indices_latents_history_2x": torch.arange(4, 6),
            "latents_history_4x": normal(1, 4, 4, 4, 4, seed=6),
            "indices_latents_history_4x": torch.arange(4),
        }

    return framepack_transformer(), call


def hunyuan_vae() -> Any:
    """8x smaller in space, 4x in time."""
    from diffusers import AutoencoderKLHunyuanVideo

    return build(
        AutoencoderKLHunyuanVideo,
        62,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def llava() -> Any:
    """A `LlavaForConditionalGeneration` that sees four patches a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=QWEN_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=258,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=262)
    config.pad_token_id = 256
    return build(LlavaForConditionalGeneration, 63, config=config)


def hunyuan_components(**more: Any) -> dict[str, Any]:
    return {
        "vae": hunyuan_vae(),
        "scheduler": flow_scheduler(),
        "text_encoder": llama(16, 4).model,
        "tokenizer": qwen_tokenizer(),
        "text_encoder_2": text_encoders.clip_text(False, hidden=8),
        "tokenizer_2": clip_tokenizer(),
        **more,
    }


HUNYUAN_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "prompt_template": {"template": "{}", "crop_start": 0},
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "true_cfg_scale": 3.0,
    "max_sequence_length": 32,
    "output_type": "np",
}


@pipeline("HunyuanVideoPipeline")
def hunyuan_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideoPipeline

    pipe = assemble(HunyuanVideoPipeline, hunyuan_components(transformer=hunyuan_video_transformer()))
    return pipe, arguments(**HUNYUAN_CALL)


@pipeline("HunyuanSkyreelsImageToVideoPipeline")
def hunyuan_skyreels_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HunyuanSkyreelsImageToVideoPipeline

    dit = hunyuan_video_transformer(in_channels=8)
    pipe = assemble(HunyuanSkyreelsImageToVideoPipeline, hunyuan_components(transformer=dit))
    return pipe, arguments(**HUNYUAN_CALL, image=picture())


@pipeline("HunyuanVideoImageToVideoPipeline")
def hunyuan_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideoImageToVideoPipeline

    dit = hunyuan_video_transformer(in_channels=9, guidance_embeds=False, image_condition_type="latent_concat")
    components = hunyuan_components(transformer=dit, text_encoder=llava(), image_processor=clip_processor(28))
    template = {"template": "{}", "crop_start": 0, "image_emb_len": 4, "image_emb_start": 5, "image_emb_end": 9}
    call = {**HUNYUAN_CALL, "prompt_template": template, "num_frames": 9}
    return assemble(HunyuanVideoImageToVideoPipeline, components), arguments(**call, image=picture())


@pipeline("HunyuanVideoFramepackPipeline")
def hunyuan_framepack_pipeline() -> tuple[Any, Arguments]:
    """Two sections, the last one first."""
    from diffusers import HunyuanVideoFramepackPipeline

    image_encoder, feature_extractor = siglip_vision(16)
    components = hunyuan_components(
        transformer=framepack_transformer(), image_encoder=image_encoder, feature_extractor=feature_extractor
    )
    pipe = assemble(HunyuanVideoFramepackPipeline, components)
    return pipe, arguments(**{**HUNYUAN_CALL, "num_frames": 10}, image=picture(), latent_window_size=3)
