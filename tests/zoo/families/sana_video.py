"""SANA-Video: text and image to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import vaes
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.gemma import gemma2, gemma_tokenizer
from tests.zoo.registry import Arguments, pipeline, transformer


def sana_video_transformer() -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return build(
        SanaVideoTransformer3DModel,
        87,
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        sample_size=4,
    )


@transformer("SanaVideoTransformer3DModel")
def sana_video() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
        }

    return sana_video_transformer(), call


def sana_video_assembled(pipeline_class: type, scheduler: Any) -> Any:
    return pipeline_class(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma2(32),
        vae=vaes.wan_vae(),
        transformer=sana_video_transformer(),
        scheduler=scheduler,
    )


_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "height": 32,
    "width": 32,
    "frames": 5,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": 16,
    "use_resolution_binning": False,
    "complex_human_instruction": None,
    "output_type": "np",
}


@pipeline("SanaVideoPipeline")
def sana_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import DPMSolverMultistepScheduler, SanaVideoPipeline

    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return sana_video_assembled(SanaVideoPipeline, scheduler), arguments(**_CALL)


@pipeline("SanaImageToVideoPipeline")
def sana_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SanaImageToVideoPipeline

    return sana_video_assembled(SanaImageToVideoPipeline, flow_scheduler()), arguments(**_CALL, image=picture())
