"""Small models that read pictures: CLIP's and SigLIP's vision towers, and a depth estimator."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build


def clip_processor(image_size: int = 32) -> Any:
    """A `CLIPImageProcessor` that doesn't need torchvision."""
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(
        crop_size={"height": image_size, "width": image_size}, size={"shortest_edge": image_size}
    )


def clip_vision_projection(projected: int = 32, image_size: int = 32) -> Any:
    """A `CLIPVisionModelWithProjection` with embeddings of width `projected`."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=16,
        projection_dim=projected,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=image_size,
        intermediate_size=32,
        patch_size=16,
    )
    return build(CLIPVisionModelWithProjection, 51, config=config)


def safety_checker() -> Any:
    """A `StableDiffusionSafetyChecker` to which every picture is harmless."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    checker = build(StableDiffusionSafetyChecker, 52, config=CLIPConfig(projection_dim=16, vision_config=vision))
    # Similarities are at most one: above these thresholds there is nothing.
    checker.concept_embeds_weights.data.fill_(2.0)
    checker.special_care_embeds_weights.data.fill_(2.0)
    return checker


def depth_estimator() -> tuple[Any, Any]:
    """A `DPTForDepthEstimation` and its image processor."""
    from transformers import DPTConfig, DPTForDepthEstimation, DPTImageProcessorPil

    config = DPTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[4, 8, 8, 8],
        fusion_hidden_size=8,
        head_in_index=-1,
        initializer_range=0.2,
    )
    model = build(DPTForDepthEstimation, 53, config=config)
    # Else its last ReLU would make everything equally deep: zero.
    model.head.head[-2].bias.data.fill_(1.0)
    return model, DPTImageProcessorPil(size={"height": 32, "width": 32})


def siglip_vision(hidden: int = 16, image_size: int = 28) -> tuple[Any, Any]:
    """A `SiglipVisionModel`, four patches a picture, and its image processor."""
    from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=14,
    )
    processor = SiglipImageProcessorPil(size={"height": image_size, "width": image_size})
    return build(SiglipVisionModel, 54, config=config), processor
