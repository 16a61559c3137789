"""Kolors: the UNet of Stable Diffusion XL, with a language model for the text."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.tiny import build_sdxl
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build
from tests.zoo.stable_diffusion import FROM_IMAGE, PERTURBED, SIZE, TEXT
from tests.zoo.unets import reshaped

HIDDEN = 32
"""Width of the language model."""
SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def chatglm_tokenizer() -> Any:
    """A `ChatGLMTokenizer` over single letters."""
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SYMBOLS] * 2),
        model_writer=model,
        model_type="char",
        vocab_size=len(SYMBOLS) + 4,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    # It reads a file; once that is read, the file may go.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.model")
        file.write_bytes(model.getvalue())
        return ChatGLMTokenizer(str(file), model_max_length=256)


def chatglm() -> Any:
    """A `ChatGLMModel` for its tokenizer."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel, RMSNorm

    config = ChatGLMConfig(
        num_layers=3,
        padded_vocab_size=128,
        hidden_size=HIDDEN,
        ffn_hidden_size=64,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=256,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = build(ChatGLMModel, 71, config=config, empty_init=False)
    # The weights of its norms are whatever was in memory: a checkpoint is expected to fill them.
    generator = torch.Generator().manual_seed(71)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.normal_(module.weight, 1.0, 0.1, generator=generator)
    return model


def kolors(pipeline_class: type) -> Any:
    """A pipeline whose UNet projects the language model's states."""
    components = build_sdxl()[0].components
    unet = reshaped(components["unet"], encoder_hid_dim=HIDDEN, encoder_hid_dim_type="text_proj")
    language = {"tokenizer": chatglm_tokenizer(), "text_encoder": chatglm()}
    return assemble(pipeline_class, components, unet=unet, **language, **PERTURBED)


register_all(
    kolors,
    {
        "KolorsPipeline": {**TEXT, **SIZE},
        "KolorsImg2ImgPipeline": {**FROM_IMAGE, **SIZE},
        "KolorsPAGPipeline": {**TEXT, **SIZE, "pag_scale": 3.0},
    },
)
