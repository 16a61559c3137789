"""Z-Image: text and image to image, inpainting, ControlNet, Omni."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def z_image_dit(**config: Any) -> Any:
    """A `ZImageTransformer2DModel`: two refiners, then the layers."""
    from diffusers import ZImageTransformer2DModel

    return build(
        ZImageTransformer2DModel,
        seed=47,
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=3,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 4, 8],
        axes_lens=[512, 64, 64],
        **config,
    )


@transformer("ZImageTransformer2DModel")
def z_image_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "x": [normal(4, 1, 8, 8), normal(4, 1, 8, 8, seed=1)],
            "t": torch.tensor([0.3, 0.3]),
            "cap_feats": [normal(5, 32, seed=2), normal(7, 32, seed=3)],
        }

    return z_image_dit(), arguments
