"""Public cases of living beside caches, adapters and other offloads, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparing import State, assert_equal, leftovers, modules, resident_output
from tests.modes import MODES, in_every_mode, in_every_mode_layers_slow
from tests.test_refusals import FOREIGN_CALLS, OTHERS
from tests.tiny import build_sdxl, build_toy, build_wan, run

Build = Callable[[], tuple[Any, Callable[[], dict[str, Any]]]]


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


@cache
def toy_output(device: torch.device) -> np.ndarray:
    return resident_output(full_toy, device)


# ---------------------------------------------------------------------- caches


def _configurations(pipe: Any) -> dict[str, Any]:
    from diffusers import (
        FasterCacheConfig,
        FirstBlockCacheConfig,
        MagCacheConfig,
        PyramidAttentionBroadcastConfig,
        TaylorSeerCacheConfig,
    )

    def timestep() -> Any:
        return pipe._current_timestep

    return {
        "first block": FirstBlockCacheConfig(threshold=0.9),
        "pyramid": PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1001),
            current_timestep_callback=timestep,
        ),
        "faster": FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            current_timestep_callback=timestep,
            attention_weight_callback=lambda _: 0.3,
            is_guidance_distilled=True,
        ),
        "magnitude": MagCacheConfig(num_inference_steps=5, retention_ratio=0.2, threshold=0.9, mag_ratios=[1.0] * 5),
        "taylor": TaylorSeerCacheConfig(
            cache_interval=3, disable_cache_before_step=1, taylor_factors_dtype=torch.float32, use_lite_mode=True
        ),
    }


def five_steps() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build_wan(two_stage=False)
    return pipe, lambda: {**call(), "num_inference_steps": 5}


@cache
def cached_outputs(device: torch.device, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Without the cache and with it, everything on the device."""
    pipe, call = five_steps()
    pipe.to(device)
    plain = run(pipe, call)
    pipe.transformer.enable_cache(_configurations(pipe)[name])
    return plain, run(pipe, call)


def caches() -> Iterator[Any]:
    for name in ("first block", "pyramid", "faster", "magnitude", "taylor"):
        for order in ("before", "after"):
            for mode in MODES:
                is_fast = (name, mode, order) in {
                    ("first block", "module", "before"),
                    ("first block", "mixed", "after"),
                    ("pyramid", "module", "after"),
                }
                marks = [] if is_fast else [pytest.mark.slow]
                yield pytest.param(name, order, mode, marks=marks, id=f"{name}-{order}-{mode}")


@pytest.mark.parametrize(("name", "order", "mode"), list(caches()))
def test_diffusers_9562_caches_of_diffusers(
    device: torch.device, sim: ModuleType, name: str, order: str, mode: str
) -> None:
    """Two systems of hooks on one model: equal to the cache alone, and either can go first."""
    plain, cached = cached_outputs(device, name)
    assert not np.array_equal(plain, cached), "the cache does nothing"
    for end in ("cache first", "offload first"):
        pipe, call = five_steps()
        before = State.of(pipe)
        if order == "before":
            pipe.transformer.enable_cache(_configurations(pipe)[name])
        pipe.enable_omni_offload(**MODES[mode])
        if order == "after":
            assert_equal(run(pipe, call), plain)
            pipe.transformer.enable_cache(_configurations(pipe)[name])
        assert_equal(run(pipe, call), cached)
        pipe.transformer._reset_stateful_cache()
        assert_equal(run(pipe, call), cached)
        if end == "cache first":
            pipe.transformer.disable_cache()
            assert_equal(run(pipe, call), plain)
            pipe.disable_omni_offload()
            assert State.of(pipe).tensors == before.tensors
        else:
            pipe.disable_omni_offload()
            pipe.to(device)
            pipe.transformer._reset_stateful_cache()
            assert_equal(run(pipe, call), cached)
            pipe.transformer.disable_cache()
            assert_equal(run(pipe, call), plain)
        assert sim.hazards() == []
        # diffusers leaves its own empty registries, and forwards that it bound.
        assert not [name for name in leftovers(pipe) if not name.startswith("transformer")]
        assert not any(
            vars(part)["_diffusers_hook"].hooks for _, part in modules(pipe) if "_diffusers_hook" in vars(part)
        )


# ---------------------------------------------------------------------- adapters


def ip_adapter(unet: Any, image_features: int = 16) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights of an IP-Adapter for a UNet: a projection to four tokens, and two linears an attention."""
    generator = torch.Generator().manual_seed(70)

    def noise(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    width = unet.config.cross_attention_dim
    projection = {
        "proj.weight": noise(4 * width, image_features),
        "proj.bias": noise(4 * width),
        "norm.weight": 1 + noise(width),
        "norm.bias": noise(width),
    }
    attentions = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    weights = {}
    for index, name in enumerate(attentions):
        hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * index + 1}.{part}.weight"] = noise(hidden, width)
    return {"image_proj": projection, "ip_adapter": weights}


def _load_adapter(pipe: Any) -> None:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 16, "projection_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(71)
        config = CLIPVisionConfig(**sizes, image_size=32, patch_size=16, intermediate_size=32)
        encoder = CLIPVisionModelWithProjection(config).eval()
    processor = CLIPImageProcessorPil(crop_size={"height": 32, "width": 32}, size={"shortest_edge": 32})
    pipe.register_modules(image_encoder=encoder, feature_extractor=processor)
    pipe.load_ip_adapter(ip_adapter(pipe.unet), subfolder="", weight_name="", image_encoder_folder=None)
    pipe.set_ip_adapter_scale(0.8)


@in_every_mode_layers_slow
def test_diffusers_6151_an_ip_adapter_that_is_loaded_later(device: torch.device, sim: ModuleType, mode: str) -> None:
    """It brings an image encoder and new weights inside the UNet's blocks, which the list of what is moved lacked."""
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)

    def with_image(call: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        from PIL import Image

        return lambda: {**call(), "ip_adapter_image": Image.fromarray(image)}

    resident, call = build_sdxl()
    resident.to(device)
    plain = run(resident, call)
    _load_adapter(resident)
    resident.to(device)
    reference = run(resident, with_image(call))
    assert not np.array_equal(plain, reference)
    pipe, call = build_sdxl()
    pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), plain)
    _load_adapter(pipe)
    for _ in range(2):
        assert_equal(run(pipe, with_image(call)), reference)
    assert {parameter.device.type for parameter in pipe.image_encoder.parameters()} == {"sim"}
    added = {name: tensor.device.type for name, tensor in pipe.unet.named_parameters() if "ip" in name or "hid" in name}
    assert added and ("cpu" in added.values()) and (mode != "module" or set(added.values()) == {"cpu"})
    pipe.unload_ip_adapter()
    assert_equal(run(pipe, call), plain)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and sim.hazards() == []


# ---------------------------------------------------------------------- other offloads


@pytest.mark.parametrize("mode", ["module", "mixed"])
@pytest.mark.parametrize("name", FOREIGN_CALLS)
def test_diffusers_14358_another_offload_on_top_is_refused(
    device: torch.device, sim: ModuleType, name: str, mode: str
) -> None:
    """A manager of whole components thought that it had moved one that places itself."""
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), toy_output(device))
    before, held = State.of(pipe), torch.accelerator.memory_allocated()
    with pytest.raises((RuntimeError, ValueError), match=r"offloaded.*disable_omni_offload\(\)"):
        FOREIGN_CALLS[name](pipe, device)
    before.assert_same(State.of(pipe))
    assert torch.accelerator.memory_allocated() <= held and handle.is_enabled()
    assert_equal(run(pipe, call), toy_output(device))
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []


@in_every_mode
@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_diffusers_14358_a_component_that_somebody_else_offloads(
    device: torch.device, mode: str, component: str
) -> None:
    """Group offload on one component, ours on the pipeline: refused by the component's name, nothing moved twice."""
    pipe, _ = full_toy()
    module = getattr(pipe, component)
    module.enable_group_offload(onload_device=device, offload_type="leaf_level")
    before = {path: sorted(vars(part)) for path, part in modules(pipe)}
    with pytest.raises(RuntimeError, match=rf"{component}'s weights are moved by diffusers' group offload"):
        pipe.enable_omni_offload(**MODES[mode])
    assert {path: sorted(vars(part)) for path, part in modules(pipe)} == before and pipe.omni_offload is None


@pytest.mark.parametrize("owner", OTHERS)
@pytest.mark.parametrize("mode", ["module", "mixed"])
def test_diffusers_14358_ours_on_top_of_another_offload(device: torch.device, owner: str, mode: str) -> None:
    """All of the pipeline belongs to somebody else already."""
    pipe, _ = full_toy()
    OTHERS[owner](pipe, device)
    before = {path: sorted(vars(part)) for path, part in modules(pipe)}
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){owner}.*(remove_all_hooks|anew)"):
        pipe.enable_omni_offload(**MODES[mode])
    assert pipe.omni_offload is None
    assert {path: sorted(vars(part)) for path, part in modules(pipe)} == before


@pytest.mark.parametrize("mode", ["module", "mixed"])
@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_diffusers_14358_hooks_put_on_behind_our_back(device: torch.device, mode: str, component: str) -> None:
    """Accelerate's hook in our place, or group offload below: noticed at the next call, whoever swaps the component."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**MODES[mode])
    add_hook_to_module(getattr(pipe, component), AlignDevicesHook(execution_device=device))
    moved = handle.bytes_moved
    with pytest.raises(RuntimeError, match=rf"{component} is offloaded.*AlignDevicesHook.*disable_omni_offload\(\)"):
        run(pipe, call)
    assert handle.bytes_moved == moved
