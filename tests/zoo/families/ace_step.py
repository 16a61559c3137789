"""ACE-Step: songs from tags and lyrics."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def ace_step_transformer() -> Any:
    from diffusers import AceStepTransformer1DModel

    return build(
        AceStepTransformer1DModel,
        100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        patch_size=2,
        sliding_window=4,
    )


@transformer("AceStepTransformer1DModel")
def ace_step() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 21, 8),
            "timestep": torch.tensor([0.7]),
            "timestep_r": torch.tensor([0.4]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "context_latents": normal(1, 21, 16, seed=2),
        }

    return ace_step_transformer(), call
