"""Qwen-Image's editing pipelines, which show the picture to the text encoder, too."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble
from tests.zoo.building import build, masked_half, picture
from tests.zoo.families.qwen_image import qwen_image, qwen_image_call
from tests.zoo.processors import qwen2_vl_processor
from tests.zoo.registry import Arguments, pipeline


def coarse_vae() -> Any:
    """An `AutoencoderKLQwenImage` that is 32x smaller in space: the pipelines scale every picture up to 1024 x 1024."""
    from diffusers import AutoencoderKLQwenImage

    return build(
        AutoencoderKLQwenImage,
        seed=64,
        base_dim=2,
        z_dim=4,
        dim_mult=[1] * 6,
        num_res_blocks=0,
        temperal_downsample=[False, False, False, False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def edit_dit(**config: Any) -> Any:
    """A `QwenImageTransformer2DModel` with the options of the editing checkpoints."""
    from diffusers import QwenImageTransformer2DModel

    return build(
        QwenImageTransformer2DModel,
        seed=65,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        **config,
    )


def edit_pipeline(pipeline_class: type, **more: Any) -> Any:
    """A pipeline of Qwen-Image's components, of a processor of pictures and of `more`."""
    components = {**qwen_image()[0].components, "vae": coarse_vae(), "processor": qwen2_vl_processor()}
    return assemble(pipeline_class, {**components, **more})


@pipeline("QwenImageEditPipeline")
def qwen_image_edit() -> tuple[Any, Arguments]:
    from diffusers import QwenImageEditPipeline

    return edit_pipeline(QwenImageEditPipeline), qwen_image_call(image=picture(), height=64, width=64)


@pipeline("QwenImageEditPlusPipeline")
def qwen_image_edit_plus() -> tuple[Any, Arguments]:
    from diffusers import QwenImageEditPlusPipeline

    # The DiT modulates the given pictures as if they were at time zero.
    pipe = edit_pipeline(QwenImageEditPlusPipeline, transformer=edit_dit(zero_cond_t=True))
    return pipe, qwen_image_call(image=picture(), height=64, width=64)


@pipeline("QwenImageEditInpaintPipeline")
def qwen_image_edit_inpaint() -> tuple[Any, Arguments]:
    from diffusers import QwenImageEditInpaintPipeline

    pipe = edit_pipeline(QwenImageEditInpaintPipeline)
    # It paints at 1024 x 1024 whatever it is asked for, which takes long to decode.
    return pipe, qwen_image_call(image=picture(), mask_image=masked_half(), strength=1.0, output_type="latent")


@pipeline("QwenImageLayeredPipeline")
def qwen_image_layered() -> tuple[Any, Arguments]:
    from diffusers import QwenImageLayeredPipeline

    dit = edit_dit(use_additional_t_cond=True, use_layer3d_rope=True)
    pipe = edit_pipeline(QwenImageLayeredPipeline, transformer=dit)
    return pipe, qwen_image_call(image=picture(), layers=1)
