"""Cosmos 3: one stack that reads the tokens of the text and denoises."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import build_cosmos3_omni
from tests.tiny.transformers import cosmos3_omni_transformer
from tests.zoo.building import normal
from tests.zoo.modular import assemble_modular
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("Cosmos3OmniTransformer")
def cosmos3() -> tuple[Any, Arguments]:
    """Three tokens of text, then a frame of 2 x 2 patches."""

    def call() -> dict[str, Any]:
        vision = torch.arange(3, 7)
        positions = torch.arange(7).expand(3, 7).clone()
        positions[1, vision], positions[2, vision] = torch.tensor([3, 3, 4, 4]), torch.tensor([3, 4, 3, 4])
        return {
            "input_ids": torch.tensor([65, 66, 67]),
            "text_indexes": torch.arange(3),
            "position_ids": positions,
            "und_len": 3,
            "sequence_length": 7,
            "vision_tokens": [normal(1, 16, 1, 4, 4)],
            "vision_token_shapes": [(1, 2, 2)],
            "vision_sequence_indexes": vision,
            "vision_mse_loss_indexes": vision,
            "vision_timesteps": torch.full((4,), 500.0),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
        }

    return cosmos3_omni_transformer(), call


@pipeline("Cosmos3OmniPipeline")
def cosmos3_pipeline() -> tuple[Any, Arguments]:
    return build_cosmos3_omni()


@pipeline("Cosmos3OmniModularPipeline")
def cosmos3_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import Cosmos3OmniBlocks

    pipe, call = build_cosmos3_omni()
    names = ("transformer", "text_tokenizer", "vae", "scheduler")
    modular = assemble_modular(Cosmos3OmniBlocks, {name: getattr(pipe, name) for name in names})
    modular.disable_safety_checker()
    return modular, lambda: {name: value for name, value in call().items() if name != "enable_safety_check"}
