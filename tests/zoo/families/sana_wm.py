"""SANA-WM: a world from a picture and a camera's path, and its refiner."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.families.ltx2 import LTX2, ltx2_components, ltx2_vae
from tests.zoo.gemma import gemma2, gemma_tokenizer
from tests.zoo.registry import Arguments, pipeline, transformer


def sana_wm_transformer(**config: Any) -> Any:
    """Every second block has a softmax attention."""
    from diffusers import SanaWMTransformer3DModel

    sizes: dict[str, Any] = {
        "in_channels": 4,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "softmax_every_n": 2,
        "linear_head_dim": 16,
        "caption_channels": 32,
        "mlp_ratio": 2.0,
        "chunk_plucker_channels": 8,
        "chunk_plucker_post_attn_blocks": 4,
    }
    return build(SanaWMTransformer3DModel, 88, **{**sizes, **config})


def sana_wm_refiner_transformer(**config: Any) -> Any:
    from diffusers import SanaWMLTX2RefinerTransformer3DModel

    return build(SanaWMLTX2RefinerTransformer3DModel, 89, **{**LTX2, **config})


def camera_path(frames: int, size: int) -> torch.Tensor:
    """A camera that moves straight on: 4 x 4 poses and the intrinsics of a pinhole, flat."""
    poses = torch.eye(4).repeat(1, frames, 1, 1)
    poses[..., 2, 3] = 0.1 * torch.arange(frames)
    intrinsics = torch.tensor([size, size, size / 2, size / 2]).expand(1, frames, 4)
    return torch.cat([poses.flatten(2), intrinsics], dim=-1)


@transformer("SanaWMTransformer3DModel")
def sana_wm() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 3, 4, 4),
            "timestep": torch.tensor([[[0.0, 500.0, 700.0]]]),
            "encoder_hidden_states": normal(1, 1, 16, 32, seed=1),
            "encoder_attention_mask": (torch.arange(16) < 12)[None].long(),
            "camera_conditions": camera_path(3, 4),
            "chunk_plucker": normal(1, 8, 3, 4, 4, seed=2),
        }

    return sana_wm_transformer(), call


@transformer("SanaWMLTX2RefinerTransformer3DModel")
def sana_wm_refiner() -> tuple[Any, Arguments]:
    model = sana_wm_refiner_transformer()

    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 4),
            "encoder_hidden_states": normal(1, 8, 16, seed=1),
            "timestep": torch.linspace(100, 800, 8)[None],
            "video_rotary_emb": model.build_rotary_emb_for_absolute_positions(
                batch_size=1, frame_positions=[0, 1], height=2, width=2, device=torch.device("cpu"), fps=24.0
            ),
            "encoder_attention_mask": torch.ones(1, 8),
        }

    return model, call


@pipeline("SanaWMPipeline")
def sana_wm_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SanaWMPipeline

    pipe = SanaWMPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma2(32),
        vae=ltx2_vae(),
        # Six Pluecker coordinates for each of the four frames that are one latent frame.
        transformer=sana_wm_transformer(chunk_plucker_channels=24),
        scheduler=flow_scheduler(),
    )
    return pipe, arguments(
        image=picture(),
        prompt="a street",
        negative_prompt="bad",
        action="w-5,jw-4",
        intrinsics=[32.0, 32.0, 16.0, 16.0],
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=3.0,
        max_sequence_length=32,
        chi_prompt=["Scene:"],
        output_type="np",
    )


@pipeline("SanaWMLTX2Refiner")
def sana_wm_refiner_pipeline() -> tuple[Any, Arguments]:
    """Two blocks of frames, each with the keys and values of what came before."""
    from diffusers import SanaWMLTX2Refiner

    components = {**ltx2_components(), "transformer": sana_wm_refiner_transformer()}
    pipe = assemble(SanaWMLTX2Refiner, components, text_max_sequence_length=16)
    return pipe, arguments(
        sana_latent=normal(1, 4, 3, 4, 4), prompt="a street", fps=16.0, block_size=1, sigmas=(0.9, 0.5, 0.0)
    )
