"""Attention processors, fused projections, attention backends and FreeU beside offload, in every mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from tests import tiny
from tests.equality import Build, assert_equal_outputs, outputs
from tests.living import Feature, before_and_after, denoisers, enable, fast_ones, home, sd3, with_arguments
from tests.modes import in_every_mode
from tests.zoo import PIPELINES


class Louder:
    """A processor without weights: what another one gives, louder."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._inner(attention, hidden_states, *args, **kwargs)
        return tuple(part * 1.5 for part in output) if isinstance(output, tuple) else output * 1.5


class Weighted(nn.Module):
    """A processor with a weight of its own, which becomes a part of its block."""

    def __init__(self, inner: Any, gain: float) -> None:
        super().__init__()
        self._inner = [inner]
        self.gain = nn.Parameter(torch.tensor([gain]), requires_grad=False)

    def forward(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._inner[0](attention, hidden_states, *args, **kwargs)
        return tuple(part * self.gain for part in output) if isinstance(output, tuple) else output * self.gain


def set_louder(pipe: Any) -> None:
    for dit in denoisers(pipe):
        dit.set_attn_processor({name: Louder(inner) for name, inner in dit.attn_processors.items()})


def set_weighted(pipe: Any) -> None:
    for dit in denoisers(pipe):
        made = {name: Weighted(inner, 1.2) for name, inner in dit.attn_processors.items()}
        for processor in made.values():
            processor.gain.data = home(pipe, processor.gain.data)
        dit.set_attn_processor(made)


def reset_processors(pipe: Any) -> None:
    set_weighted(pipe)
    for dit in denoisers(pipe):
        dit.set_attn_processor({name: processor._inner[0] for name, processor in dit.attn_processors.items()})


def set_backend(pipe: Any) -> None:
    for dit in denoisers(pipe):
        before, _ = _AttentionBackendRegistry.get_active_backend()
        dit.set_attention_backend("_native_math")
        # The processors have it now; it would stay the default of other models, too.
        _AttentionBackendRegistry.set_active_backend(before)
        processors = [getattr(module, "processor", None) for module in dit.modules()]
        assert any(getattr(processor, "_attention_backend", None) == "_native_math" for processor in processors)


def fused(pipe: Any) -> list[nn.Module]:
    """The fused projections of a pipeline's DiTs and VAE."""
    models = [*denoisers(pipe), pipe.vae]
    return [part for model in models for name, part in model.named_modules() if name.endswith(("to_qkv", "to_kv"))]


def fuse(pipe: Any) -> None:
    """Fused projections give the same numbers here, so what counts is that they are used: the parts aren't any more."""
    for dit in denoisers(pipe):
        dit.fuse_qkv_projections()
    used: list[nn.Module] = []
    for projection in fused(pipe):
        projection.register_forward_pre_hook(lambda module, _: used.append(module))
    pipe._fused_that_ran = used
    assert fused(pipe)


def fuse_and_unfuse(pipe: Any) -> None:
    for dit in denoisers(pipe):
        dit.fuse_qkv_projections()
        dit.unfuse_qkv_projections()


def fuse_by_pipeline(pipe: Any) -> None:
    pipe.fuse_qkv_projections(unet=True, vae=True)
    assert len(fused(pipe)) > len([part for name, part in pipe.unet.named_modules() if name.endswith("to_qkv")])


def set_classic(pipe: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    pipe.unet.set_attn_processor(AttnProcessor())


def use_freeu(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)


def use_freeu_and_stop(pipe: Any) -> None:
    use_freeu(pipe)
    pipe.disable_freeu()


def slice_attention(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def put_channels_last(pipe: Any) -> None:
    pipe.unet.to(memory_format=torch.channels_last)


FLUX, WAN, SDXL = (PIPELINES[name] for name in ("FluxPipeline", "WanPipeline", "StableDiffusionXLPipeline"))
SD, ANIMATE = PIPELINES["StableDiffusionPipeline"], PIPELINES["AnimateDiffPipeline"]
CASES: dict[str, tuple[Build, Callable[[Any], None], bool]] = {
    "processors, sd3": (sd3, set_louder, True),
    "processors with weights, sd3": (sd3, set_weighted, True),
    "processors and back, sd3": (sd3, reset_processors, False),
    "processors, wan": (WAN, set_louder, True),
    "processors with weights, wan": (WAN, set_weighted, True),
    "processors, sdxl": (SDXL, set_louder, True),
    "processors with weights, sdxl": (SDXL, set_weighted, True),
    "backend, flux": (FLUX, set_backend, True),
    "backend, wan": (WAN, set_backend, True),
    "fused, flux": (FLUX, fuse, False),
    "fused, wan": (WAN, fuse, False),
    "fused and unfused, flux": (FLUX, fuse_and_unfuse, False),
    "fused and unfused, wan": (WAN, fuse_and_unfuse, False),
    "fused by the pipeline, with the VAE, sdxl": (SDXL, fuse_by_pipeline, False),
    "classic processor, sdxl": (SDXL, set_classic, True),
    "freeu, sdxl": (SDXL, use_freeu, True),
    "freeu, sd": (SD, use_freeu, True),
    "freeu, animatediff": (ANIMATE, use_freeu, True),
    "freeu and back, sdxl": (SDXL, use_freeu_and_stop, False),
    "attention slicing, sdxl": (SDXL, slice_attention, True),
    "channels last, sdxl": (SDXL, put_channels_last, True),
}


@functools.cache
def feature(name: str) -> Feature:
    build, change, shows = CASES[name]
    return Feature(build, change, shows)


@pytest.mark.parametrize(
    ("name", "when"),
    fast_ones(
        [(name, when) for name in CASES for when in ("before", "after")],
        ("processors with weights, sd3", "after"),
        ("fused, flux", "after"),
    ),
)
@in_every_mode
def test_it_gives_what_it_gives_without_offload(mode: str, name: str, when: str, device: torch.device) -> None:
    feature(name).check(mode, when, device)


@in_every_mode
def test_what_was_fused_later_is_what_runs(mode: str, device: torch.device) -> None:
    """The fused weights are new ones in blocks that are offloaded; they are streamed with them."""
    _, expected = feature("fused, flux").expected(device)
    pipe, call = feature("fused, flux").fresh()
    handle = enable(pipe, mode)
    tiny.run(pipe, call)
    pinned = handle.pinned_bytes
    fuse(pipe)
    assert_equal_outputs(outputs(pipe, call, 2), expected, mode)
    blocks = [part for name, part in pipe.transformer.named_modules() if name.endswith("to_qkv")]
    assert blocks and set(blocks) <= set(pipe._fused_that_ran)
    assert {part.weight.device.type for part in blocks} == {"cpu"} and handle.pinned_bytes > pinned


@in_every_mode
def test_processors_set_in_a_callback_count_from_the_next_step(mode: str, device: torch.device) -> None:
    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            set_weighted(pipe)
        return {}

    resident, call = feature("processors with weights, sd3").fresh()
    late = with_arguments(call, num_inference_steps=3, callback_on_step_end=change)
    resident.to(device)
    plain = tiny.run(resident, with_arguments(call, num_inference_steps=3))
    expected = [tiny.run(resident, late), tiny.run(resident, call)]
    assert (plain != expected[0]).any()
    pipe, _ = feature("processors with weights, sd3").fresh()
    enable(pipe, mode)
    assert_equal_outputs([tiny.run(pipe, late), tiny.run(pipe, call)], expected, mode)


def put_free_noise(pipe: Any) -> None:
    pipe.enable_free_noise(context_length=2, context_stride=1)
    assert any(type(part).__name__ == "FreeNoiseTransformerBlock" for part in pipe.unet.modules())


FREE_NOISE = Feature(PIPELINES["AnimateDiffPipeline"], put_free_noise, shows=False)


@pytest.mark.slow
@before_and_after
@in_every_mode
def test_free_noise_puts_other_blocks_into_motion_modules(mode: str, when: str, device: torch.device) -> None:
    """It replaces modules within the UNet's blocks by others with copies of their weights."""
    FREE_NOISE.check(mode, when, device)
