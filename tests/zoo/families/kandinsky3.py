"""Kandinsky 3: a UNet of its own, with T5 for the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.text_encoders import t5_encoder
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, normal
from tests.zoo.families.kandinsky import movq
from tests.zoo.registry import Arguments, transformer
from tests.zoo.stable_diffusion import FROM_IMAGE, SIZE, TEXT, ddim_scheduler


@transformer("Kandinsky3UNet")
def kandinsky3_unet() -> tuple[nn.Module, Arguments]:
    from diffusers import Kandinsky3UNet

    unet = build(
        Kandinsky3UNet,
        91,
        # Which blocks attend is fixed for four.
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=2,
        time_embedding_dim=16,
        groups=4,
        attention_head_dim=8,
        cross_attention_dim=16,
        encoder_hid_dim=32,
    )
    return unet, lambda: {
        "sample": normal(2, 4, 16, 16),
        "timestep": 500,
        "encoder_hidden_states": normal(2, 12, 32, seed=1),
        "encoder_attention_mask": (torch.arange(12) < 9).repeat(2, 1),
    }


def kandinsky(pipeline_class: type) -> Any:
    """A pipeline of these components."""
    components = {
        "tokenizer": t5_tokenizer(128),
        "text_encoder": t5_encoder(32, num_layers=3),
        "unet": kandinsky3_unet()[0],
        "scheduler": ddim_scheduler(),
        "movq": movq(),
    }
    return assemble(pipeline_class, components)


register_all(kandinsky, {"Kandinsky3Pipeline": {**TEXT, **SIZE}, "Kandinsky3Img2ImgPipeline": FROM_IMAGE})
