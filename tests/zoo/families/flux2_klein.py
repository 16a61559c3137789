"""FLUX.2 Klein: text to image, inpainting, and with cached keys and values."""

from __future__ import annotations

import torch
from torch import nn

from tests.tiny.transformers import flux2_transformer as flux2_dit
from tests.zoo.building import normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, transformer


@transformer("Flux2Transformer2DModel")
def flux2_transformer() -> tuple[nn.Module, Arguments]:
    return flux2_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 48, seed=1),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": grid_ids(4, 4, axes=4),
        "txt_ids": torch.zeros(8, 4),
    }
