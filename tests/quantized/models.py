"""Pipelines of `tests.tiny` with DiTs that are wide enough to be quantized: whole groups of 32 or 64, a few hundred
columns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import randomize_constants
from tests import tiny
from tests.equality import Build, Call
from tests.tiny import text_encoders

from .kinds import KINDS, TEXT_KINDS
from .loading import reload_encoder


def sd3_transformer(width: int, num_layers: int, text_width: int = 64) -> Any:
    """An `SD3Transformer2DModel` for the other components of `tiny.build_sd3`; `text_width` is that of its prompts."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        attention_head_dim=64,
        num_attention_heads=width // 64,
        caption_projection_dim=width,
        joint_attention_dim=text_width,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def wan_transformer(width: int, num_layers: int) -> Any:
    """A `WanTransformer3DModel` for the other components of `tiny.build_wan`."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=width // 64,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=2 * width,
        num_layers=num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def flux2_transformer(width: int, num_layers: int) -> Any:
    """A `Flux2Transformer2DModel` for the other components of `tiny.build_flux2`."""
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=num_layers,
        num_single_layers=num_layers,
        attention_head_dim=64,
        num_attention_heads=width // 64,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=(16, 16, 16, 16),
    )


def qwen_image_transformer(width: int, num_layers: int) -> Any:
    """A `QwenImageTransformer2DModel` for the other components of `tiny.build_qwen_image`."""
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=num_layers,
        attention_head_dim=64,
        num_attention_heads=width // 64,
        joint_attention_dim=32,
        axes_dims_rope=(16, 24, 24),
    )


FAMILIES: dict[str, tuple[Callable[[], tuple[Any, Call]], Callable[[int, int], Any]]] = {
    "sd3": (lambda: tiny.build_sd3(t5=False), sd3_transformer),
    "wan": (tiny.build_wan, wan_transformer),
    "flux2": (tiny.build_flux2, flux2_transformer),
    "qwen_image": (tiny.build_qwen_image, qwen_image_transformer),
}


@functools.cache
def _weights(family: str, width: int, num_layers: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = FAMILIES[family][1](width, num_layers)
    return dict(randomize_constants(model, seed).state_dict())


def transformer(family: str, width: int = 256, num_layers: int = 3, seed: int = 40, dtype: Any = torch.bfloat16) -> Any:
    """A DiT that isn't quantized; weights are a function of the arguments."""
    model = FAMILIES[family][1](width, num_layers)
    model.load_state_dict(_weights(family, width, num_layers, seed))
    return model.to(dtype).eval()


def build(kind: str, family: str = "sd3", width: int = 256, num_layers: int = 3) -> tuple[Any, Call]:
    """A pipeline whose DiTs are quantized; call it as those of `tests.tiny`."""
    pipe, call = FAMILIES[family][0]()
    known = KINDS[kind]
    pipe.to(known.dtype)
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    for seed, name in enumerate(names, start=40):
        setattr(pipe, name, known.apply(transformer(family, width, num_layers, seed, known.dtype)))
    return pipe, call


def builder(kind: str, family: str = "sd3", width: int = 256, num_layers: int = 3) -> Build:
    """`build` with these arguments."""
    return functools.partial(build, kind, family, width, num_layers)


def build_text(kind: str, encoder: str = "t5", width: int = 256) -> tuple[Any, Call]:
    """Stable Diffusion 3 with a quantized text encoder: its T5, or its first CLIP model."""
    pipe, call = tiny.build_sd3(num_layers=2, t5=encoder == "t5")
    if encoder == "t5":
        name, model, text_width = "text_encoder_3", text_encoders.t5_encoder(width), width
    else:
        # The prompt's embedding is as wide as those of both CLIP models.
        name, model, text_width = "text_encoder", text_encoders.clip_text(True, hidden=width), width + 32
    torch.manual_seed(44)
    pipe.transformer = randomize_constants(sd3_transformer(64, 2, text_width), 44).eval()
    pipe.to(torch.bfloat16)
    setattr(pipe, name, reload_encoder(model.to(torch.bfloat16), TEXT_KINDS[kind]()))
    return pipe, call
