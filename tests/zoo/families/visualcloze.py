"""VisualCloze: FLUX.1 Fill completes a grid of pictures."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import arguments
from tests.zoo.building import picture
from tests.zoo.families.flux import flux_fill_dit, flux_pipeline
from tests.zoo.registry import Arguments, pipeline


def visualcloze_call(**more: Any) -> Arguments:
    """What makes the arguments of a call: one example of two pictures, and a query whose second one is missing."""
    return arguments(
        task_prompt="[IMAGE1] becomes [IMAGE2].",
        content_prompt="a cat",
        image=[[picture(16, 16), picture(16, 16, seed=1)], [picture(16, 16, seed=2), None]],
        num_inference_steps=2,
        guidance_scale=30.0,
        max_sequence_length=32,
        output_type="np",
        **more,
    )


@pipeline("VisualClozeGenerationPipeline")
def visualcloze_generation() -> tuple[Any, Arguments]:
    from diffusers import VisualClozeGenerationPipeline

    return flux_pipeline(VisualClozeGenerationPipeline, flux_fill_dit(), resolution=16), visualcloze_call()


@pipeline("VisualClozePipeline")
def visualcloze() -> tuple[Any, Arguments]:
    """Two pipelines inside it share its components: one generates, the other one enlarges."""
    from diffusers import VisualClozePipeline

    call = visualcloze_call(upsampling_height=32, upsampling_width=32, upsampling_strength=0.6)
    pipe = flux_pipeline(VisualClozePipeline, flux_fill_dit(), resolution=16)
    for inner in (pipe.generation_pipe, pipe.upsampling_pipe):
        inner.set_progress_bar_config(disable=True)
    return pipe, call
