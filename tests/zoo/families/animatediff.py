"""AnimateDiff: Stable Diffusion's UNet with motion modules makes videos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import picture
from tests.zoo.clips import clip
from tests.zoo.controls import controlnet, motion_adapter, sparse_controlnet
from tests.zoo.stable_diffusion import CONTROL, PERTURBED, SIZE, TEXT, sd_components

FILM: dict[str, Any] = {**TEXT, **SIZE, "num_frames": 2}
FROM_FILM: dict[str, Any] = {**TEXT, **SIZE, "num_inference_steps": 3, "strength": 0.8, "video": clip(2, 32, 32)}
CONDITIONING: dict[str, Any] = {**CONTROL, "conditioning_frames": clip(2, 32, 32)}


def moving(pipeline_class: type, control: Callable[[Any], Any] = controlnet) -> Any:
    """A pipeline with motion modules for its UNet, and a ControlNet if its class takes one."""
    components = sd_components()
    return assemble(
        pipeline_class,
        components,
        motion_adapter=motion_adapter(components["unet"]),
        controlnet=control(components["unet"]),
        **PERTURBED,
    )


def sparsely_controlled(pipeline_class: type) -> Any:
    """A pipeline whose ControlNet sees some of the frames."""
    return moving(pipeline_class, sparse_controlnet)


register_all(
    moving,
    {
        "AnimateDiffPipeline": FILM,
        "AnimateDiffPAGPipeline": {**FILM, "pag_scale": 3.0},
        "AnimateDiffVideoToVideoPipeline": FROM_FILM,
        "AnimateDiffControlNetPipeline": {**FILM, **CONDITIONING},
        "AnimateDiffVideoToVideoControlNetPipeline": {**FROM_FILM, **CONDITIONING},
    },
)
register_all(
    sparsely_controlled,
    {
        "AnimateDiffSparseControlNetPipeline": {
            **FILM,
            **CONTROL,
            "conditioning_frames": [picture()],
            "controlnet_frame_indices": [1],
        }
    },
)
