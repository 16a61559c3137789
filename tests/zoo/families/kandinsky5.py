"""Kandinsky 5: text and image to image and to video."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import clip_text, qwen25_vl
from tests.tiny.tokenizers import clip_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.families.hunyuan_video import hunyuan_vae
from tests.zoo.processors import qwen2_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer

CHANNELS = 4


def kandinsky5_dit(visual_cond: bool = False) -> Any:
    """A `Kandinsky5Transformer3DModel`; `visual_cond` gives it the latents of a picture and their mask."""
    from diffusers import Kandinsky5Transformer3DModel

    return build(
        Kandinsky5Transformer3DModel,
        seed=50,
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        in_text_dim=32,
        in_text_dim2=32,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=48,
        num_text_blocks=3,
        num_visual_blocks=4,
        axes_dims=(4, 4, 8),
        visual_cond=visual_cond,
    )


@transformer("Kandinsky5Transformer3DModel")
def kandinsky5_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 2, 8, 8, CHANNELS),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([700.0]),
            "pooled_projections": normal(1, 32, seed=2),
            "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(5),
        }

    return kandinsky5_dit(), inputs


def kandinsky5_pipeline(pipeline_class: type, visual_cond: bool = False, video: bool = True) -> Any:
    """A pipeline of Kandinsky 5's components."""
    pipe = pipeline_class(
        transformer=kandinsky5_dit(visual_cond),
        vae=hunyuan_vae() if video else kl_vae(CHANNELS, blocks=4),
        text_encoder=qwen25_vl(32),
        tokenizer=qwen2_vl_processor(),
        text_encoder_2=clip_text(False),
        tokenizer_2=clip_tokenizer(),
        scheduler=flow_scheduler(),
    )
    if not video:
        # A plain attribute: the sizes that the checkpoints were trained on, to the nearest of which it goes.
        pipe.resolutions = [(32, 32)]
    return pipe


def kandinsky5_call(**more: Any) -> Arguments:
    """What makes the arguments that all pipelines of the family take, and `more`."""
    common = {
        "prompt": "a cat",
        "negative_prompt": "bad",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "max_sequence_length": 1024,
        "output_type": "np",
    }
    return arguments(**{**common, **more})


@pipeline("Kandinsky5T2VPipeline")
def kandinsky5_t2v() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky5T2VPipeline

    return kandinsky5_pipeline(Kandinsky5T2VPipeline), kandinsky5_call(num_frames=5)


@pipeline("Kandinsky5I2VPipeline")
def kandinsky5_i2v() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky5I2VPipeline

    pipe = kandinsky5_pipeline(Kandinsky5I2VPipeline, visual_cond=True)
    # The last frames of five, in latents, are the reference for the brightness of the first four.
    return pipe, kandinsky5_call(image=picture(), num_frames=17)


@pipeline("Kandinsky5T2IPipeline")
def kandinsky5_t2i() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky5T2IPipeline

    return kandinsky5_pipeline(Kandinsky5T2IPipeline, video=False), kandinsky5_call()


@pipeline("Kandinsky5I2IPipeline")
def kandinsky5_i2i() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky5I2IPipeline

    pipe = kandinsky5_pipeline(Kandinsky5I2IPipeline, visual_cond=True, video=False)
    return pipe, kandinsky5_call(image=picture())
