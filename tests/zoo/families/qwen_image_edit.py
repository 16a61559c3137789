"""Qwen-Image's editing pipelines, which show the picture to the text encoder, too."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble
from tests.zoo.building import build, picture
from tests.zoo.families.qwen_image import qwen_image, qwen_image_call
from tests.zoo.processors import qwen2_vl_processor
from tests.zoo.registry import Arguments, pipeline


def coarse_vae() -> Any:
    """An `AutoencoderKLQwenImage` that is 32x smaller in space: the pipelines scale every picture up to 1024 x 1024."""
    from diffusers import AutoencoderKLQwenImage

    return build(
        AutoencoderKLQwenImage,
        seed=64,
        base_dim=4,
        z_dim=4,
        dim_mult=[1] * 6,
        num_res_blocks=0,
        temperal_downsample=[False, False, False, False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def edit_pipeline(pipeline_class: type, **more: Any) -> Any:
    """A pipeline of Qwen-Image's components, of a processor of pictures and of `more`."""
    components = {**qwen_image()[0].components, "vae": coarse_vae(), "processor": qwen2_vl_processor()}
    return assemble(pipeline_class, {**components, **more})


@pipeline("QwenImageEditPipeline")
def qwen_image_edit() -> tuple[Any, Arguments]:
    from diffusers import QwenImageEditPipeline

    return edit_pipeline(QwenImageEditPipeline), qwen_image_call(image=picture(), height=64, width=64)
