"""Language models of more kinds than `tests/tiny/text_encoders.py` has, for byte-level tokenizers."""

from __future__ import annotations

from typing import Any

from tests.tiny.tokenizers import MISTRAL_VOCABULARY, QWEN_VOCABULARY
from tests.zoo.building import build
from tests.zoo.gemma import GEMMA_VOCABULARY

_SHAPE = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_TOKENS = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}


def qwen3_causal(hidden: int = 16, layers: int = 3) -> Any:
    """A `Qwen3ForCausalLM` for the Qwen tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=QWEN_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, **_SHAPE, **_TOKENS)
    return build(Qwen3ForCausalLM, 41, config=config)


def smollm3(hidden: int = 32, layers: int = 4) -> Any:
    """A `SmolLM3ForCausalLM` for the Qwen tokenizer; every fourth of its layers has no positions."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    config = SmolLM3Config(vocab_size=QWEN_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, **shape, **_TOKENS)
    return build(SmolLM3ForCausalLM, 42, config=config)


def byt5_encoder(hidden: int = 32, layers: int = 3) -> Any:
    """A `T5EncoderModel` for transformers' own `ByT5Tokenizer`, whose vocabulary is the bytes."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=384,
        d_model=hidden,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return build(T5EncoderModel, 43, config=config)


def llama(hidden: int = 32, layers: int = 3) -> Any:
    """A `LlamaForCausalLM` for the Qwen tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=QWEN_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, **_SHAPE, **_TOKENS)
    return build(LlamaForCausalLM, 44, config=config)


def glm(hidden: int = 32, layers: int = 3) -> Any:
    """A `GlmModel` for the Qwen tokenizer."""
    from transformers import GlmConfig, GlmModel

    config = GlmConfig(vocab_size=QWEN_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, **_SHAPE, **_TOKENS)
    return build(GlmModel, 45, config=config)


def gemma(hidden: int = 32, layers: int = 3) -> Any:
    """A `GemmaModel` for the Gemma tokenizer."""
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(
        vocab_size=GEMMA_VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        **_SHAPE,
    )
    return build(GemmaModel, 46, config=config)


def ministral3(hidden: int = 16, layers: int = 3) -> Any:
    """A `Ministral3ForCausalLM` for the Mistral tokenizer."""
    from transformers import Ministral3Config, Ministral3ForCausalLM

    config = Ministral3Config(
        vocab_size=MISTRAL_VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        **_SHAPE,
    )
    return build(Ministral3ForCausalLM, 47, config=config)
