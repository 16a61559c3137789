"""Declarations for diffusers' own pipelines, one file a model family. Importing this package registers them all."""

from diffusers_omni_offload.adapters import flux2, qwen_image, stable_diffusion_3, wan

__all__ = ["flux2", "qwen_image", "stable_diffusion_3", "wan"]
