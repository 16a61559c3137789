"""Helios: long videos in chunks that see a history at three scales."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.families.wan import WAN_CALL, wan_components
from tests.zoo.modular import assemble_modular
from tests.zoo.registry import Arguments, pipeline, transformer


def helios_transformer() -> Any:
    from diffusers import HeliosTransformer3DModel

    return build(
        HeliosTransformer3DModel,
        90,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        ffn_dim=32,
        num_layers=4,
        rope_dim=(4, 4, 4),
    )


@transformer("HeliosTransformer3DModel")
def helios() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 2, 8, 8),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "indices_hidden_states": torch.tensor([[6.0, 7.0]]),
            "indices_latents_history_short": torch.tensor([[5.0]]),
            "indices_latents_history_mid": torch.tensor([[4.0]]),
            "indices_latents_history_long": torch.arange(4.0)[None],
            "latents_history_short": normal(1, 16, 1, 8, 8, seed=2),
            "latents_history_mid": normal(1, 16, 1, 8, 8, seed=3),
            "latents_history_long": normal(1, 16, 4, 8, 8, seed=4),
        }

    return helios_transformer(), call


# Two chunks, the second of which sees the first one.
_CALL = {
    **{name: value for name, value in WAN_CALL.items() if name != "num_inference_steps"},
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "num_latent_frames_per_chunk": 2,
}
_MODULAR_CALL = {name: value for name, value in _CALL.items() if name != "guidance_scale"}


@pipeline("HeliosPipeline")
def helios_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HeliosPipeline, HeliosScheduler

    components = {**wan_components(), "scheduler": HeliosScheduler(stage_range=[0, 1], stages=1)}
    pipe = assemble(HeliosPipeline, components, transformer=helios_transformer())
    return pipe, arguments(**_CALL, num_inference_steps=2)


@pipeline("HeliosPyramidPipeline")
def helios_pyramid_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HeliosPyramidPipeline, HeliosScheduler

    components = {**wan_components(), "scheduler": HeliosScheduler(stages=2, stage_range=[0, 1 / 2, 1])}
    pipe = assemble(HeliosPyramidPipeline, components, transformer=helios_transformer())
    return pipe, arguments(**_CALL, pyramid_num_inference_steps_list=[1, 2])


@pipeline("HeliosModularPipeline")
def helios_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HeliosAutoBlocks, HeliosScheduler

    components = {**wan_components(), "scheduler": HeliosScheduler(stage_range=[0, 1], stages=1)}
    pipe = assemble_modular(HeliosAutoBlocks, components, transformer=helios_transformer())
    return pipe, arguments(**_MODULAR_CALL, num_inference_steps=2)


@pipeline("HeliosPyramidModularPipeline")
def helios_pyramid_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import HeliosPyramidAutoBlocks, HeliosScheduler

    components = {**wan_components(), "scheduler": HeliosScheduler(stages=2, stage_range=[0, 1 / 2, 1])}
    pipe = assemble_modular(HeliosPyramidAutoBlocks, components, transformer=helios_transformer())
    return pipe, arguments(**_MODULAR_CALL, pyramid_num_inference_steps_list=[1, 2])
