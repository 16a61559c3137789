"""A stand-in for Cosmos 3 in its split form: a generator that holds a reasoner, two DiTs, one inside the other.

The reasoner runs once a prompt and leaves its keys and values to the generator; the pipeline swaps them when it goes
from one guidance branch to the other. Each phase announces itself with `_offload_context(name)`, and the generator's
layers run after that context is left.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload import PhaseOffload

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
    joined,
    noise,
    rotate,
    seeded,
    token_ids,
)

VOCABULARY, PADDING = 64, 3
WIDTH, HEAD_DIM, CHANNELS, SIDE = 16, 8, 4, 2
SOUND_DIM, ACTION_DIM, DOMAINS = 6, 5, 3

KeyValue = tuple[torch.Tensor, torch.Tensor]


class ReasonerLayer(nn.Module):
    """Returns the hidden states, the keys and the values."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = GatedMLP(WIDTH, 2 * WIDTH)

    def forward(self, hidden: torch.Tensor, freqs: KeyValue) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.qkv_proj(self.input_layernorm(hidden)).chunk(3, dim=-1)
        query, key = (rotate(heads(tensor, HEAD_DIM), *freqs) for tensor in (query, key))
        value = heads(value, HEAD_DIM)
        hidden = hidden + self.o_proj(attend(query, key, value, causal=True))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


class LanguageModel(nn.Module):
    """The reasoner: keys and values of each layer. Its norm is in the checkpoint and isn't used."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary_emb = Rotary(HEAD_DIM)
        self.layers = nn.ModuleList(ReasonerLayer() for _ in range(num_layers))
        self.norm = RMSNorm(WIDTH)

    def forward(self, text_ids: torch.Tensor, freqs: KeyValue) -> list[KeyValue]:
        hidden, cached = self.embed_tokens(text_ids), []
        for layer in self.layers:
            hidden, key, value = layer(hidden, freqs)
            cached.append((key, value))
        return cached


class GeneratorLayer(nn.Module):
    """Attends to itself and to what the reasoner's layer has left."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = GatedMLP(WIDTH, 2 * WIDTH)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        k_und: torch.Tensor,
        v_und: torch.Tensor,
        freqs_cos: torch.Tensor,
        freqs_sin: torch.Tensor,
    ) -> torch.Tensor:
        query, key, value = self.qkv_proj(self.input_layernorm(hidden)).chunk(3, dim=-1)
        query, key = (rotate(heads(tensor, HEAD_DIM), freqs_cos, freqs_sin) for tensor in (query, key))
        key, value = torch.cat([k_und, key], dim=1), torch.cat([v_und, heads(value, HEAD_DIM)], dim=1)
        hidden = hidden + self.o_proj(attend(query, key, value))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DomainLinear(nn.Module):
    """A linear layer that looks its weights up by domain."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.shape = (width_in, width_out)
        self.fc = nn.Embedding(DOMAINS, width_in * width_out)
        self.bias = nn.Embedding(DOMAINS, width_out)

    def forward(self, hidden: torch.Tensor, domains: torch.Tensor) -> torch.Tensor:
        return hidden @ self.fc(domains).unflatten(1, self.shape) + self.bias(domains)[:, None]


class GenSPPrepare(nn.Module):
    """Where several devices would share the tokens; holds no weights."""

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hidden, cos, sin


class VFMTransformer(nn.Module):
    """The generator, with the reasoner inside."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.language_model = LanguageModel(num_layers)
        self.proj_in, self.proj_out = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.time_embedder = TimeEmbedder(WIDTH)
        self.action_proj_in, self.action_proj_out = DomainLinear(ACTION_DIM, WIDTH), DomainLinear(WIDTH, ACTION_DIM)
        self.action_modality_embed = nn.Parameter(torch.zeros(WIDTH))
        self.audio_proj_in, self.audio_proj_out = nn.Linear(SOUND_DIM, WIDTH), nn.Linear(WIDTH, SOUND_DIM)
        self.audio_modality_embed = nn.Parameter(torch.zeros(WIDTH))
        self.gen_layers = nn.ModuleList(GeneratorLayer() for _ in range(num_layers))
        self.norm_moe_gen = RMSNorm(WIDTH)
        self.gen_sp_prepare, self.gen_sp_gather = GenSPPrepare(), nn.Identity()
        self.cached_kv: list[KeyValue] | None = None
        self.cached_freqs_gen: KeyValue | None = None
        self._phases: PhaseOffload | None = None

    def reset_cache(self) -> None:
        self.cached_kv = self.cached_freqs_gen = None

    def enable_model_cpu_offload(self, *, device: torch.device, pin_memory: bool | int = True) -> None:
        phases = {"reasoner": self.language_model.layers, "generator": self.gen_layers}
        self._phases = PhaseOffload(self, phases, device=device, pin_memory=pin_memory)
        self._phases.enable()

    def disable_model_cpu_offload(self) -> None:
        if self._phases is not None:
            self._phases.disable()
            self._phases = None

    def _offload_context(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._phases is None else self._phases.context(name)

    def forward(
        self,
        video: torch.Tensor,
        timestep: torch.Tensor,
        text_ids: torch.Tensor,
        text_length: int,
        sound: torch.Tensor,
        action: torch.Tensor,
        domains: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [video.shape[1], action.shape[1], sound.shape[1]]
        if self.cached_kv is None:
            positions = torch.arange(text_ids.shape[1] + sum(sizes), device=video.device)[None]
            cos, sin = self.language_model.rotary_emb(positions, video.dtype)
            text = text_ids.shape[1]
            with self._offload_context("reasoner"):
                cached = self.language_model(text_ids, (cos[:, :text], sin[:, :text]))
            self.cached_freqs_gen = (cos[:, text:], sin[:, text:])
            self.cached_kv = [(key[:, :text_length], value[:, :text_length]) for key, value in cached]

        with self._offload_context("generator"):
            parts = [
                self.proj_in(video),
                self.action_proj_in(action, domains) + self.action_modality_embed.to(action.dtype),
                self.audio_proj_in(sound) + self.audio_modality_embed.to(sound.dtype),
            ]
            with torch.autocast(video.device.type, enabled=False):
                time = self.time_embedder(timestep.float()).to(video.dtype)
        assert self.cached_freqs_gen is not None
        hidden, cos, sin = self.gen_sp_prepare(torch.cat(parts, dim=1) + time[:, None], *self.cached_freqs_gen)
        for layer, (key, value) in zip(self.gen_layers, self.cached_kv, strict=True):
            hidden = layer(hidden, k_und=key, v_und=value, freqs_cos=cos, freqs_sin=sin)
        video, action, sound = self.norm_moe_gen(self.gen_sp_gather(hidden)).split(sizes, dim=1)
        return self.proj_out(video), self.action_proj_out(action, domains), self.audio_proj_out(sound)


class SoundTokenizer(nn.Module):
    """Sound latents to a waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ConvTranspose1d(SOUND_DIM, 1, 4, stride=4)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents.transpose(1, 2))


class Cosmos3OmniDiffusersPipeline(StandInPipeline):
    """Text to an image, a sound and actions, with guidance. It moves its own phases in module mode."""

    _float32_modules = ("transformer.time_embedder",)

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.transformer = VFMTransformer(num_layers)
        self.vae = PlainVAE(CHANNELS)
        self._sound_tokenizer = SoundTokenizer()

    def enable_omni_model_cpu_offload(self, *, device: torch.device, pin_memory: bool | int = True) -> None:
        for resident in (self.vae, self._sound_tokenizer):
            resident.to(device)
        self.transformer.enable_model_cpu_offload(device=device, pin_memory=pin_memory)

    def disable_omni_model_cpu_offload(self) -> None:
        self.transformer.disable_model_cpu_offload()
        for resident in (self.vae, self._sound_tokenizer):
            resident.to("cpu")

    @torch.no_grad()
    def forward(
        self, prompt: str, negative_prompt: str, num_inference_steps: int, guidance_scale: float
    ) -> torch.Tensor:
        transformer, dtype = self.transformer, self.vae.dtype
        shapes = ((1, SIDE**2, CHANNELS), (1, 2, ACTION_DIM), (1, 3, SOUND_DIM))
        streams = [noise(*shape, seed=seed).to(self.device, dtype) for seed, shape in enumerate(shapes)]
        domains = torch.ones(1, dtype=torch.long, device=self.device)
        branches: dict[str, Any] = {prompt: None, negative_prompt: None}
        transformer.reset_cache()
        for step in range(num_inference_steps):
            now = torch.full((1,), 1 - step / num_inference_steps, device=self.device)
            velocities = []
            for text in branches:
                ids = torch.cat([token_ids(text, VOCABULARY), torch.zeros(1, PADDING, dtype=torch.long)], dim=1)
                transformer.cached_kv, transformer.cached_freqs_gen = branches[text] or (None, None)
                velocities.append(
                    transformer(
                        video=streams[0],
                        timestep=now,
                        text_ids=ids.to(self.device),
                        text_length=len(text),
                        action=streams[1],
                        sound=streams[2],
                        domains=domains,
                    )
                )
                branches[text] = (transformer.cached_kv, transformer.cached_freqs_gen)
            for index, (guided, free) in enumerate(zip(*velocities, strict=True)):
                velocity = free + guidance_scale * (guided - free)
                streams[index] = streams[index] - velocity / num_inference_steps
        transformer.reset_cache()
        latents = streams[0].transpose(1, 2).unflatten(2, (SIDE, SIDE))
        image, sound = self.vae.decode(latents).sample, self._sound_tokenizer.decode(streams[2])
        return joined(image, streams[1], sound)


def build_cosmos3_split(num_layers: int = 4) -> tuple[Any, Call]:
    """`Cosmos3OmniDiffusersPipeline`; its time embedder is float32 in every dtype."""
    pipe = seeded(Cosmos3OmniDiffusersPipeline(num_layers), 47)

    def call() -> dict[str, Any]:
        return {"prompt": "a cat", "negative_prompt": "bad quality", "num_inference_steps": 3, "guidance_scale": 2.0}

    return pipe, call
