"""LTX-2: video and audio in one DiT."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.clips import clip
from tests.zoo.gemma import gemma3, gemma_tokenizer
from tests.zoo.modular import assemble_modular
from tests.zoo.registry import Arguments, pipeline, transformer

# Widths of both streams, which the refiner of SANA-WM takes, too.
LTX2 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 4,
    "caption_channels": 16,
    "rope_double_precision": False,
}


def ltx2_transformer(**config: Any) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    return build(LTX2VideoTransformer3DModel, 54, **{**LTX2, **config})


@transformer("LTX2VideoTransformer3DModel")
def ltx2() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 4),
            "audio_hidden_states": normal(1, 5, 4, seed=1),
            "encoder_hidden_states": normal(1, 8, 16, seed=2),
            "audio_encoder_hidden_states": normal(1, 8, 16, seed=3),
            "timestep": torch.tensor([500.0]),
            "encoder_attention_mask": torch.ones(1, 8),
            "num_frames": 2,
            "height": 2,
            "width": 2,
            "audio_num_frames": 5,
            "fps": 25.0,
        }

    return ltx2_transformer(), call


def ltx2_vae() -> Any:
    """4x smaller in space and in time."""
    from diffusers import AutoencoderKLLTX2Video

    vae = build(
        AutoencoderKLLTX2Video,
        55,
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=1,
        decoder_causal=False,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


def ltx2_components(**dit: Any) -> dict[str, Any]:
    from diffusers import AutoencoderKLLTX2Audio
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    heads: dict[str, Any] = {}
    for stream in ("video", "audio"):
        heads[f"{stream}_connector_num_attention_heads"] = 2
        heads[f"{stream}_connector_attention_head_dim"] = 8
        heads[f"{stream}_connector_num_layers"] = 2
        heads[f"{stream}_connector_num_learnable_registers"] = None
    return {
        "scheduler": flow_scheduler(),
        "vae": ltx2_vae(),
        "audio_vae": build(
            AutoencoderKLLTX2Audio,
            56,
            base_channels=4,
            ch_mult=(1,),
            num_res_blocks=1,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        ),
        "text_encoder": gemma3(),
        "tokenizer": gemma_tokenizer(),
        # All hidden states of the text encoder at once: its three layers' and the embeddings.
        "connectors": build(
            LTX2TextConnectors,
            57,
            caption_channels=16,
            text_proj_in_factor=4,
            connector_rope_base_seq_len=32,
            rope_double_precision=False,
            **heads,
        ),
        "transformer": ltx2_transformer(**dit),
        "vocoder": build(
            LTX2Vocoder,
            58,
            in_channels=16,
            hidden_channels=16,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
    }


# Guidance by text, by skipped blocks (of the third one) and by the other modality: four passes a step.
LTX2_CALL = {
    "prompt": "a robot dancing",
    "negative_prompt": "bad",
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "frame_rate": 25.0,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "spatio_temporal_guidance_blocks": [2],
    "use_cross_timestep": False,
    "max_sequence_length": 16,
    "output_type": "np",
}


@pipeline("LTX2Pipeline")
def ltx2_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2Pipeline

    return assemble(LTX2Pipeline, ltx2_components()), arguments(**LTX2_CALL)


@pipeline("LTX2ImageToVideoPipeline")
def ltx2_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2ImageToVideoPipeline

    return assemble(LTX2ImageToVideoPipeline, ltx2_components()), arguments(**LTX2_CALL, image=picture(), image_crf=0)


@pipeline("LTX2ConditionPipeline")
def ltx2_condition_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2ConditionPipeline
    from diffusers.pipelines.ltx2 import LTX2VideoCondition

    condition = LTX2VideoCondition(frames=picture(), index=0, strength=0.9, crf=0)
    return assemble(LTX2ConditionPipeline, ltx2_components()), arguments(**LTX2_CALL, conditions=[condition])


@pipeline("LTX2InContextPipeline")
def ltx2_in_context_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2InContextPipeline
    from diffusers.pipelines.ltx2 import LTX2ReferenceCondition

    reference = LTX2ReferenceCondition(frames=clip(5, 32, 32), strength=1.0)
    return assemble(LTX2InContextPipeline, ltx2_components()), arguments(**LTX2_CALL, reference_conditions=[reference])


@pipeline("LTX2HDRPipeline")
def ltx2_hdr_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2HDRPipeline
    from diffusers.pipelines.ltx2 import LTX2HDRReferenceCondition

    reference = LTX2HDRReferenceCondition(frames=clip(5, 32, 32), strength=1.0)
    call = {**LTX2_CALL, "spatio_temporal_guidance_blocks": None, "output_type": "pt"}
    return assemble(LTX2HDRPipeline, ltx2_components()), arguments(**call, reference_conditions=[reference])


@pipeline("LTX2LatentUpsamplePipeline")
def ltx2_upsample_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2LatentUpsamplePipeline

    pipe = LTX2LatentUpsamplePipeline(vae=ltx2_vae(), latent_upsampler=latent_upsampler(use_rational_resampler=False))
    return pipe, arguments(video=clip(5, 32, 32), height=32, width=32, num_frames=5, output_type="np")


def latent_upsampler(**config: Any) -> Any:
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    return build(LTX2LatentUpsamplerModel, 59, in_channels=4, mid_channels=32, num_blocks_per_stage=3, **config)


@pipeline("LTX2ModularPipeline")
def ltx2_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2AutoBlocks

    call = {name: LTX2_CALL[name] for name in LTX2_CALL if "guidance" not in name}
    return assemble_modular(LTX2AutoBlocks, ltx2_components()), arguments(**call)
