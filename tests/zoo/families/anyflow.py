"""AnyFlow: flow maps on Wan's DiT, bidirectional and in causal chunks (FAR)."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.families.wan import WAN, WAN_CALL, wan_components
from tests.zoo.registry import Arguments, pipeline, transformer


def anyflow_arguments() -> dict[str, Any]:
    """One forward of either DiT; frames come before channels."""
    return {
        "hidden_states": normal(1, 2, 16, 4, 4),
        "timestep": torch.full((1, 2), 700.0),
        "r_timestep": torch.full((1, 2), 300.0),
        "encoder_hidden_states": normal(1, 16, 32, seed=1),
    }


def anyflow_transformer() -> Any:
    from diffusers import AnyFlowTransformer3DModel

    return build(AnyFlowTransformer3DModel, 47, **WAN)


def far_transformer() -> Any:
    from diffusers import AnyFlowFARTransformer3DModel

    return build(AnyFlowFARTransformer3DModel, 48, **WAN, chunk_partition=(1, 1), compressed_patch_size=(1, 4, 4))


@transformer("AnyFlowTransformer3DModel")
def anyflow() -> tuple[Any, Arguments]:
    return anyflow_transformer(), anyflow_arguments


@transformer("AnyFlowFARTransformer3DModel")
def anyflow_far() -> tuple[Any, Arguments]:
    return far_transformer(), lambda: {**anyflow_arguments(), "chunk_partition": [1, 1]}


def flow_map_components() -> dict[str, Any]:
    from diffusers import FlowMapEulerDiscreteScheduler

    return {**wan_components(), "scheduler": FlowMapEulerDiscreteScheduler(shift=5.0)}


@pipeline("AnyFlowPipeline")
def anyflow_pipeline() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowPipeline

    pipe = assemble(AnyFlowPipeline, flow_map_components(), transformer=anyflow_transformer())
    return pipe, arguments(**WAN_CALL, num_frames=5)


@pipeline("AnyFlowFARPipeline")
def anyflow_far_pipeline() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowFARPipeline

    pipe = assemble(AnyFlowFARPipeline, flow_map_components(), transformer=far_transformer())
    return pipe, arguments(**WAN_CALL, num_frames=5)
