"""MiniMax Music 3: the DiT of its audio, and the decoder of its codebooks."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def music_transformer(channels: int = 8, condition_dim: int = 16) -> Any:
    from diffusers import MiniMaxMusic3Transformer1DModel

    return build(
        MiniMaxMusic3Transformer1DModel,
        110,
        in_channels=channels,
        condition_dim=condition_dim,
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=16,
        ff_inner_dim=48,
        rotary_dim=8,
        fourier_embedding_dim=16,
    )


def depth_decoder(hidden_size: int = 32, audio_vocabulary: int = 32) -> Any:
    from diffusers.models.transformers import MiniMaxMusic3RVQDepthDecoder

    return build(
        MiniMaxMusic3RVQDepthDecoder,
        111,
        hidden_size=hidden_size,
        num_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        audio_vocab_size=audio_vocabulary,
        num_codebooks=4,
    )


@transformer("MiniMaxMusic3Transformer1DModel")
def minimax_music3() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 12),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 12, 16, seed=1),
        }

    return music_transformer(), call


@transformer("MiniMaxMusic3RVQDepthDecoder")
def minimax_music3_depth_decoder() -> tuple[Any, Arguments]:
    return depth_decoder(), lambda: {"inputs_embeds": normal(1, 5, 32)}


def language_model() -> Any:
    """A `Qwen3ForCausalLM` with a narrow embedding of the real vocabulary: the tokens of the sound have fixed ids."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=168_064,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return build(Qwen3ForCausalLM, 112, config=config)


@pipeline("MiniMaxMusic3ModularPipeline")
def minimax_music3_pipeline() -> tuple[Any, Arguments]:
    """It calls parts of its language model and of its depth decoder in turn, frame by frame."""
    from diffusers import MiniMaxMusic3ConditionEncoder, MiniMaxMusic3Vocoder
    from diffusers.guiders import ClassifierFreeGuidance
    from diffusers.modular_pipelines import MiniMaxMusic3Blocks

    pipe = MiniMaxMusic3Blocks().init_pipeline()
    pipe.update_components(
        tokenizer=qwen_tokenizer(),
        language_model=language_model(),
        rvq_depth_decoder=depth_decoder(16),
        condition_encoder=build(
            MiniMaxMusic3ConditionEncoder,
            113,
            condition_hidden_dim=16,
            num_condition_layers=4,
            out_dim=16,
            input_sampling_rate=24,
            input_hop_length=6,
            output_sampling_rate=64,
            output_hop_length=8,
        ),
        transformer=music_transformer(),
        scheduler=flow_scheduler(),
        guider=ClassifierFreeGuidance(guidance_scale=1.7),
        vocoder=build(
            MiniMaxMusic3Vocoder,
            114,
            latent_channels=8,
            decoder_input_dim=16,
            decoder_hidden_dim=16,
            upsampling_ratios=(4, 2),
            sampling_rate=64,
        ),
    )
    return pipe, arguments(
        prompt="a piano", lyrics="[verse]\nla la", audio_duration=1.0, num_inference_steps=2, output_type="np"
    )
