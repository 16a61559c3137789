"""Declarations for diffusers' own pipelines and a few others, one file a model family. Importing this package registers
them all."""

from diffusers_omni_offload.adapters import (
    bagel,
    cosmos,
    flux2,
    longcat_image,
    minimax_h3,
    nextstep,
    ovis_image,
    qwen_image,
    soulx_singer,
    stable_diffusion_3,
    stable_diffusion_xl,
    wan,
)

__all__ = [
    "bagel",
    "cosmos",
    "flux2",
    "longcat_image",
    "minimax_h3",
    "nextstep",
    "ovis_image",
    "qwen_image",
    "soulx_singer",
    "stable_diffusion_3",
    "stable_diffusion_xl",
    "wan",
]
