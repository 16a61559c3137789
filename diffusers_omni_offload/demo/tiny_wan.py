"""A tiny Wan pipeline, built in memory: random weights, a tokenizer of single characters, nothing is downloaded.

It is a stock `diffusers.WanPipeline` with two DiTs (Wan 2.2's shape: high and low noise), small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = [
    "T5_VOCABULARY",
    "build_pipeline",
    "randomize_constants",
    "t5_tokenizer",
    "to_video",
    "umt5_encoder",
    "wan_transformer",
    "wan_vae",
]

# The tokenizer has 98 symbols; the embedding is padded to a round number as the real checkpoints do.
T5_VOCABULARY = 128


def t5_tokenizer(model_max_length: int = 512) -> Any:
    """A `T5Tokenizer` whose vocabulary is the printable ASCII characters."""
    from transformers import T5Tokenizer

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=model_max_length)


def randomize_constants(module: torch.nn.Module, seed: int, std: float = 0.05) -> torch.nn.Module:
    """Add noise to every parameter that is constant (zeros or ones), so that each block matters for the output.

    A gate that starts at zero would make its block the identity, and hide a block that ran with wrong weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(noise.to(parameter.dtype) * std)
    return module


def umt5_encoder(d_model: int = 32, num_layers: int = 2) -> Any:
    """A `UMT5EncoderModel` for `t5_tokenizer`; it gives embeddings of width `d_model`."""
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(1)
    config = UMT5Config(
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
    return UMT5EncoderModel(config).eval()


def wan_vae() -> Any:
    """An `AutoencoderKLWan` with 16 latent channels, 8x smaller in space and 4x in time."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(5)
    vae: Any = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return vae.eval()


def wan_transformer(
    in_channels: int = 16,
    num_layers: int = 4,
    seed: int = 7,
    image_dim: int | None = None,
    text_dim: int = 32,
) -> Any:
    """A `WanTransformer3DModel` of width 24; `image_dim` adds the cross attention to image embeddings (Wan 2.1)."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    model: Any = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=text_dim,
        freq_dim=256,
        ffn_dim=32,
        num_layers=num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        image_dim=image_dim,
        added_kv_proj_dim=24 if image_dim is not None else None,
    )
    return randomize_constants(model, seed).eval()


def build_pipeline(
    num_layers: int = 4,
    two_stage: bool = True,
    expand_timesteps: bool = False,
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A `WanPipeline` and a function that makes fresh arguments (a fresh generator) for one call of it.

    Args:
        num_layers: blocks of each DiT.
        two_stage: two DiTs as in Wan 2.2 A14B (a high-noise and a low-noise one), or one.
        expand_timesteps: one time step a token, as in Wan 2.2 TI2V 5B.
    """
    from diffusers import UniPCMultistepScheduler, WanPipeline

    pipe: Any = WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(),
        vae=wan_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=wan_transformer(num_layers=num_layers, seed=7),
        transformer_2=wan_transformer(num_layers=num_layers, seed=17) if two_stage else None,
        boundary_ratio=0.875 if two_stage else None,
        expand_timesteps=expand_timesteps,
    )
    pipe.set_progress_bar_config(disable=True)

    def call() -> dict[str, Any]:
        return {
            "prompt": "dance monkey",
            "negative_prompt": "negative",
            "height": 16,
            "width": 16,
            "num_frames": 5,
            "num_inference_steps": 2,
            "guidance_scale": 6.0,
            "guidance_scale_2": 3.0 if two_stage else None,
            "max_sequence_length": 16,
            "generator": torch.Generator("cpu").manual_seed(0),
            "output_type": "np",
        }

    return pipe, call


def to_video(output: Any) -> np.ndarray:
    """The frames of a pipeline's output: `[batch, frames, height, width, channels]`, float32 in 0 to 1."""
    return np.asarray(output.frames)
