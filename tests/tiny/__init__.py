"""Tiny, offline diffusers pipelines for tests: random weights, in-memory tokenizers, no hub access."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

from .pipelines import (
    BUILDERS,
    VARIANTS,
    build_cosmos3_omni,
    build_flux2,
    build_longcat_image,
    build_minimax_h3,
    build_ovis_image,
    build_qwen_image,
    build_sd3,
    build_sdxl,
    build_wan,
    build_wan_i2v,
)
from .running import align_parameters, reload, run, to_array, trace
from .standins import STANDINS
from .toy import ToyDiT, ToyPipeline, build_toy

__all__ = [
    "BUILDERS",
    "STANDINS",
    "VARIANTS",
    "ToyDiT",
    "ToyPipeline",
    "align_parameters",
    "build_cosmos3_omni",
    "build_flux2",
    "build_longcat_image",
    "build_minimax_h3",
    "build_ovis_image",
    "build_qwen_image",
    "build_sd3",
    "build_sdxl",
    "build_toy",
    "build_wan",
    "build_wan_i2v",
    "reload",
    "run",
    "to_array",
    "trace",
]
