"""Ovis-Image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import ovis_image_transformer
from tests.zoo.building import normal
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("OvisImageTransformer2DModel")
def ovis_image_dit() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "img_ids": torch.arange(48.0).reshape(16, 3),
            "txt_ids": torch.zeros(5, 3),
        }

    return ovis_image_transformer(), arguments


@pipeline("OvisImagePipeline")
def ovis_image() -> tuple[Any, Arguments]:
    return tiny.build_ovis_image()
