"""JoyImage Edit and Edit Plus."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def joyimage_dit(plus: bool = False) -> Any:
    """A `JoyImageEditTransformer3DModel`, or a `JoyImageEditPlusTransformer3DModel`."""
    from diffusers import JoyImageEditPlusTransformer3DModel, JoyImageEditTransformer3DModel

    return build(
        JoyImageEditPlusTransformer3DModel if plus else JoyImageEditTransformer3DModel,
        seed=48,
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=32,
        mlp_width_ratio=2.0,
        num_layers=4,
        rope_dim_list=[4, 6, 6],
    )


@transformer("JoyImageEditTransformer3DModel")
def joyimage_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            # Two items: the picture to edit, and the one that is being made.
            "hidden_states": normal(1, 2, 4, 1, 8, 8),
            "timestep": torch.tensor([700.0]),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
        }

    return joyimage_dit(), arguments


@transformer("JoyImageEditPlusTransformer3DModel")
def joyimage_plus_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            # 16 patches of the picture in the making and 8 of a reference.
            "hidden_states": normal(1, 24, 4, 1, 2, 2),
            "timestep": torch.tensor([700.0]),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "encoder_hidden_states_mask": torch.tensor([[1.0, 1, 1, 1, 0]]),
            "shape_list": [[(1, 4, 4), (1, 4, 2)]],
        }

    return joyimage_dit(plus=True), arguments
