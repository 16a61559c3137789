"""Stable Video Diffusion: a UNet over space and time makes a picture move."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, normal, picture
from tests.zoo.image_encoders import clip_processor, clip_vision_projection
from tests.zoo.registry import Arguments, transformer
from tests.zoo.stable_diffusion import SIZE


@transformer("UNetSpatioTemporalConditionModel")
def spatio_temporal_unet() -> tuple[nn.Module, Arguments]:
    import torch
    from diffusers import UNetSpatioTemporalConditionModel

    # The groups of its norms are 32 channels each.
    unet = build(
        UNetSpatioTemporalConditionModel,
        111,
        sample_size=16,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal",) * 2 + ("DownBlockSpatioTemporal",),
        up_block_types=("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 2,
        cross_attention_dim=32,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=2,
    )
    return unet, lambda: {
        "sample": normal(2, 2, 8, 8, 8),
        "timestep": torch.tensor(0.5),
        "encoder_hidden_states": normal(2, 1, 32, seed=1),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2),
    }


def moving(pipeline_class: type) -> Any:
    """A pipeline of these components."""
    from diffusers import AutoencoderKLTemporalDecoder, EulerDiscreteScheduler

    vae = build(
        AutoencoderKLTemporalDecoder,
        112,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        latent_channels=4,
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        interpolation_type="linear",
        prediction_type="v_prediction",
        sigma_max=700.0,
        sigma_min=0.002,
        steps_offset=1,
        timestep_spacing="leading",
        timestep_type="continuous",
        use_karras_sigmas=True,
    )
    components = {
        "unet": spatio_temporal_unet()[0],
        "vae": vae,
        "scheduler": scheduler,
        # Pictures arrive in this size, whatever the processor says.
        "image_encoder": clip_vision_projection(32, image_size=224),
        "feature_extractor": clip_processor(224),
    }
    return assemble(pipeline_class, components)


register_all(
    moving,
    {
        "StableVideoDiffusionPipeline": {
            **SIZE,
            "image": picture(),
            "num_frames": 2,
            "num_inference_steps": 2,
            "min_guidance_scale": 1.0,
            "max_guidance_scale": 2.5,
            "decode_chunk_size": 1,
            "output_type": "np",
        }
    },
)
