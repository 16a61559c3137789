"""HunyuanDiT: text to image, with perturbed attention guidance, and with a ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def hunyuan_dit(num_layers: int = 4) -> Any:
    """A `HunyuanDiT2DModel`: the blocks of its second half read the outputs of the first half's."""
    from diffusers import HunyuanDiT2DModel

    return build(
        HunyuanDiT2DModel,
        141,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
        text_len=77,
        text_len_t5=256,
    )


@transformer("HunyuanDiT2DModel")
def hunyuan_dit_transformer() -> tuple[nn.Module, Arguments]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": torch.tensor([500.0, 500.0]),
            "encoder_hidden_states": normal(2, 77, 32, seed=1),
            "text_embedding_mask": (torch.arange(77) < 9).long().repeat(2, 1),
            "encoder_hidden_states_t5": normal(2, 256, 32, seed=2),
            "text_embedding_mask_t5": (torch.arange(256) < 12).long().repeat(2, 1),
            "image_meta_size": torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]]).repeat(2, 1),
            "style": torch.zeros(2, dtype=torch.long),
            "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), output_type="pt"),
        }

    return hunyuan_dit(), arguments
