"""A stand-in for NextStep-1.1: an autoregressive model without a `forward`, and a flow-matching head that is sampled
once a token.

The pipeline calls the model's methods and parts, never the model; the layers get a cache by keyword and write into it,
once with the prompt and then with one token at a time.
"""

from __future__ import annotations

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

VOCABULARY, IMAGE_TOKEN = 64, 63
WIDTH, HEAD_DIM, CHANNELS, PATCH, SIDE = 16, 8, 4, 2, 2


class StaticCache:
    """Keys and values of all layers, of fixed length, allocated by the layer that writes, where its tensors are."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seen = 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            shape = (key.shape[0], self.length, *key.shape[2:])
            self.layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = self.layers[layer]
        keys.index_copy_(1, positions, key)
        values.index_copy_(1, positions, value)
        return keys, values


class DecoderLayer(nn.Module):
    """Returns a tuple, and changes the cache that it was given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = GatedMLP(WIDTH, 2 * WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        past_key_value: StaticCache,
        cache_position: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        use_cache: bool = True,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor]:
        query, key, value = self.qkv_proj(self.input_layernorm(hidden_states)).chunk(3, dim=-1)
        query, key = (rotate(heads(tensor, HEAD_DIM), *position_embeddings) for tensor in (query, key))
        keys, values = past_key_value.update(key, heads(value, HEAD_DIM), self.index, cache_position)
        hidden_states = hidden_states + self.o_proj(attend(query, keys, values, attention_mask))
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


class ResBlock(nn.Module):
    """A residual MLP, modulated by time and condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class HeadNet(nn.Module):
    """The velocity of a token, from noise, time and condition."""

    def __init__(self, token_dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedder(width)
        self.cond_embed = nn.Linear(WIDTH, width)
        self.input_proj = nn.Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(layers))
        self.final_layer = nn.Linear(width, token_dim)

    def forward(self, x: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x, y = self.input_proj(x), self.time_embed(t) + self.cond_embed(c)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x)


class FlowMatchingHead(nn.Module):
    """Samples a token; its noise comes from the global generator of the device that its weights are on."""

    def __init__(self, token_dim: int, width: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.token_dim = token_dim
        self.net = HeadNet(token_dim, width, layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.input_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.net.input_proj.weight.device

    @torch.no_grad()
    def sample(self, c: torch.Tensor, cfg: float, cfg_mult: int, num_sampling_steps: int) -> torch.Tensor:
        shape = (c.shape[0] // cfg_mult, self.token_dim)
        x = torch.randn(shape, device=self.device, dtype=torch.float32)
        times = torch.linspace(0, 1, num_sampling_steps + 1, device=c.device)
        for start, stop in pairwise(times):
            batch = torch.cat([x] * cfg_mult).to(self.dtype)
            velocity = self.net(batch, start.expand(c.shape[0]), c).float()
            if cfg_mult == 2:
                conditional, unconditional = velocity.chunk(2)
                velocity = unconditional + cfg * (conditional - unconditional)
            x = x + velocity * (stop - start) + 0.1 * torch.randn(shape, device=self.device) * (1 - stop)
        return x.to(c.dtype)


class NextStepModel(nn.Module):
    """No `forward`: calling it is an error."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        token_dim = CHANNELS * PATCH**2
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(index) for index in range(num_layers))
        self.norm = RMSNorm(WIDTH)
        self.rotary_emb = Rotary(HEAD_DIM)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)  # in the checkpoint, and never used
        self.image_in_projector = nn.Linear(token_dim, WIDTH)
        self.image_out_projector = nn.Linear(WIDTH, WIDTH)
        self.image_head = FlowMatchingHead(token_dim)
        self.register_buffer("gen_pos_embed", 0.3 * noise(1, SIDE**2 + 1, WIDTH, seed=5))

    def gen_pos_embed_with_ar(self, index: int) -> torch.Tensor:
        return self.gen_pos_embed[:, index : index + 1]

    def patchify(self, latents: torch.Tensor) -> torch.Tensor:
        return functional.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)

    def unpatchify(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (SIDE, SIDE)), PATCH)

    def prepare_inputs_embeds(self, input_ids: torch.Tensor, latents: torch.Tensor | None = None) -> torch.Tensor:
        if latents is None:
            return self.embed_tokens(input_ids)
        weight = self.embed_tokens.weight
        embeds = torch.zeros((*input_ids.shape, WIDTH), device=weight.device, dtype=weight.dtype)
        is_image = input_ids == IMAGE_TOKEN
        image = self.image_in_projector(self.patchify(latents)).view(-1, WIDTH)
        embeds[is_image] = image.to(embeds.dtype)
        embeds[~is_image] = self.embed_tokens(input_ids[~is_image])
        return embeds

    def forward_model(self, inputs_embeds: torch.Tensor, past_key_values: StaticCache) -> torch.Tensor:
        start, length = past_key_values.seen, inputs_embeds.shape[1]
        positions = torch.arange(start, start + length, device=inputs_embeds.device)
        mask = torch.arange(past_key_values.length, device=inputs_embeds.device) <= positions[:, None]
        embeddings = self.rotary_emb(positions[None], inputs_embeds.dtype)
        hidden_states = inputs_embeds
        for layer in self.layers:
            outputs = layer(
                hidden_states,
                attention_mask=mask,
                past_key_value=past_key_values,
                cache_position=positions,
                position_embeddings=embeddings,
            )
            hidden_states = outputs[0]
        past_key_values.seen += length
        return self.norm(hidden_states)


class NextStep11Pipeline(StandInPipeline):
    """Text, and an image to start from, to an image. It is seeded globally."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = NextStepModel(num_layers)
        self.vae = PlainVAE(CHANNELS)

    @torch.no_grad()
    def forward(
        self, prompt: str, image: torch.Tensor, guidance_scale: float, num_inference_steps: int, seed: int
    ) -> torch.Tensor:
        torch.manual_seed(seed)
        model, cfg_mult = self.model, 2 if guidance_scale > 1 else 1
        ids = token_ids(prompt, IMAGE_TOKEN)
        ids = torch.cat([ids, torch.full((1, SIDE**2), IMAGE_TOKEN)], dim=1).to(self.device)
        latents = self.vae.encode(image.to(self.device, self.vae.dtype))
        if cfg_mult == 2:
            text = (ids != IMAGE_TOKEN).long()
            ids, latents = torch.cat([ids, ids * (1 - text)]), torch.cat([latents] * 2)

        cache = StaticCache(ids.shape[1] + SIDE**2)
        embeds = model.prepare_inputs_embeds(ids, latents)
        c = model.forward_model(inputs_embeds=embeds, past_key_values=cache)[:, -1:]
        c = c + model.gen_pos_embed_with_ar(0).to(c.dtype)
        tokens: list[torch.Tensor] = []
        for step in range(SIDE**2):
            condition = model.image_out_projector(c).squeeze(1)
            token = model.image_head.sample(
                condition, cfg=guidance_scale, cfg_mult=cfg_mult, num_sampling_steps=num_inference_steps
            )
            tokens.append(token)
            embeds = torch.cat([model.image_in_projector(token[:, None])] * cfg_mult)
            c = model.forward_model(inputs_embeds=embeds, past_key_values=cache)[:, -1:]
            c = c + model.gen_pos_embed_with_ar(step + 1).to(c.dtype)
        latents = model.unpatchify(torch.stack(tokens, dim=1))
        return self.vae.decode(latents.to(self.vae.dtype)).sample.float()


def build_nextstep(num_layers: int = 4) -> tuple[Any, Call]:
    """`NextStep11Pipeline`."""
    pipe = seeded(NextStep11Pipeline(num_layers), 31)

    def call() -> dict[str, Any]:
        return {
            "prompt": "a cat",
            "image": noise(1, 3, 2 * SIDE * PATCH, 2 * SIDE * PATCH, seed=1),
            "guidance_scale": 2.0,
            "num_inference_steps": 2,
            "seed": 0,
        }

    return pipe, call
