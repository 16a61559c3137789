"""A stand-in for BAGEL: a language model whose layers have two sets of weights, one to understand and one to generate.

One DiT is reachable by four paths. The pipeline calls `language_model.forward` itself, sometimes for embeddings alone:
then no layer runs. A step has one to three passes, with caches that earlier passes have filled.
"""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .parts import (
    Call,
    GatedMLP,
    PlainVAE,
    RMSNorm,
    Rotary,
    StandInPipeline,
    TimeEmbedder,
    attend,
    heads,
    noise,
    rotate,
    seeded,
    token_ids,
)

VOCABULARY, START, END = 64, 61, 62
WIDTH, HEAD_DIM, VISION_WIDTH = 16, 8, 12
CHANNELS, PATCH, SIDE = 4, 2, 2


class NaiveCache:
    """Keys and values by layer; a copy keeps what it has while the original grows."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def copy(self) -> NaiveCache:
        other = NaiveCache()
        other.keys, other.values = copy(self.keys), copy(self.values)
        return other


class TwinLinear(nn.Linear):
    """A linear layer with a second one, `gen_exp`, for the tokens that are generated."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.gen_exp = nn.Linear(width_in, width_out)

    def forward(self, hidden: torch.Tensor, is_generated: torch.Tensor | None = None) -> torch.Tensor:
        understood = super().forward(hidden)
        if is_generated is None:
            return understood
        return torch.where(is_generated[..., None], self.gen_exp(hidden), understood)


class TwinNorm(nn.Module):
    """A norm with a second weight for the tokens that are generated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.und, self.gen = RMSNorm(width), RMSNorm(width)

    def forward(self, hidden: torch.Tensor, is_generated: torch.Tensor | None = None) -> torch.Tensor:
        understood = self.und(hidden)
        if is_generated is None:
            return understood
        return torch.where(is_generated[..., None], self.gen(hidden), understood)


class MoTLayer(nn.Module):
    """Returns the hidden states and the cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm, self.post_attention_layernorm = TwinNorm(WIDTH), TwinNorm(WIDTH)
        self.qkv_proj, self.o_proj = TwinLinear(WIDTH, 3 * WIDTH), TwinLinear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)
        self.mlp, self.mlp_moe_gen = GatedMLP(WIDTH, WIDTH), GatedMLP(WIDTH, WIDTH)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        positions: tuple[torch.Tensor, torch.Tensor],
        past_key_values: NaiveCache,
        update_past_key_values: bool,
        is_causal: bool,
        is_generated: torch.Tensor | None,
    ) -> tuple[torch.Tensor, NaiveCache]:
        query, key, value = self.qkv_proj(self.input_layernorm(hidden, is_generated), is_generated).chunk(3, dim=-1)
        query = rotate(self.q_norm(heads(query, HEAD_DIM)), *positions)
        key, value = rotate(self.k_norm(heads(key, HEAD_DIM)), *positions), heads(value, HEAD_DIM)
        if self.index in past_key_values.keys:
            key = torch.cat([past_key_values.keys[self.index], key], dim=1)
            value = torch.cat([past_key_values.values[self.index], value], dim=1)
        if update_past_key_values:
            past_key_values.keys[self.index], past_key_values.values[self.index] = key, value
        mask = None
        if is_causal:
            columns = torch.arange(key.shape[1], device=key.device)
            mask = columns <= columns[-hidden.shape[1] :, None]
        hidden = hidden + self.o_proj(attend(query, key, value, mask), is_generated)
        normed = self.post_attention_layernorm(hidden, is_generated)
        change = self.mlp(normed)
        if is_generated is not None:
            change = torch.where(is_generated[..., None], self.mlp_moe_gen(normed), change)
        return hidden + change, past_key_values


class Qwen2MoTModel(nn.Module):
    """The DiT. With `return_embeddings_only` it leaves before any of its layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MoTLayer(index) for index in range(num_layers))
        self.norm = TwinNorm(WIDTH)
        self.rotary_emb = Rotary(HEAD_DIM)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        return_embeddings_only: bool = False,
        hidden: torch.Tensor | None = None,
        past_key_values: NaiveCache | None = None,
        update_past_key_values: bool = False,
        is_causal: bool = False,
        is_generated: torch.Tensor | None = None,
    ) -> Any:
        if return_embeddings_only:
            return self.embed_tokens(input_ids)
        assert hidden is not None and past_key_values is not None
        start = past_key_values.length
        positions = self.rotary_emb(
            torch.arange(start, start + hidden.shape[1], device=hidden.device)[None], hidden.dtype
        )
        for layer in self.layers:
            hidden, past_key_values = layer(
                hidden,
                positions=positions,
                past_key_values=past_key_values,
                update_past_key_values=update_past_key_values,
                is_causal=is_causal,
                is_generated=is_generated,
            )
        return self.norm(hidden, is_generated), past_key_values


class Qwen2MoTForCausalLM(nn.Module):
    """The DiT and a head that making images doesn't use."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = Qwen2MoTModel(num_layers)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class PositionEmbedding(nn.Module):
    """A bare parameter, read by index."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(count, WIDTH))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.pos_embed[positions]


class VisionModel(nn.Module):
    """Patches of an image to features."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, VISION_WIDTH, 4, stride=4)
        self.encoder = nn.ModuleList(nn.Linear(VISION_WIDTH, VISION_WIDTH) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Bagel(nn.Module):
    """Holds the language model and everything that is used beside it."""

    def __init__(self, language_model: Qwen2MoTForCausalLM, vit_model: VisionModel) -> None:
        super().__init__()
        token_dim = CHANNELS * PATCH**2
        self.language_model, self.vit_model = language_model, vit_model
        self.time_embedder = TimeEmbedder(WIDTH)
        self.vae2llm, self.llm2vae = nn.Linear(token_dim, WIDTH), nn.Linear(WIDTH, token_dim)
        self.latent_pos_embed, self.vit_pos_embed = PositionEmbedding(SIDE**2), PositionEmbedding(SIDE**2)
        self.connector = nn.Linear(VISION_WIDTH, WIDTH)

    def prefill_text(self, ids: torch.Tensor, cache: NaiveCache) -> NaiveCache:
        hidden = self.language_model.forward(ids, return_embeddings_only=True)
        return self._prefill(hidden, cache, is_causal=True)

    def prefill_vision(self, pixels: torch.Tensor, cache: NaiveCache) -> NaiveCache:
        features = self.connector(self.vit_model(pixels))
        hidden = features + self.vit_pos_embed(torch.arange(features.shape[1], device=features.device))
        return self._prefill(hidden, cache, is_causal=False)

    def prefill_latents(self, latents: torch.Tensor, cache: NaiveCache) -> NaiveCache:
        hidden, is_generated = self._latent_tokens(latents, torch.ones(1, device=latents.device))
        return self._prefill(hidden, cache, is_causal=False, is_generated=is_generated)

    def velocity(self, latents: torch.Tensor, time: torch.Tensor, cache: NaiveCache) -> torch.Tensor:
        hidden, is_generated = self._latent_tokens(latents, time)
        hidden, _ = self.language_model.forward(hidden=hidden, past_key_values=cache, is_generated=is_generated)
        return self.llm2vae(hidden[:, 1:-1])

    def _prefill(self, hidden: torch.Tensor, cache: NaiveCache, **mode: Any) -> NaiveCache:
        _, cache = self.language_model.forward(
            hidden=hidden, past_key_values=cache, update_past_key_values=True, **mode
        )
        return cache

    def _latent_tokens(self, latents: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents as tokens between two marker tokens, and which of them are generated."""
        device = latents.device
        markers = self.language_model.forward(torch.tensor([[START, END]], device=device), return_embeddings_only=True)
        positions = torch.arange(latents.shape[1], device=device)
        hidden = self.vae2llm(latents) + self.time_embedder(time)[:, None] + self.latent_pos_embed(positions)
        hidden = torch.cat([markers[:, :1], hidden, markers[:, 1:]], dim=1)
        is_generated = torch.ones(hidden.shape[:2], dtype=torch.bool, device=device)
        is_generated[:, 0] = is_generated[:, -1] = False
        return hidden, is_generated


class BagelPipeline(StandInPipeline):
    """Text and an image to an image. N times make N - 1 steps; guidance is on in the first ones only."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.language_model = Qwen2MoTForCausalLM(num_layers)
        self.transformer = self.language_model.model
        self.vit_model = VisionModel()
        self.bagel = Bagel(self.language_model, self.vit_model)
        self.vae = PlainVAE(CHANNELS)

    @torch.no_grad()
    def forward(
        self, prompt: str, image: torch.Tensor, num_timesteps: int, cfg_text_scale: float, cfg_img_scale: float
    ) -> torch.Tensor:
        bagel, dtype = self.bagel, next(self.vae.parameters()).dtype
        pixels = image.to(self.device, dtype)
        clean = functional.pixel_unshuffle(self.vae.encode(pixels), PATCH).flatten(2).transpose(1, 2)
        ids = token_ids(prompt, START).to(self.device)
        cache = bagel.prefill_vision(pixels, bagel.prefill_latents(clean, NaiveCache()))
        without_text = cache.copy()
        cache = bagel.prefill_text(ids, cache)
        without_image = bagel.prefill_text(ids, NaiveCache())

        latents = noise(*clean.shape, seed=3).to(self.device, dtype)
        times = torch.linspace(1, 0, num_timesteps).tolist()
        for step, (time, following) in enumerate(pairwise(times)):
            now = torch.tensor([time], device=self.device)
            velocity = bagel.velocity(latents, now, cache)
            if step < num_timesteps // 2:
                textless = bagel.velocity(latents, now, without_text)
                velocity = textless + cfg_text_scale * (velocity - textless)
                if step == 0:
                    imageless = bagel.velocity(latents, now, without_image)
                    velocity = imageless + cfg_img_scale * (velocity - imageless)
            latents = latents - velocity * (time - following)
        latents = functional.pixel_shuffle(latents.transpose(1, 2).unflatten(2, (SIDE, SIDE)), PATCH)
        return self.vae.decode(latents.to(dtype)).sample.float()


def build_bagel(num_layers: int = 4) -> tuple[Any, Call]:
    """`BagelPipeline`."""
    pipe = seeded(BagelPipeline(num_layers), 37)

    def call() -> dict[str, Any]:
        return {
            "prompt": "a cat",
            "image": noise(1, 3, 4 * SIDE, 4 * SIDE, seed=1),
            "num_timesteps": 4,
            "cfg_text_scale": 2.0,
            "cfg_img_scale": 1.5,
        }

    return pipe, call
