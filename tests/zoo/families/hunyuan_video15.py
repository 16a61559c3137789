"""HunyuanVideo 1.5: text and image to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen25_vl
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.image_encoders import siglip_vision
from tests.zoo.language_models import byt5_encoder
from tests.zoo.registry import Arguments, pipeline, transformer


def hunyuan_video15_transformer(task_type: str = "t2v") -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    return build(
        HunyuanVideo15Transformer3DModel,
        65,
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 6, 8),
        target_size=16,
        task_type=task_type,
    )


@transformer("HunyuanVideo15Transformer3DModel")
def hunyuan_video15() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 9, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 8, 32, seed=1),
            "encoder_attention_mask": (torch.arange(8) < 6)[None],
            "encoder_hidden_states_2": normal(1, 4, 32, seed=2),
            "encoder_attention_mask_2": (torch.arange(4) < 3)[None],
            "image_embeds": normal(1, 3, 12, seed=3),
        }

    return hunyuan_video15_transformer(), call


def hunyuan_video15_assembled(pipeline_class: type, task_type: str) -> Any:
    pipe = assemble(pipeline_class, hunyuan_video15_components(task_type))
    # Plain attributes: with a token a byte, the real ones would make a text of more than a thousand tokens.
    pipe.system_message, pipe.prompt_template_encode_start_idx = "Describe.", 24
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 64, 16
    return pipe


def hunyuan_video15_components(task_type: str) -> dict[str, Any]:
    from diffusers import AutoencoderKLHunyuanVideo15
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers import ByT5Tokenizer

    image_encoder, feature_extractor = siglip_vision(12)
    return {
        "text_encoder": qwen25_vl(32, 4).model.language_model,
        "tokenizer": qwen_tokenizer(),
        "transformer": hunyuan_video15_transformer(task_type),
        "vae": build(
            AutoencoderKLHunyuanVideo15,
            66,
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "scheduler": flow_scheduler(),
        "text_encoder_2": byt5_encoder(32),
        "tokenizer_2": ByT5Tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
        "image_encoder": image_encoder,
        "feature_extractor": feature_extractor,
    }


# The second text encoder reads what is quoted.
_CALL = {
    "prompt": 'a monkey holds a sign "hi"',
    "negative_prompt": "bad",
    "num_frames": 5,
    "num_inference_steps": 2,
    "output_type": "np",
}


@pipeline("HunyuanVideo15Pipeline")
def hunyuan_video15_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideo15Pipeline

    pipe = hunyuan_video15_assembled(HunyuanVideo15Pipeline, "t2v")
    return pipe, arguments(**_CALL, height=16, width=16)


@pipeline("HunyuanVideo15ImageToVideoPipeline")
def hunyuan_video15_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideo15ImageToVideoPipeline

    pipe = hunyuan_video15_assembled(HunyuanVideo15ImageToVideoPipeline, "i2v")
    return pipe, arguments(**_CALL, image=picture(16, 16))
