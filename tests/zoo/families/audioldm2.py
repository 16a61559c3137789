"""AudioLDM 2: two text encoders and a language model tell a UNet what a spectrogram is to show."""

from __future__ import annotations

from typing import Any

from torch import nn

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny.text_encoders import t5_encoder
from tests.tiny.tokenizers import byte_characters
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer
from tests.zoo.stable_diffusion import ddim_scheduler

ROBERTA_SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *byte_characters(), "<mask>"]
LANGUAGE, TEXT = 16, 32
"""Widths of the language model and of the second text encoder."""


@transformer("AudioLDM2UNet2DConditionModel")
def audio_unet() -> tuple[nn.Module, Arguments]:
    from diffusers import AudioLDM2UNet2DConditionModel

    unet = build(
        AudioLDM2UNet2DConditionModel,
        141,
        sample_size=16,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=4,
        # In each block attention to the spectrogram itself, then to the language model's states, then to the text's.
        cross_attention_dim=[[None, LANGUAGE, TEXT]] * 3,
    )
    return unet, lambda: {
        "sample": normal(2, 4, 16, 8),
        "timestep": 500,
        "encoder_hidden_states": normal(2, 8, LANGUAGE, seed=1),
        "encoder_hidden_states_1": normal(2, 12, TEXT, seed=2),
    }


def clap() -> Any:
    """A `ClapModel` whose embeddings are as wide as the language model."""
    from transformers import ClapAudioConfig, ClapConfig, ClapModel, ClapTextConfig

    text = ClapTextConfig(
        vocab_size=len(ROBERTA_SYMBOLS),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=3,
        max_position_embeddings=64,
        projection_dim=LANGUAGE,
    )
    audio = ClapAudioConfig(
        spec_size=64,
        window_size=4,
        num_mel_bins=64,
        intermediate_size=32,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        num_hidden_layers=2,
        patch_embeds_hidden_size=16,
        hidden_size=32,
        projection_dim=LANGUAGE,
        patch_size=2,
        patch_stride=2,
    )
    config = ClapConfig(text_config=text.to_dict(), audio_config=audio.to_dict(), projection_dim=LANGUAGE)
    return build(ClapModel, 142, config=config)


def roberta_tokenizer() -> Any:
    """A `RobertaTokenizer`: one token a byte."""
    from transformers import RobertaTokenizer

    vocabulary = {symbol: index for index, symbol in enumerate(ROBERTA_SYMBOLS)}
    return RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=32)


def gpt2() -> Any:
    """A `GPT2LMHeadModel` that goes on from embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=LANGUAGE, n_layer=3, n_head=4, n_positions=128)
    config.max_new_tokens = 4
    return build(GPT2LMHeadModel, 143, config=config)


def hifi_gan() -> Any:
    """A `SpeechT5HifiGan` for spectrograms of 16 bands."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(
        model_in_dim=16,
        sampling_rate=16000,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )
    return build(SpeechT5HifiGan, 144, config=config)


def speaking(pipeline_class: type) -> Any:
    """A pipeline of these components."""
    from diffusers import AutoencoderKL
    from diffusers.pipelines.audioldm2 import AudioLDM2ProjectionModel
    from transformers import ClapFeatureExtractor

    vae = build(
        AutoencoderKL,
        145,
        in_channels=1,
        out_channels=1,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=1,
    )
    projection = build(
        AudioLDM2ProjectionModel, 146, text_encoder_dim=LANGUAGE, text_encoder_1_dim=TEXT, langauge_model_dim=LANGUAGE
    )
    components = {
        "unet": audio_unet()[0],
        "vae": vae,
        "scheduler": ddim_scheduler(),
        "text_encoder": clap(),
        "tokenizer": roberta_tokenizer(),
        "text_encoder_2": t5_encoder(TEXT, num_layers=3),
        "tokenizer_2": t5_tokenizer(77),
        "projection_model": projection,
        "language_model": gpt2(),
        "feature_extractor": ClapFeatureExtractor(feature_size=64),
        "vocoder": hifi_gan(),
    }
    return assemble(pipeline_class, components)


register_all(
    speaking,
    {
        "AudioLDM2Pipeline": {
            "prompt": "A squirrel",
            "negative_prompt": "bad",
            "audio_length_in_s": 32 * 4 / 16000,
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "max_new_tokens": 4,
        }
    },
)
