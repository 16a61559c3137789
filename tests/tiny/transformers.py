"""DiTs (and one UNet) with a few narrow blocks and random weights; no parameter is constant, so each block matters."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import randomize_constants

from .tokenizers import QWEN_VOCABULARY


def flux2_transformer(num_layers: int = 3, num_single_layers: int = 4) -> Any:
    """A `Flux2Transformer2DModel`: two stacks, of double and of single blocks."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(9)
    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return randomize_constants(model, 9).eval()


def sd3_transformer(num_layers: int = 4) -> Any:
    """An `SD3Transformer2DModel`; its first two blocks have a second attention, its last one has no context output."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(12)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    return randomize_constants(model, 12).eval()


def qwen_image_transformer(num_layers: int = 4) -> Any:
    """A `QwenImageTransformer2DModel`."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(14)
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=num_layers,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    return randomize_constants(model, 14).eval()


def sdxl_unet() -> Any:
    """A `UNet2DConditionModel` of SDXL's shape: plain, cross-attention, cross-attention, and back."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(16)
    return UNet2DConditionModel(
        block_out_channels=(8, 16, 16),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
        norm_num_groups=4,
    ).eval()


def longcat_image_transformer(num_layers: int = 3, num_single_layers: int = 4) -> Any:
    """A `LongCatImageTransformer2DModel`: two stacks, of double and of single blocks."""
    from diffusers import LongCatImageTransformer2DModel

    torch.manual_seed(18)
    model = LongCatImageTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return randomize_constants(model, 18).eval()


def ovis_image_transformer(num_layers: int = 3, num_single_layers: int = 4) -> Any:
    """An `OvisImageTransformer2DModel`: two stacks, of double and of single blocks."""
    from diffusers import OvisImageTransformer2DModel

    torch.manual_seed(19)
    model = OvisImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return randomize_constants(model, 19).eval()


def cosmos3_omni_transformer(num_layers: int = 4) -> Any:
    """A `Cosmos3OmniTransformer`: one stack, whose layers hold the understanding and the generation pathway both."""
    from diffusers import Cosmos3OmniTransformer

    torch.manual_seed(21)
    model = Cosmos3OmniTransformer(
        head_dim=8,
        hidden_size=16,
        intermediate_size=32,
        latent_channel=16,
        latent_patch_size=2,
        num_attention_heads=2,
        num_hidden_layers=num_layers,
        num_key_value_heads=1,
        patch_latent_dim=64,
        rope_axes_dim=[2, 1, 1],
        vocab_size=QWEN_VOCABULARY,
    )
    return randomize_constants(model, 21).eval()


def minimax_h3_transformer(num_layers: int = 3, num_refiner_layers: int = 2) -> Any:
    """A `MiniMaxH3Transformer3DModel`: video and audio in one DiT, with a refiner for the text."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(23)
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=num_layers,
        num_refiner_layers=num_refiner_layers,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=8,
        patch_size=(1, 2, 2),
        text_dim=16,
        freq_dim=8,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    return randomize_constants(model, 23).eval()
