"""SkyReels V2: text and image to video, and the diffusion forcing pipelines."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build
from tests.zoo.families.wan import WAN, wan_arguments
from tests.zoo.registry import Arguments, transformer


def skyreels_transformer(seed: int = 40, **config: Any) -> Any:
    from diffusers import SkyReelsV2Transformer3DModel

    return build(SkyReelsV2Transformer3DModel, seed, **WAN, **config)


@transformer("SkyReelsV2Transformer3DModel")
def skyreels() -> tuple[Any, Arguments]:
    return skyreels_transformer(), wan_arguments
