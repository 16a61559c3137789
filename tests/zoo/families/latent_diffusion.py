"""Latent diffusion from texts: a BERT, a UNet with cross attention, and an autoencoder eight times smaller in space."""

from __future__ import annotations

from typing import Any

from diffusers_omni_offload.demo.tiny_wan import T5_VOCABULARY, t5_tokenizer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import build
from tests.zoo.stable_diffusion import ddim_scheduler, sd_unet


def ldm_bert() -> Any:
    """An `LDMBertModel` for `t5_tokenizer`."""
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    config = LDMBertConfig(
        vocab_size=T5_VOCABULARY,
        encoder_layers=3,
        encoder_ffn_dim=64,
        encoder_attention_heads=4,
        head_dim=8,
        d_model=32,
    )
    return build(LDMBertModel, 131, config=config)


def latent_diffusion(pipeline_class: type) -> Any:
    """A pipeline of these components."""
    components = {
        "vqvae": kl_vae(4, blocks=4, shift=None, scaling=0.18215, quant=True),
        "bert": ldm_bert(),
        "tokenizer": t5_tokenizer(77),
        "unet": sd_unet(sample_size=8),
        "scheduler": ddim_scheduler(),
    }
    return assemble(pipeline_class, components)


register_all(
    latent_diffusion,
    {
        "LDMTextToImagePipeline": {
            "prompt": "A squirrel",
            "height": 64,
            "width": 64,
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "output_type": "pt",
        }
    },
)
