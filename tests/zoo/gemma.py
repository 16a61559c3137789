"""A small Gemma: its tokenizer, and the text encoders of several versions."""

from __future__ import annotations

from typing import Any

import torch

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
# The tokenizer has 100 symbols; the embedding is padded to a round number as the real checkpoints do.
GEMMA_VOCABULARY = 128


def gemma_tokenizer() -> Any:
    """A `GemmaTokenizer` whose vocabulary is the printable ASCII characters."""
    from transformers import GemmaTokenizer

    symbols = [*SPECIALS, "\u2581", *(chr(code) for code in range(33, 127))]
    return GemmaTokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[], model_max_length=512
    )


def gemma2(hidden: int = 16) -> Any:
    """A `Gemma2Model`, whose layers look at a window and at everything in turn."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=GEMMA_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=64,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    torch.manual_seed(60)
    return Gemma2Model(config).eval()


def gemma3(hidden: int = 16) -> Any:
    """A `Gemma3ForConditionalGeneration`: its text layers, and a vision tower that a text doesn't use."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={
            "vocab_size": GEMMA_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 64,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=5,
        eoi_token_index=6,
        image_token_index=7,
    )
    torch.manual_seed(61)
    return Gemma3ForConditionalGeneration(config).eval()


def t5gemma2_encoder(hidden: int = 32) -> Any:
    """A `T5Gemma2Encoder`, whose vision tower sees four patches a picture."""
    from transformers import T5Gemma2EncoderConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    config = T5Gemma2EncoderConfig(
        text_config={
            "vocab_size": GEMMA_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 64,
            "max_position_embeddings": 512,
            "dropout_rate": 0.0,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(62)
    return T5Gemma2Encoder(config).eval()


def t5gemma_encoder(hidden: int = 32) -> Any:
    """A `T5GemmaEncoderModel`."""
    from transformers import T5GemmaConfig, T5GemmaEncoderModel

    module = {
        "vocab_size": GEMMA_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "max_position_embeddings": 512,
    }
    config = T5GemmaConfig(encoder=module, decoder=module, is_encoder_decoder=False, vocab_size=GEMMA_VOCABULARY)
    torch.manual_seed(63)
    return T5GemmaEncoderModel(config).eval()
