"""OmniGen, whose DiT reads the tokens of the text itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.tokenizers import QWEN_VOCABULARY
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def omnigen_dit() -> Any:
    """An `OmniGenTransformer2DModel`."""
    from diffusers import OmniGenTransformer2DModel

    return build(
        OmniGenTransformer2DModel,
        seed=43,
        in_channels=4,
        patch_size=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_layers=4,
        pad_token_id=0,
        vocab_size=QWEN_VOCABULARY,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        time_step_dim=16,
        rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
    )


@transformer("OmniGenTransformer2DModel")
def omnigen_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        # 4 tokens of text, the time token, 16 patches of the image.
        length = 4 + 1 + 16
        return {
            "hidden_states": normal(1, 4, 8, 8),
            "timestep": torch.tensor([0.3]),
            "input_ids": torch.tensor([[65, 66, 67, 68]]),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(1, length, length),
            "position_ids": torch.arange(length)[None],
        }

    return omnigen_dit(), arguments
