"""DiTs of 40 blocks with the block structure, leaves and module depth of Wan, SD3 and Flux, at any width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from diffusers_omni_offload.declarations import OffloadPlan

#: Heads of every attention are this wide, or a quarter of the width if that is less.
_HEAD_WIDTH = 128


class Attention(nn.Module):
    """Attention of `[batch, tokens, width]` over a context; 10 leaves in 7 modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(width), nn.RMSNorm(width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = self.norm_q(self.to_q(hidden_states)), self.norm_k(self.to_k(context)), self.to_v(context)
        return self.to_out[0](attend(q, k, v))


class FeedForward(nn.Module):
    """A residual branch `[..., width]` to the same; 4 leaves in 3 modules."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            hidden_states = layer(hidden_states)
        return hidden_states


class WanLikeBlock(nn.Module):
    """Self-attention, cross-attention and a feed-forward layer: 26 leaves in 24 modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn1, self.attn2 = Attention(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.ffn = FeedForward(width, 4 * width)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm1(hidden_states)
        hidden_states = hidden_states + self.attn1(normed, normed)
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), context)
        return hidden_states + self.ffn(hidden_states), context


class JointBlock(nn.Module):
    """One attention over image and text tokens, with weights for each: 28 leaves, as in SD3 and Flux."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm1_context = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.to_qkv = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])
        self.to_out, self.to_add_out = nn.Linear(width, width), nn.Linear(width, width)
        self.ff, self.ff_context = FeedForward(width, 4 * width), FeedForward(width, 4 * width)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift, scale = self.norm1(hidden_states[:, :1]).chunk(2, dim=-1)
        context_shift, context_scale = self.norm1_context(context[:, :1]).chunk(2, dim=-1)
        image = F.layer_norm(hidden_states, hidden_states.shape[-1:]) * (1 + scale) + shift
        text = F.layer_norm(context, context.shape[-1:]) * (1 + context_scale) + context_shift
        parts = [torch.cat([self.to_qkv[i](image), self.to_qkv[i + 3](text)], dim=1) for i in range(3)]
        attended = attend(*parts)
        hidden_states = hidden_states + self.to_out(attended[:, : image.shape[1]])
        context = context + self.to_add_out(attended[:, image.shape[1] :])
        return hidden_states + self.ff(hidden_states), context + self.ff_context(context)


class SingleBlock(nn.Module):
    """Attention and feed-forward layer side by side: half the bytes of a `JointBlock`, as Flux's second stack has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Linear(width, 2 * width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(width), nn.RMSNorm(width)
        self.proj_mlp, self.proj_out = nn.Linear(width, 4 * width), nn.Linear(5 * width, width)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([hidden_states, context], dim=1)
        shift, scale = self.norm(both[:, :1]).chunk(2, dim=-1)
        normed = F.layer_norm(both, both.shape[-1:]) * (1 + scale) + shift
        attended = attend(self.norm_q(self.to_q(normed)), self.norm_k(self.to_k(normed)), self.to_v(normed))
        mlp = F.gelu(self.proj_mlp(normed), approximate="tanh")
        both = both + self.proj_out(torch.cat([attended, mlp], dim=-1))
        return both[:, : hidden_states.shape[1]].clone(), both[:, hidden_states.shape[1] :].clone()


class HalfBlock(nn.Module):
    """Self-attention and a feed-forward layer: 14 leaves, 2/3 of the bytes of a `WanLikeBlock`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width)
        self.ffn = FeedForward(width, 4 * width)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = F.layer_norm(hidden_states, hidden_states.shape[-1:])
        hidden_states = hidden_states + self.attn(normed, normed)
        return hidden_states + self.ffn(hidden_states), context


class DoubleBlock(nn.Module):
    """Two `HalfBlock`s: twice the bytes and twice the operations of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = HalfBlock(width), HalfBlock(width)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.second(*self.first(hidden_states, context))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Multi-head attention of `[batch, tokens, width]` tensors."""
    head_width = min(_HEAD_WIDTH, q.shape[-1] // 4)
    heads = [part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in (q, k, v)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


#: By family: the classes of the first and of the second stack's blocks, and the share of blocks in the first.
FAMILIES: dict[str, tuple[type[nn.Module], type[nn.Module], float]] = {
    "Wan-like": (WanLikeBlock, WanLikeBlock, 1.0),
    "SD3-like": (JointBlock, JointBlock, 1.0),
    "Flux-like": (JointBlock, SingleBlock, 1 / 3),
    "2:1": (DoubleBlock, HalfBlock, 1 / 3),
}


class StackDiT(ModelMixin, ConfigMixin):
    """The blocks of a family, run in order on `[batch, tokens, width]` and a context of the same width."""

    _no_split_modules: list[str] = []

    @register_to_config
    def __init__(self, family: str = "Wan-like", num_blocks: int = 40, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        first, second, share = FAMILIES[family]
        count = round(num_blocks * share)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.transformer_blocks = nn.ModuleList(first(width) for _ in range(count))
            self.single_transformer_blocks = nn.ModuleList(second(width) for _ in range(num_blocks - count))

    def blocks(self) -> list[nn.Module]:
        """All blocks in the order in which they run."""
        return [*self.transformer_blocks, *self.single_transformer_blocks]

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            hidden_states, context = block(hidden_states, context)
        for block in self.single_transformer_blocks:
            hidden_states, context = block(hidden_states, context)
        return hidden_states


class StackPipeline(DiffusionPipeline):
    """A pipeline of one `StackDiT`, which declares its own blocks."""

    model_cpu_offload_seq = "transformer"
    _dit_modules = ["transformer"]
    _encoder_modules: list[str] = []
    _vae_modules: list[str] = []
    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks", "single_transformer_blocks")},
        resident_dit_paths=("transformer",),
    )

    def __init__(self, transformer: StackDiT) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    @torch.no_grad()
    def __call__(self, steps: int = 2, tokens: int = 8) -> torch.Tensor:
        """`steps` forwards from fixed noise; `[1, tokens, width]` on the pipeline's device."""
        hidden_states, context = self.inputs(tokens, self._execution_device)
        for _ in range(steps):
            hidden_states = F.layer_norm(self.transformer(hidden_states, context), hidden_states.shape[-1:])
        self.maybe_free_model_hooks()
        return hidden_states

    def inputs(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and context for the DiT, the same in every call."""
        generator = torch.Generator().manual_seed(0)
        shape, dtype = (1, tokens, self.transformer.config.width), self.transformer.dtype
        x, context = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        return x.to(device), context.to(device)


def build(family: str, num_blocks: int = 40, **arguments: Any) -> StackPipeline:
    """A pipeline of a `StackDiT` in `eval` mode; `arguments` go to the DiT."""
    return StackPipeline(StackDiT(family, num_blocks, **arguments).eval())


def block_nbytes(block: nn.Module) -> int:
    """Bytes of a block's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in [*block.parameters(), *block.buffers()])
