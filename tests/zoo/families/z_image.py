"""Z-Image: text and image to image, inpainting, ControlNet, Omni."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.registry import Arguments, pipeline, transformer


def z_image_dit(**config: Any) -> Any:
    """A `ZImageTransformer2DModel`: two refiners, then the layers."""
    from diffusers import ZImageTransformer2DModel

    return build(
        ZImageTransformer2DModel,
        seed=47,
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=3,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 4, 8],
        axes_lens=[512, 64, 64],
        **config,
    )


@transformer("ZImageTransformer2DModel")
def z_image_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "x": [normal(4, 1, 8, 8), normal(4, 1, 8, 8, seed=1)],
            "t": torch.tensor([0.3, 0.3]),
            "cap_feats": [normal(5, 32, seed=2), normal(7, 32, seed=3)],
        }

    return z_image_dit(), inputs


def z_image_pipeline(pipeline_class: type, **more: Any) -> Any:
    """A pipeline of Z-Image's components and of `more`."""
    components = {
        "scheduler": flow_scheduler(),
        "vae": kl_vae(4),
        "text_encoder": qwen3(),
        "tokenizer": qwen_tokenizer(),
        "transformer": z_image_dit(),
    }
    return assemble(pipeline_class, {**components, **more})


def z_image_call(**more: Any) -> Arguments:
    """What makes the arguments that all pipelines of the family take, and `more`."""
    return arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=4.0,
        max_sequence_length=64,
        output_type="np",
        **more,
    )


def controlnet(control_channels: int) -> Any:
    """A `ZImageControlNetModel` beside two of the DiT's layers; the pipeline gives it the DiT's own refiners, too."""
    from diffusers import ZImageControlNetModel

    return build(
        ZImageControlNetModel,
        seed=69,
        control_layers_places=[0, 2],
        control_refiner_layers_places=[0, 1],
        control_in_dim=control_channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
    )


@pipeline("ZImagePipeline")
def z_image() -> tuple[Any, Arguments]:
    from diffusers import ZImagePipeline

    return z_image_pipeline(ZImagePipeline), z_image_call()


@pipeline("ZImageImg2ImgPipeline")
def z_image_img2img() -> tuple[Any, Arguments]:
    from diffusers import ZImageImg2ImgPipeline

    return z_image_pipeline(ZImageImg2ImgPipeline), z_image_call(image=picture(16, 16), strength=1.0)


@pipeline("ZImageInpaintPipeline")
def z_image_inpaint() -> tuple[Any, Arguments]:
    from diffusers import ZImageInpaintPipeline

    call = z_image_call(image=picture(16, 16), mask_image=masked_half(16, 16), strength=1.0)
    return z_image_pipeline(ZImageInpaintPipeline), call


@pipeline("ZImageControlNetPipeline")
def z_image_controlnet() -> tuple[Any, Arguments]:
    from diffusers import ZImageControlNetPipeline

    pipe = z_image_pipeline(ZImageControlNetPipeline, controlnet=controlnet(4))
    return pipe, z_image_call(control_image=picture(16, 16))


@pipeline("ZImageControlNetInpaintPipeline")
def z_image_controlnet_inpaint() -> tuple[Any, Arguments]:
    from diffusers import ZImageControlNetInpaintPipeline

    # The latents of the control, the mask, and the latents of what is kept.
    pipe = z_image_pipeline(ZImageControlNetInpaintPipeline, controlnet=controlnet(4 + 1 + 4))
    return pipe, z_image_call(
        image=picture(16, 16), mask_image=masked_half(16, 16), control_image=picture(16, 16, seed=1)
    )


def siglip2() -> tuple[Any, Any]:
    """A `Siglip2VisionModel` and its image processor."""
    from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_patches=16,
        patch_size=8,
    )
    return build(Siglip2VisionModel, seed=70, config=config), Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)


@pipeline("ZImageOmniPipeline")
def z_image_omni() -> tuple[Any, Arguments]:
    from diffusers import ZImageOmniPipeline

    encoder, processor = siglip2()
    pipe = z_image_pipeline(
        ZImageOmniPipeline,
        transformer=z_image_dit(siglip_feat_dim=16),
        # The pipeline gives the VAE bfloat16 pictures.
        vae=kl_vae(4).to(torch.bfloat16),
        siglip=encoder,
        siglip_processor=processor,
    )
    return pipe, z_image_call(image=[picture(64, 64)])
