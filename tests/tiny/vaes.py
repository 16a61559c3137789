"""VAEs with a few narrow layers and random weights."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import wan_vae

__all__ = ["flux2_vae", "kl_vae", "minimax_h3_audio_vae", "minimax_h3_vae", "qwen_image_vae", "wan_vae"]


def kl_vae(
    latent_channels: int = 4,
    blocks: int = 2,
    shift: float | None = 0.0609,
    scaling: float = 1.5035,
    quant: bool = False,
) -> Any:
    """An `AutoencoderKL` that is `2 ** (blocks - 1)` times smaller in space."""
    from diffusers import AutoencoderKL

    torch.manual_seed(6)
    shift_arguments = {} if shift is None else {"shift_factor": shift}
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4,) * blocks,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=latent_channels,
        norm_num_groups=1,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        scaling_factor=scaling,
        **shift_arguments,
    ).eval()


def flux2_vae() -> Any:
    """An `AutoencoderKLFlux2` with 4 latent channels."""
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(11)
    return AutoencoderKLFlux2(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4, 4),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=True,
        use_post_quant_conv=True,
    ).eval()


def qwen_image_vae() -> Any:
    """An `AutoencoderKLQwenImage` with 4 latent channels."""
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(15)
    return AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()


def minimax_h3_vae() -> Any:
    """An `AutoencoderKLMiniMaxH3` with 4 latent channels, 16x smaller in space and 4x in time."""
    from diffusers import AutoencoderKLMiniMaxH3

    torch.manual_seed(24)
    return AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=8,
        decoder_num_register_tokens=2,
        decoder_ffn_mult=2,
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    ).eval()


def minimax_h3_audio_vae() -> Any:
    """An `AutoencoderKLMiniMaxH3Audio` with 8 latent channels."""
    from diffusers.modular_pipelines.minimax_h3.decoders import AutoencoderKLMiniMaxH3Audio

    torch.manual_seed(25)
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        encoder_rates=(2, 4, 4, 5, 5),
        latent_dim=16,
        latent_channels=8,
        num_attention_heads=2,
        decoder_dim=128,
        decoder_rates=(5, 5, 2, 2, 2, 2, 2),
        decoder_kernel_sizes=(9, 9, 4, 4, 4, 4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    ).eval()
