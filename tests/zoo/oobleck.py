"""A small `AutoencoderOobleck`, the VAE of several audio models."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build


def oobleck_vae(latent_channels: int) -> Any:
    """Sixteen samples of two channels a latent, 64 a second."""
    from diffusers import AutoencoderOobleck

    return build(
        AutoencoderOobleck,
        94,
        encoder_hidden_size=8,
        downsampling_ratios=[4, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=latent_channels,
        sampling_rate=64,
    )
