"""Marigold: Stable Diffusion's UNet reads a picture and paints its depth, its normals or what it is made of."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import picture
from tests.zoo.stable_diffusion import sd_components

CALL: dict[str, Any] = {"image": picture(), "num_inference_steps": 2, "processing_resolution": 0, "output_type": "np"}


def one_map(pipeline_class: type) -> Any:
    """A pipeline that paints one map beside the picture."""
    return assemble(pipeline_class, sd_components(in_channels=8))


def two_maps(pipeline_class: type) -> Any:
    """A pipeline that paints two maps beside the picture."""
    properties = {"target_properties": {"target_names": ["albedo", "shading"]}, "prediction_type": "intrinsics"}
    return assemble(pipeline_class, sd_components(in_channels=12, out_channels=8), **properties)


register_all(one_map, {"MarigoldDepthPipeline": CALL, "MarigoldNormalsPipeline": CALL})
register_all(two_maps, {"MarigoldIntrinsicsPipeline": CALL})
