"""LTX-2 with keyframes of its own making (DFR), its refinement in time, and its decoder that denoises."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal
from tests.zoo.families.ltx2 import LTX2_CALL, latent_upsampler, ltx2_components
from tests.zoo.registry import Arguments, pipeline

_CALL = {
    name: LTX2_CALL[name]
    for name in ("prompt", "height", "width", "frame_rate", "use_cross_timestep", "max_sequence_length", "output_type")
}


def dfr_components() -> dict[str, Any]:
    """The DiT marks keyframes, and knows the VAE's scale."""
    return ltx2_components(vae_scale_factors=(4, 4, 4), use_keyframes_abs_pos_embedding=True)


@pipeline("LTX2DFRPipeline")
def ltx2_dfr_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2DFRPipeline

    return assemble(LTX2DFRPipeline, dfr_components()), arguments(**_CALL, num_frames=9, sigmas=[1.0, 0.5])


@pipeline("LTX2DFRTemporalRefinePipeline")
def ltx2_dfr_refine_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler

    pipe = assemble(
        LTX2DFRTemporalRefinePipeline,
        {**dfr_components(), "scheduler": LTXEulerAncestralRFScheduler(eta=0.5)},
        temporal_latent_upsampler=latent_upsampler(spatial_upsample=False, temporal_upsample=True),
    )
    return pipe, arguments(
        **_CALL,
        num_frames=9,
        sigmas=[0.75, 0.25],
        latents=normal(1, 4, 3, 8, 8),
        keyframes_latents=normal(1, 4, 1, 8, 8, seed=1),
        keyframe_positions=[8],
        audio_latents=normal(1, 2, 8, 2, seed=2),
    )


@pipeline("LTX2VideoDiffusionDecodePipeline")
def ltx2_diffusion_decode_pipeline() -> tuple[Any, Arguments]:
    """No DiT but a decoder, 4x larger in space and 8x in time."""
    from diffusers import LTX2VideoDiffusionDecodePipeline, LTX2VideoDiffusionDecoderModel
    from diffusers.schedulers import FlowMatchEulerDiscreteScheduler

    decoder = build(
        LTX2VideoDiffusionDecoderModel,
        63,
        latent_channels=8,
        patch_size=2,
        decoder_head_dim=8,
        decoder_stage_channels=(32, 16, 8, 8, 8),
        decoder_stage_depths=(1, 1, 1, 1, 3),
        decoder_stage_kernels=((3, 3, 3),) * 4,
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
        decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(3, 3, 3),
        decoder_t_emb_dim=16,
        spatial_compression_ratio=4,
    )
    pipe = LTX2VideoDiffusionDecodePipeline(decoder, FlowMatchEulerDiscreteScheduler())
    return pipe, arguments(latents=normal(1, 8, 2, 3, 3), output_type="np")
