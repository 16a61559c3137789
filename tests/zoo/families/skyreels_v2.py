"""SkyReels V2: text and image to video, and the diffusion forcing pipelines."""

from __future__ import annotations

from typing import Any

from tests.tiny import text_encoders
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, picture
from tests.zoo.clips import clip
from tests.zoo.families.wan import WAN, WAN_CALL, wan_arguments, wan_components
from tests.zoo.registry import Arguments, pipeline, transformer


def skyreels_transformer(seed: int = 40, **config: Any) -> Any:
    from diffusers import SkyReelsV2Transformer3DModel

    return build(SkyReelsV2Transformer3DModel, seed, **WAN, **config)


@transformer("SkyReelsV2Transformer3DModel")
def skyreels() -> tuple[Any, Arguments]:
    return skyreels_transformer(), wan_arguments


@pipeline("SkyReelsV2Pipeline")
def skyreels_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SkyReelsV2Pipeline

    pipe = assemble(SkyReelsV2Pipeline, wan_components(), transformer=skyreels_transformer())
    return pipe, arguments(**WAN_CALL, num_frames=5)


@pipeline("SkyReelsV2ImageToVideoPipeline")
def skyreels_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SkyReelsV2ImageToVideoPipeline

    image_encoder, image_processor = text_encoders.clip_vision(16)
    pipe = assemble(
        SkyReelsV2ImageToVideoPipeline,
        wan_components(),
        image_encoder=image_encoder,
        image_processor=image_processor,
        transformer=skyreels_transformer(in_channels=36, image_dim=16, added_kv_proj_dim=24),
    )
    # The attention takes all but the last 512 tokens for the picture's.
    return pipe, arguments(**{**WAN_CALL, "max_sequence_length": 512}, image=picture(16, 16), num_frames=5)


def _diffusion_forcing(pipeline_class: type, **fixed: Any) -> tuple[Any, Arguments]:
    """Each frame has a time step of its own; later frames start later (`ar_step`)."""
    components = {**wan_components(), "scheduler": _forcing_scheduler()}
    pipe = assemble(pipeline_class, components, transformer=skyreels_transformer(inject_sample_info=True))
    return pipe, arguments(**WAN_CALL, base_num_frames=9, ar_step=1, causal_block_size=1, fps=24, **fixed)


def _forcing_scheduler() -> Any:
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)


@pipeline("SkyReelsV2DiffusionForcingPipeline")
def skyreels_forcing_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SkyReelsV2DiffusionForcingPipeline

    return _diffusion_forcing(SkyReelsV2DiffusionForcingPipeline, num_frames=9)


@pipeline("SkyReelsV2DiffusionForcingImageToVideoPipeline")
def skyreels_forcing_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SkyReelsV2DiffusionForcingImageToVideoPipeline

    return _diffusion_forcing(SkyReelsV2DiffusionForcingImageToVideoPipeline, image=picture(16, 16), num_frames=9)


@pipeline("SkyReelsV2DiffusionForcingVideoToVideoPipeline")
def skyreels_forcing_video_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import SkyReelsV2DiffusionForcingVideoToVideoPipeline

    return _diffusion_forcing(
        SkyReelsV2DiffusionForcingVideoToVideoPipeline, video=clip(5), num_frames=9, overlap_history=5
    )
