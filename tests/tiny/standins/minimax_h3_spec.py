"""A stand-in for MiniMax-H3 with `blocks`: video and sound in one DiT, a refiner for the text, components on demand.

Text encoder and VAEs load and offload themselves around entry points of their own, none of which is `forward`. The DiT
keeps what it has computed for a time until it is moved or cast, which it learns from `_apply`. Projections in and out
and the time embedding are float32, whatever the trunk is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .parts import (
    Call,
    GatedMLP,
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

VOCABULARY, TEXT_WIDTH = 64, 12
WIDTH, HEAD_DIM, CHANNELS, AUDIO_CHANNELS, FRAMES, SIDE = 16, 8, 4, 5, 2, 2
FLOAT32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "final_layer.video_head", "final_layer.audio_head")

Positions = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Attention and MLP; with `is_modulated`, both are modulated by time."""

    def __init__(self, width: int, is_modulated: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = GatedMLP(width, 2 * width)
        self.adaln_proj = nn.Linear(WIDTH, 3 * width) if is_modulated else None

    def forward(
        self, hidden: torch.Tensor, *, time: torch.Tensor | None = None, rope: Positions | None = None
    ) -> torch.Tensor:
        normed, gate = self.norm1(hidden), torch.ones_like(hidden[:, :1])
        if self.adaln_proj is not None and time is not None:
            shift, scale, gate = self.adaln_proj(functional.silu(time))[:, None].chunk(3, dim=-1)
            normed = normed * (1 + scale) + shift
        query, key, value = (heads(tensor, HEAD_DIM) for tensor in self.qkv_proj(normed).chunk(3, dim=-1))
        if rope is not None:
            query, key = rotate(query, *rope), rotate(key, *rope)
        hidden = hidden + gate * self.o_proj(attend(query, key, value))
        return hidden + self.mlp(self.norm2(hidden))


class TokenRefiner(nn.Module):
    """Blocks over the text alone, before those over everything."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, is_modulated=False) for _ in range(num_layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class FinalLayer(nn.Module):
    """Norm, modulation, and a float32 head for each modality."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.adaln_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.video_head, self.audio_head = nn.Linear(WIDTH, CHANNELS), nn.Linear(WIDTH, AUDIO_CHANNELS)

    def forward(self, video: torch.Tensor, audio: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shift, scale = self.adaln_proj(functional.silu(time))[:, None].chunk(2, dim=-1)
        video, audio = (self.norm(hidden) * (1 + scale) + shift for hidden in (video, audio))
        return self.video_head(video.float()), self.audio_head(audio.float())


class DiTModel(nn.Module):
    """The DiT. Its `forward` takes keywords only."""

    def __init__(self, num_layers: int, num_refiner_layers: int) -> None:
        super().__init__()
        self.video_patch_proj, self.audio_patch_proj = nn.Linear(CHANNELS, WIDTH), nn.Linear(AUDIO_CHANNELS, WIDTH)
        self.condition_proj = nn.Linear(TEXT_WIDTH, WIDTH)
        self.time_embedder = TimeEmbedder(WIDTH)
        self.rope = Rotary(HEAD_DIM)
        self.token_refiner = TokenRefiner(num_refiner_layers)
        self.blocks = nn.ModuleList(Block(WIDTH, is_modulated=True) for _ in range(num_layers))
        self.sp_prepare, self.local_sp_prepare, self.sp_gather = nn.Identity(), nn.Identity(), nn.Identity()
        self.final_layer = FinalLayer()
        self.adaln_cache: dict[float, torch.Tensor] = {}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DiTModel:
        self.adaln_cache.clear()
        return super()._apply(fn, recurse)

    def prepare_rope_table(self, length: int) -> Positions:
        weight = self.condition_proj.weight
        return self.rope(torch.arange(length, device=weight.device)[None], weight.dtype)

    def forward(
        self, *, video: torch.Tensor, audio: torch.Tensor, text: torch.Tensor, time: float, rope: Positions
    ) -> tuple[torch.Tensor, ...]:
        dtype = self.condition_proj.weight.dtype
        if time not in self.adaln_cache:
            self.adaln_cache[time] = self.time_embedder(torch.full((1,), time, device=video.device)).to(dtype)
        embedding = self.adaln_cache[time]
        text = self.token_refiner(self.condition_proj(text.to(dtype)))
        sizes = [text.shape[1], audio.shape[1], video.shape[1]]
        patches = [text, self.audio_patch_proj(audio.float()).to(dtype), self.video_patch_proj(video.float()).to(dtype)]
        hidden = self.local_sp_prepare(self.sp_prepare(torch.cat(patches, dim=1)))
        for block in self.blocks:
            hidden = block(hidden, time=embedding, rope=rope)
        _, audio, video = self.sp_gather(hidden).split(sizes, dim=1)
        return self.final_layer(video, audio, embedding)


class OnDemand(nn.Module):
    """A component that goes to the device and back when the pipeline says so."""

    execution_device = torch.device("cpu")

    def load_to_device(self) -> None:
        self.to(self.execution_device)

    def offload_to_cpu(self) -> None:
        self.to("cpu")


class Vision(nn.Module):
    """Patches of a picture to text embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(Block(8, is_modulated=False) for _ in range(2))
        self.merger = nn.Linear(8, TEXT_WIDTH)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.merger(hidden)


class TextModel(nn.Module):
    """The layers of the text encoder's language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, TEXT_WIDTH)
        self.layers = nn.ModuleList(TextLayer() for _ in range(3))
        self.norm = RMSNorm(TEXT_WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class TextLayer(nn.Module):
    """Mixes each token with the one before, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(2 * TEXT_WIDTH, TEXT_WIDTH), GatedMLP(TEXT_WIDTH, TEXT_WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.tanh(self.mix(torch.cat([hidden, hidden.roll(1, dims=1)], dim=-1)))
        return hidden + self.mlp(hidden)


class TextEncoder(OnDemand):
    """Reads tokens, and pictures if there are any, through `encode_ids`."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text_model = Vision(), TextModel()

    @torch.no_grad()
    def encode_ids(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.text_model.embed_tokens(input_ids)
        if pixel_values is not None:
            hidden = torch.cat([self.vision(pixel_values.to(hidden.dtype)), hidden], dim=1)
        return self.text_model(hidden)


class VideoVAE(OnDemand):
    """Frames to latents and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, CHANNELS, 4, stride=4), nn.ConvTranspose2d(CHANNELS, 3, 4, stride=4)

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixels.to(self.encoder.weight.dtype)).flatten(2).transpose(1, 2).float()

    def decode_latent(self, latents: torch.Tensor) -> torch.Tensor:
        frames = latents.unflatten(1, (FRAMES, SIDE, SIDE)).permute(0, 1, 4, 2, 3).flatten(0, 1)
        return self.decoder(frames.to(self.decoder.weight.dtype)).float()


class AudioVAE(OnDemand):
    """Latents to a waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ConvTranspose1d(AUDIO_CHANNELS, 1, 4, stride=4)

    def decode_latent(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents.transpose(1, 2).to(self.decoder.weight.dtype)).float()


class MiniMaxH3Pipeline(StandInPipeline):
    """Text to video and sound, one pass a step; with a reference picture, by the second DiT."""

    def __init__(self, num_layers: int, num_refiner_layers: int, has_reference: bool) -> None:
        super().__init__()
        self.transformer = DiTModel(num_layers, num_refiner_layers)
        self.transformers_ref = DiTModel(num_layers, num_refiner_layers) if has_reference else None
        self.text_encoder, self.video_vae, self.audio_vae = TextEncoder(), VideoVAE(), AudioVAE()
        dits = ("transformer", "transformers_ref") if has_reference else ("transformer",)
        self._float32_modules = tuple(f"{dit}.{path}" for dit in dits for path in FLOAT32)

    @contextmanager
    def _component_on_device(self, component: OnDemand) -> Iterator[OnDemand]:
        component.execution_device = self.device
        component.load_to_device()
        try:
            yield component
        finally:
            component.offload_to_cpu()

    @torch.no_grad()
    def forward(self, prompt: str, num_inference_steps: int, reference: torch.Tensor | None = None) -> torch.Tensor:
        ids = token_ids(prompt, VOCABULARY).to(self.device)
        pixels = None if reference is None else reference.to(self.device)
        with self._component_on_device(self.text_encoder):
            text = self.text_encoder.encode_ids(ids, pixel_values=pixels)
        video = noise(1, FRAMES * SIDE**2, CHANNELS, seed=1).to(self.device)
        audio = noise(1, 3, AUDIO_CHANNELS, seed=2).to(self.device)
        if pixels is not None:
            with self._component_on_device(self.video_vae):
                video = video + self.video_vae.encode_image(pixels).repeat(1, FRAMES, 1)

        dit = self.transformer if reference is None else self.transformers_ref
        assert dit is not None
        rope = dit.prepare_rope_table(text.shape[1] + audio.shape[1] + video.shape[1])
        for step in range(num_inference_steps):
            time = 1 - step / num_inference_steps
            toward_video, toward_audio = dit(video=video, audio=audio, text=text, time=time, rope=rope)
            video = video - toward_video / num_inference_steps
            audio = audio - toward_audio / num_inference_steps
        with self._component_on_device(self.video_vae):
            frames = self.video_vae.decode_latent(video)
        with self._component_on_device(self.audio_vae):
            sound = self.audio_vae.decode_latent(audio)
        return joined(frames, sound)


def build_minimax_h3_spec(
    num_layers: int = 4, num_refiner_layers: int = 2, has_reference: bool = False
) -> tuple[Any, Call]:
    """`MiniMaxH3Pipeline`; `has_reference` gives it a second DiT, which then does all the work."""
    pipe = seeded(MiniMaxH3Pipeline(num_layers, num_refiner_layers, has_reference), 53)

    def call() -> dict[str, Any]:
        reference = {"reference": noise(1, 3, 4 * SIDE, 4 * SIDE, seed=4)} if has_reference else {}
        return {"prompt": "a robot", "num_inference_steps": 3, **reference}

    return pipe, call
