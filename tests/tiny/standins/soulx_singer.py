"""Stand-ins for SoulX-Singer: a singing voice from a score (SVS), or from another voice (SVC).

A call makes several segments, and each has its turn of encoders, DiT and vocoder. A step runs the DiT twice, with and
without the prompt, so on two lengths. The DiT has no embedding: its first parameter, whose dtype is read, is a layer's.
Mel frames, vocoder and Whisper are float32, whatever the trunk is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .parts import (
    Call,
    GatedMLP,
    Rotary,
    StandInPipeline,
    TimeEmbedder,
    attend,
    heads,
    noise,
    rotate,
    seeded,
)

WIDTH, HEAD_DIM, MELS, HOP, PITCHES = 16, 8, 6, 4, 32


class AdaptiveRMSNorm(nn.Module):
    """A norm whose weight is a function of the diffusion step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_weight = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=1e-6).to(hidden.dtype)
        return normed * (1 + self.to_weight(step))[:, None]


class NARDecoderLayer(nn.Module):
    """Sees every frame at once; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.input_layernorm, self.post_attention_layernorm = AdaptiveRMSNorm(WIDTH), AdaptiveRMSNorm(WIDTH)
        self.mlp = GatedMLP(WIDTH, 2 * WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        cond_embedding: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        query, key, value = self.qkv_proj(self.input_layernorm(hidden_states, cond_embedding)).chunk(3, dim=-1)
        query, key = (rotate(heads(tensor, HEAD_DIM), *position_embeddings) for tensor in (query, key))
        hidden_states = hidden_states + self.o_proj(attend(query, key, heads(value, HEAD_DIM), attention_mask))
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states, cond_embedding)),)


class DiffLlama(nn.Module):
    """The DiT. The layers come first, so that the first parameter is one of theirs."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NARDecoderLayer() for _ in range(num_layers))
        self.embed_tokens = None
        self.norm = AdaptiveRMSNorm(WIDTH)
        self.rotary_emb = Rotary(HEAD_DIM)
        self.diff_step_mlp = TimeEmbedder(WIDTH)
        self.cond_mlp, self.mel_mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(MELS, WIDTH)
        self.mel_out_mlp = nn.Linear(WIDTH, MELS)

    def forward(
        self, x: torch.Tensor, diffusion_step: torch.Tensor, cond: torch.Tensor, x_mask: torch.Tensor
    ) -> torch.Tensor:
        step = self.diff_step_mlp(diffusion_step)
        hidden_states = self.mel_mlp(x) + self.cond_mlp(cond)
        positions = self.rotary_emb(torch.arange(x.shape[1], device=x.device)[None], x.dtype)
        collected = []
        for layer in self.layers:
            outputs = layer(
                hidden_states,
                cond_embedding=step,
                position_embeddings=positions,
                attention_mask=x_mask[:, None, None].bool(),
            )
            hidden_states = outputs[0]
            collected.append(hidden_states.clone())
        return self.mel_out_mlp(self.norm(collected[-1], step))


class FlowMatchingTransformer(nn.Module):
    """The embedding of the condition, which the pipeline calls itself, and the DiT."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.cond_emb = nn.Linear(WIDTH, WIDTH)
        self.diff_estimator = DiffLlama(num_layers)


class CFMDecoder(nn.Module):
    """Holds the flow-matching transformer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = FlowMatchingTransformer(num_layers)


class MelSpectrogram(nn.Module):
    """Waveform to mel frames: no parameter, only buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mel_basis", noise(HOP, MELS, seed=7))
        self.register_buffer("window", torch.hann_window(HOP + 2)[1:-1], persistent=False)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        return torch.tanh(waveform.unflatten(-1, (-1, HOP)) * self.window @ self.mel_basis)


class Vocoder(nn.Module):
    """Mel frames to a waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(MELS, 4, HOP, stride=HOP)
        self.out = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(functional.silu(self.up(mel.transpose(1, 2)))))[:, 0]


class WhisperEncoder(nn.Module):
    """Waveform to features, through `encode` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, WIDTH, HOP, stride=HOP)
        self.proj = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def encode(self, waveform: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
        features = self.conv(waveform.float()[:, None]).transpose(1, 2)
        return self.proj(torch.tanh(features)).to(output_dtype)


class Residual(nn.Module):
    """A residual convolution over the notes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.conv(hidden.transpose(1, 2)).transpose(1, 2))


class FlowMatchingPipeline(StandInPipeline):
    """What both pipelines share: the flow-matching loop, and the way to a waveform."""

    _float32_modules = ("mel", "vocoder")

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.f0_encoder = nn.Embedding(PITCHES, WIDTH)
        self.cfm_decoder = CFMDecoder(num_layers)
        self.mel, self.vocoder = MelSpectrogram(), Vocoder()

    @property
    def transformer(self) -> DiffLlama:
        return self.cfm_decoder.model.diff_estimator

    def sing(self, prompt_mel: torch.Tensor, condition: torch.Tensor, steps: int, scale: float) -> torch.Tensor:
        """Euler steps over the frames after the prompt, and the vocoder."""
        trunk = next(self.transformer.parameters()).dtype
        condition = self.cfm_decoder.model.cond_emb(condition.to(trunk))
        prompt_mel, start = prompt_mel.to(trunk), prompt_mel.shape[1]
        frames = condition.shape[1] - start
        x = noise(1, frames, MELS, seed=frames).to(condition.device, trunk)
        for step in range(steps):
            now = torch.full((1,), step / steps, device=condition.device)
            both = torch.cat([prompt_mel, x], dim=1)
            guided = self.transformer(both, now, condition, torch.ones_like(both[..., 0]))[:, start:]
            free = self.transformer(x, now, torch.zeros_like(condition[:, start:]), torch.ones_like(x[..., 0]))
            x = x + (guided + scale * (guided - free)) / steps
        return self.vocoder(x.float())


class PipelineSoulXSingerSVS(FlowMatchingPipeline):
    """From a score: notes with a text, a pitch and a type each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.preflow = nn.Sequential(Residual(), Residual())
        self.note_text_encoder = nn.Embedding(PITCHES, WIDTH)
        self.note_pitch_encoder = nn.Embedding(PITCHES, WIDTH)
        self.note_type_encoder = nn.Embedding(PITCHES, WIDTH)

    @torch.inference_mode()
    def forward(
        self, prompt: torch.Tensor, segments: list[torch.Tensor], num_inference_steps: int, guidance_scale: float
    ) -> torch.Tensor:
        prompt_mel = self.mel(prompt.to(self.device))
        waveforms = []
        for notes in segments:
            notes = notes.to(self.device)
            features = self.note_pitch_encoder(notes) + self.note_type_encoder(notes % 3)
            features = self.preflow(features + self.note_text_encoder(notes % 7))
            frames = torch.arange(prompt_mel.shape[1] + 2 * notes.shape[1], device=self.device) % notes.shape[1]
            condition = features[:, frames] + self.f0_encoder(frames[None] % PITCHES)
            waveforms.append(self.sing(prompt_mel, condition, num_inference_steps, guidance_scale))
        return torch.cat(waveforms, dim=1)


class PipelineSoulXSingerSVC(FlowMatchingPipeline):
    """From another voice: its Whisper features."""

    _float32_modules = ("mel", "vocoder", "whisper_encoder")

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.whisper_encoder = WhisperEncoder()

    @torch.inference_mode()
    def forward(
        self, prompt: torch.Tensor, segments: list[torch.Tensor], num_inference_steps: int, guidance_scale: float
    ) -> torch.Tensor:
        prompt = prompt.to(self.device)
        trunk, prompt_mel = self.f0_encoder.weight.dtype, self.mel(prompt)
        prompt_features = self.whisper_encoder.encode(prompt, trunk)
        waveforms = []
        for waveform in segments:
            features = self.whisper_encoder.encode(waveform.to(self.device), trunk)
            features = torch.cat([prompt_features, features], dim=1)
            pitches = torch.arange(features.shape[1], device=self.device)[None] % PITCHES
            condition = features + self.f0_encoder(pitches)
            waveforms.append(self.sing(prompt_mel, condition, num_inference_steps, guidance_scale))
        return torch.cat(waveforms, dim=1)


def build_soulx_singer_svs(num_layers: int = 4) -> tuple[Any, Call]:
    """`PipelineSoulXSingerSVS`, two segments a call."""
    pipe = seeded(PipelineSoulXSingerSVS(num_layers), 41)

    def call() -> dict[str, Any]:
        return {
            "prompt": noise(1, 3 * HOP, seed=1),
            "segments": [torch.tensor([[3, 9, 14]]), torch.tensor([[21, 8]])],
            "num_inference_steps": 2,
            "guidance_scale": 1.5,
        }

    return pipe, call


def build_soulx_singer_svc(num_layers: int = 4) -> tuple[Any, Call]:
    """`PipelineSoulXSingerSVC`, two segments a call."""
    pipe = seeded(PipelineSoulXSingerSVC(num_layers), 43)

    def call() -> dict[str, Any]:
        return {
            "prompt": noise(1, 3 * HOP, seed=1),
            "segments": [noise(1, 6 * HOP, seed=2), noise(1, 4 * HOP, seed=3)],
            "num_inference_steps": 2,
            "guidance_scale": 1.5,
        }

    return pipe, call
