"""Lucy Edit: a video edited by a text, with Wan's DiT."""

from __future__ import annotations

from typing import Any

from diffusers_omni_offload.demo.tiny_wan import wan_transformer
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.clips import clip
from tests.zoo.families.wan import WAN_CALL, wan_components
from tests.zoo.registry import Arguments, pipeline


@pipeline("LucyEditPipeline")
def lucy_edit_pipeline() -> tuple[Any, Arguments]:
    """Latents of the video are beside the noise; each token has a time step."""
    from diffusers import LucyEditPipeline

    pipe = assemble(
        LucyEditPipeline,
        {**wan_components(), "scheduler": flow_scheduler()},
        transformer=wan_transformer(32, seed=7),
        transformer_2=wan_transformer(32, seed=17),
        boundary_ratio=0.875,
        expand_timesteps=True,
    )
    return pipe, arguments(**WAN_CALL, video=clip(5), num_frames=5)
