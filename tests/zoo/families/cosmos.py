"""Cosmos 1, 2 and 2.5: worlds from texts, pictures and videos."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders, vaes
from tests.tiny.pipelines import unipc_scheduler
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.clips import clip
from tests.zoo.registry import Arguments, pipeline, transformer


def cosmos_transformer(in_channels: int = 16, **config: Any) -> Any:
    """Without the padding mask, whose resizing needs torchvision."""
    from diffusers import CosmosTransformer3DModel

    sizes: dict[str, Any] = {
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 4,
        "mlp_ratio": 2.0,
        "text_embed_dim": 32,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
    }
    return build(CosmosTransformer3DModel, 80, **{**sizes, "in_channels": in_channels, **config})


@transformer("CosmosTransformer3DModel")
def cosmos() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "attention_mask": (torch.arange(16) < 12)[None],
            "fps": 30,
        }

    return cosmos_transformer(), call


class HarmlessChecker(ModelMixin, ConfigMixin):
    """In place of the safety checker, whose package isn't needed here: it looks, and everything is harmless."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray | None:
        scores = self.head(torch.as_tensor(frames / 255, device=self.device, dtype=self.dtype))
        return frames if bool(scores.isfinite().all()) else None


def cosmos_vae() -> Any:
    """8x smaller in space, 4x in time."""
    from diffusers import AutoencoderKLCosmos

    return build(
        AutoencoderKLCosmos,
        82,
        latent_channels=16,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )


def cosmos_components(vae: Any, scheduler: Any, **dit: Any) -> dict[str, Any]:
    return {
        "text_encoder": text_encoders.t5_encoder(32),
        "tokenizer": t5_tokenizer(),
        "transformer": cosmos_transformer(**dit),
        "vae": vae,
        "scheduler": scheduler,
        "safety_checker": build(HarmlessChecker, 83),
    }


# To those that continue a clip one frame is given: a clip as long as the video leaves nothing to denoise.
COSMOS_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    "output_type": "np",
}


def edm_scheduler() -> Any:
    from diffusers import EDMEulerScheduler

    return EDMEulerScheduler(
        sigma_min=0.002,
        sigma_max=80,
        sigma_data=0.5,
        sigma_schedule="karras",
        prediction_type="epsilon",
        rho=7.0,
        final_sigmas_type="sigma_min",
    )


@pipeline("CosmosTextToWorldPipeline")
def cosmos_text_to_world_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CosmosTextToWorldPipeline

    pipe = assemble(CosmosTextToWorldPipeline, cosmos_components(cosmos_vae(), edm_scheduler()))
    return pipe, arguments(**COSMOS_CALL, num_frames=5)


@pipeline("CosmosVideoToWorldPipeline")
def cosmos_video_to_world_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CosmosVideoToWorldPipeline

    components = cosmos_components(cosmos_vae(), edm_scheduler(), in_channels=17)
    pipe = assemble(CosmosVideoToWorldPipeline, components)
    return pipe, arguments(**COSMOS_CALL, video=clip(1, 32, 32), num_frames=5)


def karras_scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)


@pipeline("Cosmos2TextToImagePipeline")
def cosmos2_text_to_image_pipeline() -> tuple[Any, Arguments]:
    from diffusers import Cosmos2TextToImagePipeline

    pipe = assemble(Cosmos2TextToImagePipeline, cosmos_components(vaes.wan_vae(), karras_scheduler()))
    return pipe, arguments(**COSMOS_CALL)


@pipeline("Cosmos2VideoToWorldPipeline")
def cosmos2_video_to_world_pipeline() -> tuple[Any, Arguments]:
    from diffusers import Cosmos2VideoToWorldPipeline

    components = cosmos_components(vaes.wan_vae(), karras_scheduler(), in_channels=17)
    return assemble(Cosmos2VideoToWorldPipeline, components), arguments(
        **COSMOS_CALL, video=clip(1, 32, 32), num_frames=5
    )


@pipeline("Cosmos2_5_PredictBasePipeline")
def cosmos25_predict_pipeline() -> tuple[Any, Arguments]:
    """Its text embeddings are those of all layers of the text encoder side by side."""
    from diffusers import Cosmos2_5_PredictBasePipeline

    dit = {"in_channels": 17, "use_crossattn_projection": True, "crossattn_proj_in_channels": 96}
    components = {
        **cosmos_components(vaes.wan_vae(), unipc_scheduler(), **dit, encoder_hidden_states_channels=32),
        "text_encoder": text_encoders.qwen25_vl(32),
        "tokenizer": qwen_tokenizer(),
    }
    pipe = assemble(Cosmos2_5_PredictBasePipeline, components)
    call = {**COSMOS_CALL, "max_sequence_length": 64, "num_latent_conditional_frames": 1}
    return pipe, arguments(**call, video=clip(1, 32, 32), num_frames=5)
