"""AnyFlow: flow maps on Wan's DiT, bidirectional and in causal chunks (FAR)."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.families.wan import WAN
from tests.zoo.registry import Arguments, transformer


def anyflow_arguments() -> dict[str, Any]:
    """One forward of either DiT; frames come before channels."""
    return {
        "hidden_states": normal(1, 2, 16, 4, 4),
        "timestep": torch.full((1, 2), 700.0),
        "r_timestep": torch.full((1, 2), 300.0),
        "encoder_hidden_states": normal(1, 16, 32, seed=1),
    }


@transformer("AnyFlowTransformer3DModel")
def anyflow() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowTransformer3DModel

    return build(AnyFlowTransformer3DModel, 47, **WAN), anyflow_arguments


@transformer("AnyFlowFARTransformer3DModel")
def anyflow_far() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowFARTransformer3DModel

    model = build(AnyFlowFARTransformer3DModel, 48, **WAN, chunk_partition=(1, 1), compressed_patch_size=(1, 4, 4))
    return model, lambda: {**anyflow_arguments(), "chunk_partition": [1, 1]}
