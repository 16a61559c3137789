"""Kandinsky 2.2: the UNet reads nothing but a picture's embedding, and the ControlNet is built in."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import normal, picture
from tests.zoo.families.kandinsky import (
    EMBEDDED,
    FROM_IMAGE,
    MASKED,
    ONLY_PRIOR,
    PRIOR,
    image_unet,
    movq,
    prior,
    prior_components,
)
from tests.zoo.stable_diffusion import SIZE, TEXT, ddim_scheduler

DECODED: dict[str, Any] = {
    **SIZE,
    **EMBEDDED,
    **{name: TEXT[name] for name in ("num_inference_steps", "guidance_scale", "output_type")},
}
# Eight times the size of the latents.
HINT: dict[str, Any] = {"hint": normal(1, 3, 128, 128, seed=2)}


def kandinsky(pipeline_class: type, in_channels: int = 4, added: str = "image") -> Any:
    """A pipeline that needs the embedding of a picture, or makes it itself."""
    components = {
        "unet": image_unet(in_channels=in_channels, encoder_hid_dim_type="image_proj", addition_embed_type=added),
        "movq": movq(),
        "scheduler": ddim_scheduler(),
    }
    return assemble(pipeline_class, components, **prior_components("prior_"))


def inpainting(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a mask and a masked picture beside the latents."""
    return kandinsky(pipeline_class, in_channels=9)


def hinted(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads a hint beside the latents."""
    return kandinsky(pipeline_class, in_channels=8, added="image_hint")


register_all(
    prior,
    {
        "KandinskyV22PriorPipeline": {**ONLY_PRIOR, "negative_prompt": "bad"},
        "KandinskyV22PriorEmb2EmbPipeline": {
            **ONLY_PRIOR,
            "negative_prompt": "bad",
            "image": picture(),
            "num_inference_steps": 3,
            "strength": 0.8,
        },
    },
)
register_all(
    kandinsky,
    {
        "KandinskyV22Pipeline": DECODED,
        "KandinskyV22Img2ImgPipeline": {**DECODED, **FROM_IMAGE},
        "KandinskyV22CombinedPipeline": {**TEXT, **SIZE, **PRIOR},
        "KandinskyV22Img2ImgCombinedPipeline": {**TEXT, **SIZE, **PRIOR, **FROM_IMAGE},
    },
)
register_all(
    inpainting,
    {
        "KandinskyV22InpaintPipeline": {**DECODED, **MASKED},
        "KandinskyV22InpaintCombinedPipeline": {**TEXT, **SIZE, **PRIOR, **MASKED},
    },
)
register_all(
    hinted,
    {
        "KandinskyV22ControlnetPipeline": {**DECODED, **HINT},
        "KandinskyV22ControlnetImg2ImgPipeline": {**DECODED, **FROM_IMAGE, **HINT},
    },
)
