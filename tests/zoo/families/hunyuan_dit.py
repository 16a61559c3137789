"""HunyuanDiT: text to image, with perturbed attention guidance, and with a ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.text_encoders import t5_encoder
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.registry import Arguments, pipeline, transformer
from tests.zoo.seeding import seeded
from tests.zoo.tokenizers import BERT_VOCABULARY, bert_tokenizer


def hunyuan_dit(num_layers: int = 4) -> Any:
    """A `HunyuanDiT2DModel`: the blocks of its second half read the outputs of the first half's."""
    from diffusers import HunyuanDiT2DModel

    return build(
        HunyuanDiT2DModel,
        141,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
        text_len=77,
        text_len_t5=256,
    )


@transformer("HunyuanDiT2DModel")
def hunyuan_dit_transformer() -> tuple[nn.Module, Arguments]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": torch.tensor([500.0, 500.0]),
            "encoder_hidden_states": normal(2, 77, 32, seed=1),
            "text_embedding_mask": (torch.arange(77) < 9).long().repeat(2, 1),
            "encoder_hidden_states_t5": normal(2, 256, 32, seed=2),
            "text_embedding_mask_t5": (torch.arange(256) < 12).long().repeat(2, 1),
            "image_meta_size": torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]]).repeat(2, 1),
            "style": torch.zeros(2, dtype=torch.long),
            "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), output_type="pt"),
        }

    return hunyuan_dit(), arguments


def bert_encoder() -> Any:
    """A `BertModel` for the BERT tokenizer."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=BERT_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=77,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return build(BertModel, 142, config=config)


def hunyuan_pipeline(pipeline_class: Any, **more: Any) -> Any:
    """A HunyuanDiT pipeline with its two text encoders: BERT and T5."""
    from diffusers import DDPMScheduler

    return pipeline_class(
        **{"transformer": hunyuan_dit(), **more},
        # The pipelines assume that latents are 8 times smaller.
        vae=kl_vae(4, blocks=4, shift=None),
        scheduler=DDPMScheduler(),
        text_encoder=bert_encoder(),
        tokenizer=bert_tokenizer(),
        text_encoder_2=t5_encoder(32),
        tokenizer_2=t5_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def hunyuan_call(**more: Any) -> Arguments:
    """What makes the arguments that all HunyuanDiT pipelines take, and `more`."""
    return arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=5.0,
        use_resolution_binning=False,
        output_type="np",
        **more,
    )


@pipeline("HunyuanDiTPipeline")
def hunyuan_dit_text_to_image() -> tuple[Any, Arguments]:
    from diffusers import HunyuanDiTPipeline

    return hunyuan_pipeline(HunyuanDiTPipeline), hunyuan_call()


@pipeline("HunyuanDiTPAGPipeline")
def hunyuan_dit_pag() -> tuple[Any, Arguments]:
    from diffusers import HunyuanDiTPAGPipeline

    return hunyuan_pipeline(HunyuanDiTPAGPipeline, pag_applied_layers="blocks.1"), hunyuan_call(pag_scale=3.0)


@pipeline("HunyuanDiTControlNetPipeline")
def hunyuan_dit_controlnet() -> tuple[Any, Arguments]:
    from diffusers import HunyuanDiT2DControlNetModel, HunyuanDiTControlNetPipeline

    # Its two blocks feed the two blocks of the DiT that take skip connections.
    controlnet = build(
        HunyuanDiT2DControlNetModel,
        143,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        transformer_num_layers=6,
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
    )
    pipe = hunyuan_pipeline(HunyuanDiTControlNetPipeline, transformer=hunyuan_dit(6), controlnet=controlnet)
    # The control image's latents are drawn without the generator.
    return pipe, seeded(hunyuan_call(control_image=picture(64, 64)))
