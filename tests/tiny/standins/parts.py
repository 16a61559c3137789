"""What the stand-ins are made of: a pipeline that is a plain module, norms, rotary attention, a small VAE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Call = Callable[[], dict[str, Any]]


class StandInPipeline(nn.Module):
    """A pipeline that is an `nn.Module`, with a `forward` to call it and a `device` that it keeps itself.

    Modules named in `_float32_modules` keep that dtype through every cast, as the checkpoints have them.
    """

    _float32_modules: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> StandInPipeline:
        """Move and cast everything but the modules that stay in float32; remember the device."""
        super().to(*args, **kwargs)
        for path in self._float32_modules:
            self.get_submodule(path).to(torch.float32)
        self.device = next(self.parameters()).device
        return self


@dataclass
class Latents:
    """What a VAE's `decode` returns."""

    sample: torch.Tensor


class PlainVAE(nn.Module):
    """Two convolutions; `encode` and `decode` are plain methods that announce themselves to nobody."""

    def __init__(self, latent_channels: int, channels: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(channels, latent_channels, 2, stride=2)
        self.decoder = nn.ConvTranspose2d(latent_channels, channels, 2, stride=2)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixels)

    def decode(self, latents: torch.Tensor) -> Latents:
        return Latents(self.decoder(latents))


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.eps).to(hidden.dtype)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Rotary(nn.Module):
    """Rotary position embedding: positions to a cosine and a sine of width `head_dim`; its buffer isn't saved."""

    def __init__(self, head_dim: int, base: float = 100.0) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float()[..., None] * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class TimeEmbedder(nn.Module):
    """A time in [0, 1] to an embedding of width `width`."""

    def __init__(self, width: int, frequencies: int = 8) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        scales = torch.arange(1, self.frequencies + 1, device=time.device, dtype=torch.float32)
        waves = torch.sin(time.float()[..., None] * scales)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


def rotate(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (`[batch, tokens, head_dim]`) to `[batch, tokens, heads, head_dim]`."""
    first, second = hidden.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return hidden * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """Attention over `[batch, tokens, heads, head_dim]`; the heads come back side by side."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return attended.transpose(1, 2).flatten(2)


def heads(hidden: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[batch, tokens, heads * head_dim]` as `[batch, tokens, heads, head_dim]`."""
    return hidden.unflatten(-1, (-1, head_dim))


def seeded(module: nn.Module, seed: int) -> Any:
    """Give every parameter random values that are a function of `seed`, at a scale that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.copy_(0.2 * noise + (1.0 if bool((parameter == 1).all()) else 0.0))
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return module.eval()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers on the CPU, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_ids(text: str, vocabulary: int) -> torch.Tensor:
    """The characters of `text` as `[1, length]` token ids."""
    return torch.tensor([[ord(character) % vocabulary for character in text]])


def joined(*outputs: torch.Tensor) -> torch.Tensor:
    """All outputs of a pipeline as one float32 vector, so that each is compared."""
    return torch.cat([output.detach().float().flatten() for output in outputs])
