"""UNets told the time at most: DDPM, DDIM, consistency models, and the super-resolution of latent diffusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, normal, picture
from tests.zoo.registry import Arguments, transformer
from tests.zoo.stable_diffusion import ddim_scheduler

CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
TENSORS: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}
"""For pipelines whose arrays would have to be float32 from the start."""


def plain_unet(seed: int = 121, **changes: Any) -> Any:
    """A `UNet2DModel` of three blocks down and three up, one of each with self-attention."""
    from diffusers import UNet2DModel

    config: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return build(UNet2DModel, seed, **{**config, **changes})


@transformer("UNet2DModel")
def unet_2d() -> tuple[nn.Module, Arguments]:
    return plain_unet(), lambda: {"sample": normal(2, 3, 16, 16), "timestep": torch.tensor([500, 500])}


def denoising(pipeline_class: type) -> Any:
    """A pipeline whose UNet predicts the noise."""
    from diffusers import DDPMScheduler

    scheduler = ddim_scheduler() if pipeline_class.__name__ == "DDIMPipeline" else DDPMScheduler()
    return assemble(pipeline_class, {"unet": plain_unet(), "scheduler": scheduler})


def consistent(pipeline_class: type) -> Any:
    """A pipeline whose UNet is told the class of what it paints, and leads from any noise to the picture."""
    from diffusers import CMStochasticIterativeScheduler

    unet = plain_unet(seed=122, num_class_embeds=10, resnet_time_scale_shift="scale_shift")
    return assemble(pipeline_class, {"unet": unet, "scheduler": CMStochasticIterativeScheduler()})


def enlarging(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a small picture beside the latents."""
    from diffusers import VQModel

    vqvae = build(
        VQModel,
        123,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
        num_vq_embeddings=12,
    )
    components = {"vqvae": vqvae, "unet": plain_unet(seed=124, in_channels=6), "scheduler": ddim_scheduler()}
    return assemble(pipeline_class, components)


register_all(denoising, {"DDPMPipeline": CALL, "DDIMPipeline": {**CALL, "eta": 0.5}})
register_all(consistent, {"ConsistencyModelPipeline": {**TENSORS, "class_labels": 3}})
register_all(enlarging, {"LDMSuperResolutionPipeline": {**TENSORS, "image": picture()}})
