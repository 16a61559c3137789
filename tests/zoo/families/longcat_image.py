"""LongCat-Image and its editing pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import longcat_image_transformer
from tests.zoo.building import normal
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("LongCatImageTransformer2DModel")
def longcat_image_dit() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 64),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "img_ids": torch.arange(48.0).reshape(16, 3),
            "txt_ids": torch.zeros(5, 3),
        }

    return longcat_image_transformer(), arguments


@pipeline("LongCatImagePipeline")
def longcat_image() -> tuple[Any, Arguments]:
    return tiny.build_longcat_image()
