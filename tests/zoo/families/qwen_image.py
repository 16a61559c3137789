"""Qwen-Image: text and image to image, inpainting, ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import qwen_image_transformer
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.registry import Arguments, pipeline, transformer
from tests.zoo.seeding import seeded


@transformer("QwenImageTransformer2DModel")
def qwen_image_dit() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.long),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [[(1, 4, 4)]],
        }

    return qwen_image_transformer(), inputs


def qwen_image_call(**more: Any) -> Arguments:
    """What makes the arguments that all pipelines of the family take, and `more`."""
    common = {
        "prompt": "a cat",
        "negative_prompt": "bad",
        "num_inference_steps": 2,
        "true_cfg_scale": 3.0,
        "max_sequence_length": 256,
        "output_type": "np",
    }
    return arguments(**{**common, **more})


def controlnet(extra_condition_channels: int = 0) -> Any:
    """A `QwenImageControlNetModel`; for inpainting it has a channel more, for the mask."""
    from diffusers import QwenImageControlNetModel

    return build(
        QwenImageControlNetModel,
        seed=63,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        extra_condition_channels=extra_condition_channels,
    )


@pipeline("QwenImagePipeline")
def qwen_image() -> tuple[Any, Arguments]:
    return tiny.build_qwen_image()


@pipeline("QwenImageImg2ImgPipeline")
def qwen_image_img2img() -> tuple[Any, Arguments]:
    from diffusers import QwenImageImg2ImgPipeline

    pipe = assemble(QwenImageImg2ImgPipeline, qwen_image()[0].components)
    return pipe, qwen_image_call(image=picture(), strength=1.0, height=32, width=32)


@pipeline("QwenImageInpaintPipeline")
def qwen_image_inpaint() -> tuple[Any, Arguments]:
    from diffusers import QwenImageInpaintPipeline

    pipe = assemble(QwenImageInpaintPipeline, qwen_image()[0].components)
    return pipe, qwen_image_call(image=picture(), mask_image=masked_half(), strength=1.0, height=32, width=32)


@pipeline("QwenImageControlNetPipeline")
def qwen_image_controlnet() -> tuple[Any, Arguments]:
    from diffusers import QwenImageControlNetPipeline

    pipe = assemble(QwenImageControlNetPipeline, qwen_image()[0].components, controlnet=controlnet())
    return pipe, qwen_image_call(control_image=picture(), height=32, width=32)


@pipeline("QwenImageControlNetInpaintPipeline")
def qwen_image_controlnet_inpaint() -> tuple[Any, Arguments]:
    from diffusers import QwenImageControlNetInpaintPipeline

    # The mask of each of the four pixels of a patch.
    with_mask = controlnet(extra_condition_channels=4)
    pipe = assemble(QwenImageControlNetInpaintPipeline, qwen_image()[0].components, controlnet=with_mask)
    call = qwen_image_call(control_image=picture(), control_mask=masked_half(), height=32, width=32)
    return pipe, seeded(call)
