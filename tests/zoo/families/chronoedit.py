"""ChronoEdit: an edit of a picture as a short video."""

from __future__ import annotations

from typing import Any

from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.families.wan import WAN, WAN_CALL, wan_arguments, wan_components
from tests.zoo.registry import Arguments, pipeline, transformer


def chronoedit_transformer() -> Any:
    from diffusers import ChronoEditTransformer3DModel

    return build(ChronoEditTransformer3DModel, 45, **WAN, in_channels=36, image_dim=16, added_kv_proj_dim=24)


@transformer("ChronoEditTransformer3DModel")
def chronoedit() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            **wan_arguments(channels=36),
            # The attention takes all but the last 512 tokens for the picture's.
            "encoder_hidden_states": normal(1, 512, 32, seed=1),
            "encoder_hidden_states_image": normal(1, 4, 16, seed=2),
        }

    return chronoedit_transformer(), call


@pipeline("ChronoEditPipeline")
def chronoedit_pipeline() -> tuple[Any, Arguments]:
    from diffusers import ChronoEditPipeline

    image_encoder, image_processor = text_encoders.clip_vision(16)
    pipe = assemble(
        ChronoEditPipeline,
        {**wan_components(), "scheduler": flow_scheduler()},
        image_encoder=image_encoder,
        image_processor=image_processor,
        transformer=chronoedit_transformer(),
    )
    return pipe, arguments(**{**WAN_CALL, "max_sequence_length": 512}, image=picture(16, 16), num_frames=5)
