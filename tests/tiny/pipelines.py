"""Tiny stock pipelines: `build_<name>(...) -> (pipe, call)`, where `call()` makes fresh arguments for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from diffusers_omni_offload.demo.tiny_wan import build_pipeline as build_wan
from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer, wan_transformer

from . import text_encoders, transformers, vaes
from .tokenizers import clip_tokenizer, pixtral_processor, qwen2vl_processor, qwen_tokenizer

Call = Callable[[], dict[str, Any]]


def generator(seed: int = 0) -> torch.Generator:
    """A CPU generator, so that the latents don't depend on the device."""
    return torch.Generator("cpu").manual_seed(seed)


def flow_scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def unipc_scheduler() -> Any:
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def build_wan_i2v(num_layers: int = 4, image_encoder: bool = False) -> tuple[Any, Call]:
    """WanImageToVideoPipeline: two DiTs and no image encoder (Wan 2.2), or one of each (`image_encoder`, Wan 2.1)."""
    from diffusers import WanImageToVideoPipeline

    encoder, processor = text_encoders.clip_vision(16) if image_encoder else (None, None)
    pipe = WanImageToVideoPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=text_encoders.umt5_encoder(),
        vae=vaes.wan_vae(),
        scheduler=unipc_scheduler(),
        image_processor=processor,
        image_encoder=encoder,
        transformer=wan_transformer(36, num_layers, 7, 16 if image_encoder else None),
        transformer_2=None if image_encoder else wan_transformer(36, num_layers, 17),
        boundary_ratio=None if image_encoder else 0.9,
    )
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)

    def call() -> dict[str, Any]:
        return {
            "image": Image.fromarray(pixels),
            "prompt": "dance monkey",
            "negative_prompt": "negative",
            "height": 16,
            "width": 16,
            "num_frames": 5,
            "num_inference_steps": 2,
            "guidance_scale": 6.0,
            "max_sequence_length": 16,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_flux2(num_layers: int = 3, num_single_layers: int = 4) -> tuple[Any, Call]:
    """Flux2Pipeline."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline(
        scheduler=flow_scheduler(),
        vae=vaes.flux2_vae(),
        text_encoder=text_encoders.mistral3(),
        tokenizer=pixtral_processor(),
        transformer=transformers.flux2_transformer(num_layers, num_single_layers),
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "a dog is dancing",
            "height": 16,
            "width": 16,
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "max_sequence_length": 64,
            "text_encoder_out_layers": (1, 2, 3),
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_sd3(num_layers: int = 4, t5: bool = True) -> tuple[Any, Call]:
    """StableDiffusion3Pipeline with two CLIP text encoders, and T5 if `t5`."""
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline(
        transformer=transformers.sd3_transformer(num_layers),
        scheduler=flow_scheduler(),
        vae=vaes.kl_vae(4),
        text_encoder=text_encoders.clip_text(True, seed=3),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoders.clip_text(True, seed=13),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=text_encoders.t5_encoder(64) if t5 else None,
        tokenizer_3=t5_tokenizer() if t5 else None,
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "A squirrel",
            "negative_prompt": "bad",
            "height": 16,
            "width": 16,
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "max_sequence_length": 16,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_qwen_image(num_layers: int = 4) -> tuple[Any, Call]:
    """QwenImagePipeline."""
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline(
        scheduler=flow_scheduler(),
        vae=vaes.qwen_image_vae(),
        text_encoder=text_encoders.qwen25_vl(32),
        tokenizer=qwen_tokenizer(),
        transformer=transformers.qwen_image_transformer(num_layers),
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "dance monkey",
            "negative_prompt": "bad quality",
            "height": 32,
            "width": 32,
            "num_inference_steps": 2,
            "true_cfg_scale": 3.0,
            "max_sequence_length": 256,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_sdxl() -> tuple[Any, Call]:
    """StableDiffusionXLPipeline: a UNet, whose VAE upcasts to float32."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    vae = vaes.kl_vae(4, shift=None, scaling=0.13025, quant=True)
    vae.register_to_config(force_upcast=True)
    pipe = StableDiffusionXLPipeline(
        unet=transformers.sdxl_unet(),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            steps_offset=1,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
        vae=vae,
        text_encoder=text_encoders.clip_text(False, seed=3),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoders.clip_text(True, seed=13),
        tokenizer_2=clip_tokenizer(),
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "A squirrel",
            "negative_prompt": "bad",
            "height": 32,
            "width": 32,
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_longcat_image(
    num_layers: int = 3, num_single_layers: int = 4, prompt_rewrite: bool = False
) -> tuple[Any, Call]:
    """LongCatImagePipeline; `prompt_rewrite` runs `text_encoder.generate()` (slow: 512 tokens)."""
    from diffusers import LongCatImagePipeline

    tokenizer = qwen_tokenizer()
    pipe = LongCatImagePipeline(
        scheduler=flow_scheduler(),
        vae=vaes.kl_vae(16),
        text_encoder=text_encoders.qwen25_vl(32),
        tokenizer=tokenizer,
        text_processor=qwen2vl_processor(tokenizer),
        transformer=transformers.longcat_image_transformer(num_layers, num_single_layers),
    )
    # A plain attribute, not configuration: it cuts the padded prompt, and has to be set again after loading.
    pipe.tokenizer_max_length = 64

    def call() -> dict[str, Any]:
        return {
            "prompt": "a cat",
            "negative_prompt": "bad",
            "height": 16,
            "width": 16,
            "num_inference_steps": 2,
            "guidance_scale": 4.5,
            "enable_prompt_rewrite": prompt_rewrite,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_ovis_image(num_layers: int = 3, num_single_layers: int = 4) -> tuple[Any, Call]:
    """OvisImagePipeline."""
    from diffusers import OvisImagePipeline

    pipe = OvisImagePipeline(
        scheduler=flow_scheduler(),
        vae=vaes.kl_vae(4),
        text_encoder=text_encoders.qwen3(),
        tokenizer=qwen_tokenizer(),
        transformer=transformers.ovis_image_transformer(num_layers, num_single_layers),
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "a cat",
            "negative_prompt": "bad",
            "height": 16,
            "width": 16,
            "num_inference_steps": 2,
            "guidance_scale": 2.0,
            "max_sequence_length": 256,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


def build_cosmos3_omni(num_layers: int = 4, num_frames: int = 5) -> tuple[Any, Call]:
    """Cosmos3OmniPipeline; it has no text encoder, the DiT reads the tokens."""
    from diffusers import Cosmos3OmniPipeline

    pipe = Cosmos3OmniPipeline(
        transformer=transformers.cosmos3_omni_transformer(num_layers),
        text_tokenizer=qwen_tokenizer(),
        vae=vaes.wan_vae(),
        scheduler=unipc_scheduler(),
        enable_safety_checker=False,
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "a dog",
            "negative_prompt": "bad quality",
            "height": 32,
            "width": 32,
            "num_frames": num_frames,
            "num_inference_steps": 2,
            "guidance_scale": 4.0,
            "use_system_prompt": False,
            "add_resolution_template": False,
            "add_duration_template": False,
            "enable_safety_check": False,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


class TokenTypeProcessor:
    """All that MiniMax-H3 asks of its processor when there is no image: one type for every token."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in ids]


def build_minimax_h3(
    num_layers: int = 3, num_refiner_layers: int = 2, num_inference_steps: int = 3
) -> tuple[Any, Call]:
    """MiniMaxH3ModularPipeline (text to video and audio): a `ModularPipeline`, which `reload` doesn't take.

    It calls `text_encoder.model(...)`, not `text_encoder(...)`.
    """
    from diffusers.modular_pipelines import MiniMaxH3Blocks
    from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3Scheduler

    pipe = MiniMaxH3Blocks().get_workflow("t2va").init_pipeline()
    pipe.update_components(
        text_encoder=text_encoders.qwen3_vl(),
        tokenizer=qwen_tokenizer(),
        processor=TokenTypeProcessor(),
        transformer=transformers.minimax_h3_transformer(num_layers, num_refiner_layers),
        vae=vaes.minimax_h3_vae(),
        audio_vae=vaes.minimax_h3_audio_vae(),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )

    def call() -> dict[str, Any]:
        return {
            "prompt": "a robot dancing",
            "height": 32,
            "width": 32,
            "num_frames": 124,
            "num_inference_steps": num_inference_steps,
            "generator": generator(),
            "output_type": "np",
        }

    return pipe, call


BUILDERS: dict[str, Callable[..., tuple[Any, Call]]] = {
    "wan": build_wan,
    "wan_i2v": build_wan_i2v,
    "flux2": build_flux2,
    "sd3": build_sd3,
    "qwen_image": build_qwen_image,
    "sdxl": build_sdxl,
    "longcat_image": build_longcat_image,
    "ovis_image": build_ovis_image,
    "cosmos3_omni": build_cosmos3_omni,
    "minimax_h3": build_minimax_h3,
}

# The same builders on other code paths of their pipelines.
VARIANTS: dict[str, Callable[[], tuple[Any, Call]]] = {
    "wan_single": lambda: build_wan(two_stage=False),
    "wan_ti2v": lambda: build_wan(two_stage=False, expand_timesteps=True),
    "wan_i2v_clip": lambda: build_wan_i2v(image_encoder=True),
    "sd3_no_t5": lambda: build_sd3(t5=False),
    "longcat_rewrite": lambda: build_longcat_image(prompt_rewrite=True),
    "cosmos3_t2i": lambda: build_cosmos3_omni(num_frames=1),
}
