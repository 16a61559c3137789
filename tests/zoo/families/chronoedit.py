"""ChronoEdit: an edit of a picture as a short video."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build, normal
from tests.zoo.families.wan import WAN, wan_arguments
from tests.zoo.registry import Arguments, transformer


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
