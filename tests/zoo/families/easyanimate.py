"""EasyAnimate: text to video, inpainting, control."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def easyanimate_transformer(in_channels: int = 4, **config: Any) -> Any:
    """Its first three blocks have weights of their own for the text, the others don't."""
    from diffusers import EasyAnimateTransformer3DModel

    return build(
        EasyAnimateTransformer3DModel,
        78,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        patch_size=2,
        time_embed_dim=8,
        num_layers=4,
        mmdit_layers=3,
        text_embed_dim=32,
        **config,
    )


@transformer("EasyAnimateTransformer3DModel")
def easyanimate() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
        }

    return easyanimate_transformer(), call


def easyanimate_components(in_channels: int = 4, **dit: Any) -> dict[str, Any]:
    """The VAE is 8x smaller in space, 4x in time."""
    from diffusers import AutoencoderKLMagvit

    vae = build(
        AutoencoderKLMagvit,
        81,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
    return {
        "vae": vae,
        "text_encoder": text_encoders.qwen25_vl(32),
        "tokenizer": qwen_tokenizer(),
        "transformer": easyanimate_transformer(in_channels, **dit),
        "scheduler": flow_scheduler(),
    }


_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "height": 16,
    "width": 16,
    "num_frames": 5,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "output_type": "np",
}


@pipeline("EasyAnimatePipeline")
def easyanimate_pipeline() -> tuple[Any, Arguments]:
    from diffusers import EasyAnimatePipeline

    return assemble(EasyAnimatePipeline, easyanimate_components()), arguments(**_CALL)


@pipeline("EasyAnimateInpaintPipeline")
def easyanimate_inpaint_pipeline() -> tuple[Any, Arguments]:
    """Without noise on the video that is kept, which would have to come from a generator of the device."""
    from diffusers import EasyAnimateInpaintPipeline

    video, mask = normal(1, 3, 5, 16, 16).sigmoid(), torch.zeros(1, 1, 5, 16, 16)
    mask[..., 8:] = 255
    components = easyanimate_components(12, resize_inpaint_mask_directly=False, add_noise_in_inpaint_model=False)
    pipe = assemble(EasyAnimateInpaintPipeline, components)
    return pipe, arguments(**_CALL, video=video, mask_video=mask, strength=1.0)
