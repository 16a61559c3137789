"""A toy DiT and a toy pipeline that declares its own components: for walks and grids that need hundreds of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn

from diffusers_omni_offload.declarations import OffloadPlan


class ToyBlock(nn.Module):
    """A residual MLP with every kind of leaf: parameters, a persistent and a non-persistent buffer, mixed dtypes.

    Maps `[batch, tokens, width]` to the same shape and dtype; each of its tensors changes the output.

    Args:
        width: features in and out.
        hidden: features of the hidden layer, so the bytes of the block.
        gate_dtype: dtype of the `gate` parameter, which may differ from the rest of the block.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        gate_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int, mean: float = 0.0, std: float = 0.3) -> torch.Tensor:
            return mean + std * torch.randn(*shape, generator=generator)

        self.expand = nn.Linear(width, hidden, dtype=dtype)
        self.contract = nn.Linear(hidden, width, dtype=dtype)
        self.gate = nn.Parameter(noise(width, mean=1.0).to(gate_dtype or dtype))
        self.register_buffer("shift", noise(width).to(dtype))
        self.register_buffer("scale", noise(hidden, mean=1.0).to(dtype), persistent=False)
        with torch.no_grad():
            for linear in (self.expand, self.contract):
                linear.weight.copy_(noise(*linear.weight.shape))
                linear.bias.copy_(noise(*linear.bias.shape))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.expand(hidden_states + self.shift)) * self.scale
        change = self.contract(hidden) * self.gate.to(hidden_states.dtype)
        # Bounded, so that 100 blocks neither overflow nor fade out.
        return torch.tanh(0.7 * hidden_states + 0.6 * change) * 1.5


class ToyDiT(ModelMixin, ConfigMixin):
    """`num_blocks` residual blocks between two projections; all weights are a function of `seed`.

    Args:
        num_blocks: blocks in `blocks`.
        width: features of tokens.
        sizes: hidden features of each block (repeated if shorter than `num_blocks`); `2 * width` if None.
        dtype: dtype of all weights, a `torch.dtype` or its name ("bfloat16").
        gate_dtype: another dtype for each block's `gate`; None for the same.
        in_channels: features of the input and the output.
        seed: seed of the weights.
    """

    _no_split_modules = ["ToyBlock"]

    @register_to_config
    def __init__(
        self,
        num_blocks: int = 4,
        width: int = 32,
        sizes: Sequence[int] | None = None,
        dtype: Any = "float32",
        gate_dtype: Any = None,
        in_channels: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        real_dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        real_gate_dtype = getattr(torch, gate_dtype) if isinstance(gate_dtype, str) else gate_dtype
        # A torch.dtype can't be written to config.json, its name can.
        self.register_to_config(
            dtype=str(real_dtype).removeprefix("torch."),
            gate_dtype=None if real_gate_dtype is None else str(real_gate_dtype).removeprefix("torch."),
            sizes=None if sizes is None else list(sizes),
        )
        hidden = [2 * width] if sizes is None else list(sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.proj_in = nn.Linear(in_channels, width, dtype=real_dtype)
            self.blocks = nn.ModuleList(
                ToyBlock(width, hidden[index % len(hidden)], real_dtype, real_gate_dtype, seed=1000 * seed + index)
                for index in range(num_blocks)
            )
            self.norm = nn.LayerNorm(width, dtype=real_dtype)
            self.proj_out = nn.Linear(width, in_channels, dtype=real_dtype)

    def forward(self, x: torch.Tensor, *, order: Iterable[int] | None = None, skip: Iterable[int] = ()) -> torch.Tensor:
        """Run `[batch, tokens, in_channels]` through the blocks of `order` (all of them if None), less those of `skip`.

        `order` may repeat, permute and leave out blocks.
        """
        skipped = set(skip)
        hidden_states = self.proj_in(x.to(self.proj_in.weight.dtype))
        for index in range(len(self.blocks)) if order is None else order:
            if index not in skipped:
                hidden_states = self.blocks[index](hidden_states)
        return self.proj_out(self.norm(hidden_states))


class ToyTextEncoder(ModelMixin, ConfigMixin):
    """Residual blocks over an embedding: `[batch, tokens]` int64 to `[batch, tokens, width]`."""

    @register_to_config
    def __init__(self, num_layers: int = 2, width: int = 8, vocabulary: int = 16, seed: int = 50) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(ToyBlock(width, 2 * width, seed=1000 * seed + i) for i in range(num_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed(tokens)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class ToyVAE(ModelMixin, ConfigMixin):
    """One convolution over the tokens, called through `decode`."""

    @register_to_config
    def __init__(self, channels: int = 8, seed: int = 60) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.decoder = nn.Conv1d(channels, 3, 3, padding=1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, channels]` to `[batch, 3, tokens]`."""
        hook = getattr(self, "_hf_hook", None)
        if hook is not None and hasattr(hook, "pre_forward"):
            (latents,), _ = hook.pre_forward(self, latents)
        return self.decoder(latents.transpose(1, 2).to(self.decoder.weight.dtype))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decode(latents)


class ToyOutput(BaseOutput):
    """`images`: a tensor on the pipeline's device."""

    images: torch.Tensor


class ToyPipeline(DiffusionPipeline):
    """A pipeline whose class carries its own declarations, so it needs no adapter.

    Args of the constructor: `transformer`, and optionally a second DiT, a text encoder and a VAE.
    """

    model_cpu_offload_seq = "text_encoder->transformer->transformer_2->vae"
    _optional_components = ["transformer_2", "text_encoder", "vae"]
    _callback_tensor_inputs = ["latents"]

    _dit_modules = ["transformer", "transformer_2"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("layers",)},
        resident_dit_paths=("transformer", "transformer_2"),
        encoder_component_types={"text_encoder": "text_encoder"},
    )

    def __init__(
        self,
        transformer: ToyDiT,
        transformer_2: ToyDiT | None = None,
        text_encoder: ToyTextEncoder | None = None,
        vae: ToyVAE | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, transformer_2=transformer_2, text_encoder=text_encoder, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        x: torch.Tensor | None = None,
        steps: int = 2,
        skip: Sequence[int] = (),
        order: Sequence[int] | None = None,
        forwards_per_step: int = 1,
        callback_on_step_end: Callable[..., Any] | None = None,
        generator: torch.Generator | None = None,
        tokens: torch.Tensor | None = None,
    ) -> ToyOutput:
        """Denoise `x` (`[batch, tokens, channels]`, random if None) in `steps` steps.

        Args:
            skip: blocks that every forward leaves out.
            order: blocks that every forward runs, in this order.
            forwards_per_step: 2 runs each DiT twice a step, as classifier-free guidance does.
            callback_on_step_end: called with `(pipe, step, timestep, {"latents": latents})`; may return new latents.
        """
        device = self._execution_device
        channels = self.transformer.config.in_channels
        if x is None:
            generator = generator or torch.Generator("cpu").manual_seed(0)
            x = torch.randn(1, 4, channels, generator=generator)
        latents = x.to(device)
        if self.text_encoder is not None:
            tokens = torch.arange(latents.shape[1])[None] % 16 if tokens is None else tokens
            embeddings = self.text_encoder(tokens.to(device))
            latents = latents + embeddings.mean(dim=-1, keepdim=True).to(latents.dtype)
        for step in range(steps):
            # The first half of the steps runs the first DiT, the rest the second, where there is one.
            is_late = self.transformer_2 is not None and 2 * step >= steps
            dit = self.transformer_2 if is_late else self.transformer
            prediction = dit(latents, order=order, skip=skip)
            for _ in range(forwards_per_step - 1):
                # On another input, so that a weight that changes between the two forwards shows.
                prediction = prediction + 0.5 * (prediction - dit(0.5 * latents, order=order, skip=skip))
            latents = 0.8 * latents + 0.5 * prediction.to(latents.dtype)
            if callback_on_step_end is not None:
                outputs = callback_on_step_end(self, step, step, {"latents": latents}) or {}
                latents = outputs.get("latents", latents)
        images = latents if self.vae is None else self.vae.decode(latents)
        self.maybe_free_model_hooks()
        return ToyOutput(images=images)


def build_toy(
    num_blocks: int = 4,
    *,
    two_stage: bool = False,
    text_encoder: bool = False,
    vae: bool = False,
    **dit_arguments: Any,
) -> tuple[ToyPipeline, Callable[[], dict[str, Any]]]:
    """A `ToyPipeline` and a function that makes fresh arguments for one call; `dit_arguments` go to `ToyDiT`."""
    pipe = ToyPipeline(
        transformer=ToyDiT(num_blocks, **dit_arguments).eval(),
        transformer_2=ToyDiT(num_blocks, **{**dit_arguments, "seed": 7}).eval() if two_stage else None,
        text_encoder=ToyTextEncoder().eval() if text_encoder else None,
        vae=ToyVAE().eval() if vae else None,
    )
    return pipe, lambda: {"generator": torch.Generator("cpu").manual_seed(0)}
