"""Motif-Video: text and image to video."""

from __future__ import annotations

from typing import Any

import torch
from transformers import SiglipImageProcessorPil

from tests.tiny import vaes
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.gemma import gemma_tokenizer, t5gemma2_encoder
from tests.zoo.registry import Arguments, pipeline, transformer


def motif_video_transformer() -> Any:
    """The last two of its five single blocks are the decoder."""
    from diffusers import MotifVideoTransformer3DModel

    return build(
        MotifVideoTransformer3DModel,
        85,
        in_channels=33,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_single_layers=5,
        num_decoder_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )


@transformer("MotifVideoTransformer3DModel")
def motif_video() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 33, 2, 4, 4),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "image_embeds": normal(1, 4, 16, seed=2),
        }

    return motif_video_transformer(), call


class HostImageProcessor(SiglipImageProcessorPil):
    """It takes pictures from the device, too, as the processor does that needs torchvision."""

    def preprocess(self, images: Any, **options: Any) -> Any:
        return super().preprocess(images.cpu() if isinstance(images, torch.Tensor) else images, **options)


def motif_video_components() -> dict[str, Any]:
    from diffusers.guiders import ClassifierFreeGuidance

    return {
        "scheduler": flow_scheduler(),
        "vae": vaes.wan_vae(),
        "text_encoder": t5gemma2_encoder(32),
        "tokenizer": gemma_tokenizer(),
        "transformer": motif_video_transformer(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
        "feature_extractor": HostImageProcessor(size={"height": 28, "width": 28}),
    }


_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "max_sequence_length": 16,
    "output_type": "np",
}


@pipeline("MotifVideoPipeline")
def motif_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import MotifVideoPipeline

    return assemble(MotifVideoPipeline, motif_video_components()), arguments(**_CALL)


@pipeline("MotifVideoImage2VideoPipeline")
def motif_video_image_to_video_pipeline() -> tuple[Any, Arguments]:
    """It calls the vision tower of its text encoder, not the text encoder, for the picture."""
    from diffusers import MotifVideoImage2VideoPipeline

    pipe = assemble(MotifVideoImage2VideoPipeline, motif_video_components())
    return pipe, arguments(**_CALL, image=picture())
