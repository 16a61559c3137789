"""LongCat-Image and its editing pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import longcat_image_transformer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import normal, picture
from tests.zoo.processors import qwen2_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("LongCatImageTransformer2DModel")
def longcat_image_dit() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 64),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "img_ids": torch.arange(48.0).reshape(16, 3),
            "txt_ids": torch.zeros(5, 3),
        }

    return longcat_image_transformer(), inputs


@pipeline("LongCatImagePipeline")
def longcat_image() -> tuple[Any, Arguments]:
    return tiny.build_longcat_image()


@pipeline("LongCatImageEditPipeline")
def longcat_image_edit() -> tuple[Any, Arguments]:
    from diffusers import LongCatImageEditPipeline

    # The pipeline scales every picture up to 1024 x 1024, hence a VAE that is 32x smaller, and no decoding.
    own = {"vae": kl_vae(16, blocks=6), "text_processor": qwen2_vl_processor()}
    pipe = assemble(LongCatImageEditPipeline, longcat_image()[0].components, **own)
    pipe.tokenizer_max_length = 64
    call = arguments(
        image=picture(),
        prompt="a cat",
        negative_prompt="bad",
        num_inference_steps=2,
        guidance_scale=4.5,
        output_type="latent",
    )
    return pipe, call
