"""Text and image encoders with a few narrow layers and random weights."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import T5_VOCABULARY, umt5_encoder

from .tokenizers import CLIP_VOCABULARY, MISTRAL_SPECIALS, MISTRAL_VOCABULARY, QWEN_VOCABULARY

__all__ = ["clip_text", "clip_vision", "mistral3", "qwen3", "qwen3_vl", "qwen25_vl", "t5_encoder", "umt5_encoder"]


def t5_encoder(d_model: int = 32, num_layers: int = 2) -> Any:
    """A `T5EncoderModel` for the T5 tokenizer."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(2)
    config = T5Config(
        vocab_size=T5_VOCABULARY,
        d_model=d_model,
        d_kv=8,
        d_ff=64,
        num_layers=num_layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5EncoderModel(config).eval()


def clip_text(projection: bool, hidden: int = 32, projected: int = 32, layers: int = 3, seed: int = 3) -> Any:
    """A `CLIPTextModel`, or a `CLIPTextModelWithProjection`, for the CLIP tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=CLIP_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=layers,
        projection_dim=projected,
        hidden_act="gelu",
        max_position_embeddings=77,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    torch.manual_seed(seed)
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def clip_vision(hidden: int = 16, image_size: int = 32, patch: int = 16) -> tuple[Any, Any]:
    """A `CLIPVisionModel` and its image processor."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=hidden,
        projection_dim=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=image_size,
        intermediate_size=32,
        patch_size=patch,
    )
    torch.manual_seed(4)
    processor = CLIPImageProcessorPil(
        crop_size={"height": image_size, "width": image_size}, size={"shortest_edge": image_size}
    )
    return CLIPVisionModel(config).eval(), processor


def qwen25_vl(hidden: int = 32, layers: int = 3) -> Any:
    """A `Qwen2_5_VLForConditionalGeneration` for the Qwen tokenizer; it generates greedily."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(8)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": QWEN_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]},
            "bos_token_id": 256,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=259,
        vision_end_token_id=260,
        vision_token_id=261,
        image_token_id=262,
        video_token_id=263,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = 258
    model.generation_config.pad_token_id = 256
    model.generation_config.do_sample = False
    return model


def mistral3(hidden: int = 16, layers: int = 4) -> Any:
    """A `Mistral3ForConditionalGeneration` for the Mistral tokenizer."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(10)
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": MISTRAL_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 32,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_hidden_layers": layers,
            "head_dim": 4,
            "num_key_value_heads": 2,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "image_size": 24,
            "patch_size": 6,
            "num_channels": 3,
        },
        image_token_index=MISTRAL_SPECIALS.index("[IMG]"),
        spatial_merge_size=1,
        vision_feature_layer=-1,
    )
    return Mistral3ForConditionalGeneration(config).eval()


def qwen3(hidden: int = 32, layers: int = 3) -> Any:
    """A `Qwen3Model` for the Qwen tokenizer."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(20)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=QWEN_VOCABULARY,
        max_position_embeddings=4096,
    )
    return Qwen3Model(config).eval()


def qwen3_vl(hidden: int = 16, layers: int = 52) -> Any:
    """A `Qwen3VLForConditionalGeneration`; MiniMax-H3 reads its `hidden_states[50]`, hence 52 layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(22)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": QWEN_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=262,
        video_token_id=263,
        vision_start_token_id=259,
        vision_end_token_id=260,
    )
    return Qwen3VLForConditionalGeneration(config).eval()
