"""What a resolution means for a call: forwards, operations of each block, and an estimate of activations.

Operations are those of matrix products: two for each weight and token, and those of attention. Activations are an
estimate: what a block or a decoder holds at its widest, by widths, tokens and pixels, with fused attention. Measure
where it matters.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from diffusers_omni_offload.planning.costs import ComponentCost
from diffusers_omni_offload.topology.plan import BlockStack

Stream = Literal["image", "text", "both", "sample"]
"""What a weight is multiplied with: tokens of the image or video, of the text, of both, or one vector a sample."""

#: Widths that a transformer block holds for each token at its widest: so many of its own, and so many of its
#: feed-forward.
_OWN_WIDTHS, _INNER_WIDTHS = 8, 2
#: Feature maps of its second-smallest width that a decoder holds at full resolution: one of images; and one of videos,
#: which decodes a first frame and then a few at a time, beside a cache of earlier ones.
_MAPS_OF_IMAGE, _MAPS_OF_FIRST_FRAME, _MAPS_OF_FRAMES = 4, 10, 26


@dataclass(frozen=True)
class Call:
    """What is asked of a call; None stands for the pipeline's default.

    Attributes:
        height: in pixels.
        width: in pixels.
        num_frames: 1 for images.
        num_inference_steps: denoising steps.
        guidance: whether there is a second, negative prompt, as classifier-free guidance needs it.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance: bool | None = None


@dataclass(frozen=True)
class ComponentLoad:
    """What a component does in a call.

    Attributes:
        forwards: how often it runs.
        block_operations: of each block in one forward, in order.
        other_operations: of one forward outside of blocks.
        activation_nbytes: device bytes beside weights at the most, an estimate.
    """

    forwards: int
    block_operations: tuple[float, ...] = ()
    other_operations: float = 0.0
    activation_nbytes: int = 0


@dataclass(frozen=True)
class Workload:
    """A call.

    Attributes:
        call: with the defaults in the place of None.
        image_tokens: tokens of the image or video in a forward of a DiT, of one sample.
        text_tokens: tokens of the text, at the most.
        loads: path of a component -> what it does.
    """

    call: Call
    image_tokens: int
    text_tokens: int
    loads: Mapping[str, ComponentLoad]

    def __str__(self) -> str:
        asked = self.call
        frames = f" x {asked.num_frames} frames" if asked.num_frames not in (None, 1) else ""
        guided = "with" if asked.guidance else "without"
        return (
            f"{asked.width} x {asked.height}{frames}, {asked.num_inference_steps} steps, {guided} a negative prompt: "
            f"{self.image_tokens:,} tokens and {self.text_tokens} of text"
        )


@dataclass(frozen=True)
class _Family:
    """How the DiTs of a family read their tokens.

    Attributes:
        streams: pattern of a weight's path in its block -> what it is multiplied with; the first that is found counts.
        is_joint: whether image and text attend to each other in one attention; otherwise the image reads the text.
        guided_by: how a negative prompt runs: in a forward of its own, or in the same one as a second sample.
        is_guided: whether pipelines have one by default.
        other_text_tokens: tokens besides `max_sequence_length`.
    """

    streams: Mapping[str, Stream]
    is_joint: bool = True
    guided_by: Literal["forward", "sample"] = "forward"
    is_guided: bool = False
    other_text_tokens: int = 0


_TEXT_STREAM: Mapping[str, Stream] = {r"add_[qkv]_proj|to_add_out|ff_context|txt_mlp": "text"}

_FAMILIES: Mapping[str, _Family] = {
    "WanTransformer3DModel": _Family({r"attn2\.(to_[kv]|add_)": "text"}, is_joint=False, is_guided=True),
    "Flux2Transformer2DModel": _Family({**_TEXT_STREAM, r"to_qkv_mlp_proj|attn\.to_out\.weight": "both"}),
    "QwenImageTransformer2DModel": _Family({r"(img|txt)_mod": "sample", **_TEXT_STREAM}),
    "SD3Transformer2DModel": _Family(
        {r"norm1(_context)?\.linear": "sample", **_TEXT_STREAM},
        guided_by="sample",
        is_guided=True,
        other_text_tokens=77,
    ),
}

_OUTSIDE: Mapping[str, Stream] = {
    r"patch_embedding|x_embedder|img_in|pos_embed\.proj|proj_out": "image",
    r"context_embedder|txt_in|text_embedder": "text",
    r"": "sample",
}
"""Streams of weights outside of blocks."""


def workload(
    pipe: Any, stacks: Mapping[str, BlockStack], call: Call, *, text_tokens: int | None = None
) -> Workload | None:
    """What a call of `pipe` does.

    Args:
        pipe: a pipeline, with weights or without.
        stacks: path of a component -> its blocks; see `survey.survey_blocks`.
        call: what is asked for.
        text_tokens: of a prompt; None means the most that the pipeline takes.

    Returns:
        None for a family whose operations aren't known.
    """
    dits = {path: stack for path, stack in stacks.items() if stack.kind == "dit"}
    families = {path: _FAMILIES.get(type(getattr(pipe, path, None)).__name__) for path in dits}
    family = next((found for found in families.values() if found is not None), None)
    vae = getattr(pipe, "vae", None)
    if family is None or any(found is not family for found in families.values()) or vae is None:
        return None
    asked = _with_defaults(pipe, call, family)
    space, time = _scales(vae)
    patch = _patch(getattr(pipe, next(iter(dits))), vae)
    frames = -(-(asked.num_frames - 1) // time) + 1
    image = frames * (asked.height // (space * patch)) * (asked.width // (space * patch))
    text = text_tokens or default_of(pipe, "max_sequence_length", 512) + family.other_text_tokens
    samples = 2 if asked.guidance and family.guided_by == "sample" else 1
    forwards = _forwards(pipe, list(dits), asked, family)
    counts = _Tokens(image, text, samples)
    loads = {
        path: replace(_dit_load(getattr(pipe, path), stack, family, counts), forwards=forwards[path])
        for path, stack in dits.items()
    }
    for path, stack in stacks.items():
        if stack.kind == "encoder":
            prompts = 2 if asked.guidance else 1
            loads[path] = _encoder_load(getattr(pipe, path), stack, text, prompts)
    loads["vae"] = ComponentLoad(1, activation_nbytes=decoder_nbytes(vae, asked.height, asked.width, asked.num_frames))
    return Workload(asked, image, text, loads)


def with_workload(
    components: Iterable[ComponentCost], found: Workload, operations_per_s: float | None
) -> tuple[ComponentCost, ...]:
    """Costs with forwards and activations of a call, and times, if the device's rate is known.

    Args:
        components: the costs.
        found: the call.
        operations_per_s: of the device in matrix products; None leaves times unknown.
    """
    return tuple(_with_load(component, found.loads.get(component.path), operations_per_s) for component in components)


def default_of(pipe: Any, name: str, otherwise: int) -> int:
    """The default of an argument of the pipeline's call, if it has one that is a number."""
    parameter = inspect.signature(type(pipe).__call__).parameters.get(name)
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else otherwise


def _with_load(component: ComponentCost, load: ComponentLoad | None, rate: float | None) -> ComponentCost:
    if load is None:
        return component
    component = replace(component, forwards=load.forwards, activation_nbytes=load.activation_nbytes)
    if rate is None:
        return component
    operations = load.block_operations or (0.0,) * len(component.blocks)
    blocks = tuple(
        replace(block, seconds=count / rate) for block, count in zip(component.blocks, operations, strict=True)
    )
    return replace(component, blocks=blocks, seconds=load.other_operations / rate)


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one sample, and samples in a forward."""

    image: int
    text: int
    samples: int
    by_stream: Mapping[Stream, int] = field(init=False)

    def __post_init__(self) -> None:
        counts = {"image": self.image, "text": self.text, "both": self.image + self.text, "sample": 1}
        object.__setattr__(self, "by_stream", counts)


def _with_defaults(pipe: Any, call: Call, family: _Family) -> Any:
    """The call, with a number for everything."""
    return Call(
        height=call.height or default_of(pipe, "height", 1024),
        width=call.width or default_of(pipe, "width", 1024),
        num_frames=call.num_frames or default_of(pipe, "num_frames", 1),
        num_inference_steps=call.num_inference_steps or default_of(pipe, "num_inference_steps", 50),
        guidance=family.is_guided if call.guidance is None else call.guidance,
    )


def _scales(vae: Any) -> tuple[int, int]:
    """Pixels and frames that a latent stands for."""
    config = vae.config
    halvings = config.get("temperal_downsample")
    if halvings is not None:
        return (
            config.get("scale_factor_spatial") or 2 ** len(halvings),
            config.get("scale_factor_temporal") or 2 ** sum(map(bool, halvings)),
        )
    return 2 ** (len(config["block_out_channels"]) - 1), 1


def _patch(dit: Any, vae: Any) -> int:
    """Latents that a token stands for, in one direction."""
    sizes = [dit.config.get("patch_size"), vae.config.get("patch_size")]
    return max((size[-1] if isinstance(size, Sequence) else size) or 1 for size in sizes)


def _forwards(pipe: Any, dits: Sequence[str], asked: Any, family: _Family) -> dict[str, int]:
    """How often each DiT runs in a call."""
    steps = {path: asked.num_inference_steps for path in dits}
    boundary = getattr(pipe, "config", {}).get("boundary_ratio")
    if len(dits) == 2 and boundary is not None:
        early = _steps_above(getattr(pipe, "scheduler", None), asked.num_inference_steps, boundary)
        steps = {dits[0]: early, dits[1]: asked.num_inference_steps - early}
    each = 2 if asked.guidance and family.guided_by == "forward" else 1
    return {path: each * count for path, count in steps.items()}


def _steps_above(scheduler: Any, steps: int, boundary: float) -> int:
    """How many steps begin with at least the share `boundary` of noise, which are those of the first expert."""
    try:
        trial = copy.deepcopy(scheduler)
        trial.set_timesteps(steps)
        return int((trial.timesteps >= boundary * trial.config.num_train_timesteps).sum())
    except (AttributeError, TypeError, ValueError):
        return round(steps * (1 - boundary))


# Operations ----------------------------------------------------------------------------------------------------------


def _dit_load(dit: Any, stack: BlockStack, family: _Family, tokens: _Tokens) -> ComponentLoad:
    width = dit.config["num_attention_heads"] * dit.config["attention_head_dim"]
    blocks = [_block_operations(block, family, tokens, width) for block in stack.blocks]
    inside = {id(weight) for block in stack.blocks for weight in block.parameters()}
    outside = sum(
        _products(weight) * tokens.by_stream[_stream(name, _OUTSIDE)]
        for name, weight in dit.named_parameters()
        if id(weight) not in inside
    )
    return ComponentLoad(
        forwards=0,
        block_operations=tuple(tokens.samples * count for count in blocks),
        other_operations=float(tokens.samples * outside),
        activation_nbytes=_block_nbytes(
            stack.blocks, tokens.samples * tokens.by_stream["both" if family.is_joint else "image"], width
        ),
    )


def _block_operations(block: nn.Module, family: _Family, tokens: _Tokens, width: int) -> float:
    streams = {**family.streams, r"": "image"}
    products = sum(
        _products(weight) * tokens.by_stream[_stream(name, streams)] for name, weight in block.named_parameters()
    )
    image, both = tokens.image, tokens.by_stream["both"]
    pairs = both**2 if family.is_joint else image * both
    if family.is_joint and hasattr(block, "attn2") and block.attn2 is not None:
        pairs += image**2  # The image attends to itself once more.
    return float(products + 4 * width * pairs)


def _stream(name: str, streams: Mapping[str, Stream]) -> Stream:
    return next(stream for pattern, stream in streams.items() if re.search(pattern, name))


def _products(weight: torch.Tensor) -> int:
    """Operations of a matrix, or of a convolution's, for each token."""
    return 2 * weight.numel() if weight.dim() >= 2 and weight.shape[0] > 1 else 0


def _encoder_load(encoder: Any, stack: BlockStack, tokens: int, prompts: int) -> ComponentLoad:
    config = encoder.config.get_text_config()
    width = config.hidden_size
    # Towers for images don't run for a text.
    reads = [not re.match(r"(.*\.)?(vision|visual)", path) for path in stack.block_paths]
    operations = [
        float(sum(map(_products, block.parameters())) * tokens + 4 * width * tokens**2) if runs else 0.0
        for block, runs in zip(stack.blocks, reads, strict=True)
    ]
    hidden = [block for block, runs in zip(stack.blocks, reads, strict=True) if runs]
    head = encoder.get_output_embeddings() if hasattr(encoder, "get_output_embeddings") else None
    logits = 4 * tokens * config.vocab_size if head is not None else 0
    # All hidden states are kept, as most pipelines take one from the middle.
    kept = _element(hidden) * tokens * width * len(hidden)
    return ComponentLoad(prompts, tuple(operations), 0.0, kept + logits + _block_nbytes(hidden, tokens, width))


# Activations ---------------------------------------------------------------------------------------------------------


def _block_nbytes(blocks: Sequence[nn.Module], tokens: int, width: int) -> int:
    """An estimate of what the widest block holds."""
    matrices = (weight for block in blocks for weight in block.parameters() if weight.dim() == 2)
    inner = max((max(weight.shape) for weight in matrices), default=0)
    return _element(blocks) * tokens * (_OWN_WIDTHS * width + _INNER_WIDTHS * inner)


def _element(blocks: Sequence[nn.Module]) -> int:
    """Bytes of an element of hidden states: of most weights."""
    sizes = [weight.element_size() for block in blocks[:1] for weight in block.parameters() if weight.dim() == 2]
    return max(set(sizes), key=sizes.count) if sizes else 2


def decoder_nbytes(vae: Any, height: int, width: int, num_frames: int) -> int:
    """An estimate of what decoding holds beside weights, in bytes.

    Args:
        vae: its configuration has the widths; after `enable_tiling()` it decodes a tile at a time.
        height, width, num_frames: of the output.
    """
    config = vae.config
    if config.get("dim_mult") is not None:
        narrow = (config.get("decoder_base_dim") or config["base_dim"]) * config["dim_mult"][1]
        maps = _MAPS_OF_FRAMES if num_frames > 1 else _MAPS_OF_FIRST_FRAME
    else:
        narrow = config["block_out_channels"][min(1, len(config["block_out_channels"]) - 1)]
        maps = _MAPS_OF_IMAGE
    element = next(vae.parameters()).element_size()
    tile, outputs = _tile(vae, height, width)
    return element * (tile * maps * narrow + round(height * width * outputs) * 3 * num_frames)


def _tile(vae: Any, height: int, width: int) -> tuple[int, float]:
    """Pixels that are decoded at once, and how often the output is there at the end."""
    if not getattr(vae, "use_tiling", False):
        return height * width, 2  # While its last part is put to the rest.
    sizes, overlap = tiling_of(vae), getattr(vae, "tile_overlap_factor", 0.0)
    pixels, in_tiles = 1, 1.0
    for side, whole in (("height", height), ("width", width)):
        tile = sizes.get(f"tile_sample_min_{side}") or sizes.get("tile_sample_min_size") or whole
        stride = sizes.get(f"tile_sample_stride_{side}") or round(tile * (1 - overlap)) or tile
        pixels *= min(whole, tile)
        in_tiles *= tile / stride
    # Its tiles, which overlap, the rows that they are blended to, and the whole.
    return pixels, in_tiles + 2


def tiling_of(vae: Any) -> dict[str, int]:
    """The sizes of the tiles that a VAE is set to decode; none if it isn't."""
    if not getattr(vae, "use_tiling", False):
        return {}
    return {name: size for name, size in vars(vae).items() if name.startswith("tile_sample_") and isinstance(size, int)}
