"""Shap-E: a prior makes the weights of a small network, which is rendered."""

from __future__ import annotations

from typing import Any

from tests.tiny.text_encoders import clip_text, clip_vision
from tests.tiny.tokenizers import clip_tokenizer
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build, picture

WIDTH, VECTORS = 32, 8
"""Width of the latents, and how many of them make one layer of the network."""
# Without rendering, which takes 4096 rays at a time, and each of them at 192 points.
CALL: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "latent"}


def shap_e_prior(embedding: int, **changes: Any) -> Any:
    """A `PriorTransformer` that makes many vectors, and their variances, from an embedding."""
    from diffusers import PriorTransformer

    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 4,
        "embedding_dim": WIDTH,
        "num_embeddings": 4 * VECTORS,
        "embedding_proj_dim": embedding,
        "time_embed_dim": 64,
        "clip_embed_dim": 2 * WIDTH,
        "additional_embeddings": 0,
        "time_embed_act_fn": "gelu",
        "norm_in_type": "layer",
        "encoder_hid_proj_type": None,
        "added_emb_type": None,
    }
    return build(PriorTransformer, 151, **{**config, **changes})


def common_components() -> dict[str, Any]:
    """Scheduler and renderer."""
    from diffusers import HeunDiscreteScheduler
    from diffusers.pipelines.shap_e import ShapERenderer

    renderer = build(
        ShapERenderer,
        152,
        param_shapes=((VECTORS, 93), (VECTORS, VECTORS), (VECTORS, VECTORS), (VECTORS, VECTORS)),
        d_latent=WIDTH,
        d_hidden=VECTORS,
        n_output=12,
        background=(0.1, 0.1, 0.1),
    )
    scheduler = HeunDiscreteScheduler(
        beta_schedule="exp",
        num_train_timesteps=1024,
        prediction_type="sample",
        use_karras_sigmas=True,
        clip_sample=True,
        clip_sample_range=1.0,
    )
    return {"scheduler": scheduler, "shap_e_renderer": renderer}


def from_text(pipeline_class: type) -> Any:
    """A pipeline that is told by a text what to make."""
    text = {"text_encoder": clip_text(True), "tokenizer": clip_tokenizer()}
    return assemble(pipeline_class, common_components(), prior=shap_e_prior(32), **text)


def from_image(pipeline_class: type) -> Any:
    """A pipeline that is told by a picture, by one embedding for each patch."""
    encoder, processor = clip_vision(16, image_size=32, patch=8)
    prior = shap_e_prior(16, embedding_proj_norm_type="layer")
    images = {"image_encoder": encoder, "image_processor": processor}
    return assemble(pipeline_class, common_components(), prior=prior, **images)


register_all(from_text, {"ShapEPipeline": {**CALL, "prompt": "A squirrel"}})
register_all(from_image, {"ShapEImg2ImgPipeline": {**CALL, "image": picture()}})
