"""OmniGen, whose DiT reads the tokens of the text itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import QWEN_VOCABULARY, qwen_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def omnigen_dit() -> Any:
    """An `OmniGenTransformer2DModel`."""
    from diffusers import OmniGenTransformer2DModel

    return build(
        OmniGenTransformer2DModel,
        seed=43,
        in_channels=4,
        patch_size=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_layers=4,
        pad_token_id=0,
        vocab_size=QWEN_VOCABULARY,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        time_step_dim=16,
        rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
    )


@transformer("OmniGenTransformer2DModel")
def omnigen_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        # 4 tokens of text, the time token, 16 patches of the image.
        length = 4 + 1 + 16
        return {
            "hidden_states": normal(1, 4, 8, 8),
            "timestep": torch.tensor([0.3]),
            "input_ids": torch.tensor([[65, 66, 67, 68]]),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(1, length, length),
            "position_ids": torch.arange(length)[None],
        }

    return omnigen_dit(), inputs


@pipeline("OmniGenPipeline")
def omnigen() -> tuple[Any, Arguments]:
    from diffusers import OmniGenPipeline
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    processor = processor_omnigen.OmniGenMultiModalProcessor
    # The constructor prepares transforms of torchvision for the pictures that one may give: none is given here.
    with (
        mock.patch.object(processor_omnigen, "transforms", mock.Mock(), create=True),
        mock.patch.object(pipeline_omnigen, "OmniGenMultiModalProcessor", processor, create=True),
    ):
        pipe = OmniGenPipeline(
            transformer=omnigen_dit(), scheduler=flow_scheduler(), vae=kl_vae(4, blocks=4), tokenizer=qwen_tokenizer()
        )
    call = arguments(prompt="a cat", height=64, width=64, num_inference_steps=2, guidance_scale=2.5, output_type="np")
    return pipe, call
