"""What a resolution means: tokens, forwards and operations by counting, activations against the simulated device."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffusers_omni_offload import adapter_for
from diffusers_omni_offload.blueprint import build_blueprint
from diffusers_omni_offload.planning.survey import survey_blocks
from diffusers_omni_offload.planning.workload import Call, Workload, decoder_nbytes, with_workload, workload
from tests import tiny
from tests.resolving import Stack, pipeline

PUBLISHED = Path(__file__).parent / "data" / "published"


@cache
def published(model: str) -> Any:
    pipe = build_blueprint(PUBLISHED / model, dtype=torch.bfloat16)
    return pipe, *survey_blocks(pipe, declarations=adapter_for(type(pipe)))


def found(model: str, **request: Any) -> Workload:
    pipe, _, stacks = published(model)
    result = workload(pipe, stacks, Call(**request))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("model", "request_", "image", "text", "forwards"),
    [
        ("Wan2.2-T2V-A14B-Diffusers", {}, 21 * 30 * 52, 512, {"transformer": 32, "transformer_2": 68}),
        (
            "Wan2.2-T2V-A14B-Diffusers",
            {"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 40, "guidance": False},
            21 * 45 * 80,
            512,
            {"transformer": 13, "transformer_2": 27},
        ),
        ("FLUX.2-dev", {}, 64 * 64, 512, {"transformer": 50, "text_encoder": 1}),
        ("Qwen-Image", {"guidance": True, "num_inference_steps": 8}, 64 * 64, 512, {"transformer": 16}),
        ("stable-diffusion-3.5-large", {"height": 512}, 32 * 64, 333, {"transformer": 28, "text_encoder_3": 2}),
    ],
)
def test_tokens_and_forwards(
    model: str, request_: dict[str, Any], image: int, text: int, forwards: dict[str, int]
) -> None:
    load = found(model, **request_)
    assert (load.image_tokens, load.text_tokens) == (image, text)
    assert {path: load.loads[path].forwards for path in forwards} == forwards
    assert load.loads["vae"].forwards == 1


def test_operations_of_a_wan_block_by_hand() -> None:
    tokens, text, width, inner = 32_760, 512, 5120, 13_824
    own = 4 * width**2 + 2 * width**2 + 2 * width * inner
    by_hand = 2 * own * tokens + 2 * (2 * width**2) * text + 4 * width * tokens * (tokens + text)
    load = found("Wan2.2-T2V-A14B-Diffusers").loads["transformer"]
    # The table of scales and shifts is counted as a matrix, and is small.
    assert load.block_operations == pytest.approx([by_hand] * 40, rel=1e-4)


@pytest.mark.parametrize("name", ["wan", "flux2", "qwen_image", "sd3"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """In a call of a tiny pipeline, for its blocks. A call's text is shorter than `max_sequence_length`."""
    pipe, call = tiny.BUILDERS[name]()
    arguments = call()
    lengths: list[int] = []
    dit = pipe.transformer
    dit.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    # Of attention torch counts the plain form only.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        pipe(**arguments)
    counts = counter.get_flop_counts()
    _, stacks = survey_blocks(pipe, declarations=adapter_for(type(pipe)))
    names = ("height", "width", "num_frames", "num_inference_steps")
    guidance = (arguments.get("guidance_scale", 0) > 1 and name != "flux2") or arguments.get("true_cfg_scale", 0) > 1
    request = Call(**{name: arguments[name] for name in names if name in arguments}, guidance=guidance)
    result = workload(pipe, stacks, request, text_tokens=lengths[0])
    assert result is not None
    load = result.loads["transformer"]
    assert load.forwards == len(lengths)
    # Two experts have the same name there.
    by_class, forwards = (
        type(dit).__name__,
        sum(result.loads[path].forwards for path in stacks if "transformer" in path),
    )
    counted = [
        sum(counts[key].values()) / forwards
        for path in stacks["transformer"].block_paths
        for key in counts
        if key.endswith(f"{by_class}.{path}")
    ]
    assert load.block_operations == pytest.approx(counted, rel=0.15)


def test_times_follow_from_operations() -> None:
    _, costs, _ = published("FLUX.2-dev")
    load = found("FLUX.2-dev")
    timed = {cost.path: cost for cost in with_workload(costs, load, 100e12)}
    dit = timed["transformer"]
    total = sum(block.seconds for block in dit.blocks) + dit.seconds
    assert total == pytest.approx(sum(load.loads["transformer"].block_operations) / 100e12, rel=1e-3) and total > 2.5
    assert [block.seconds for block in timed["text_encoder"].blocks[:24]] == [0.0] * 24  # for images
    assert timed["text_encoder"].blocks[24].seconds > 0 and timed["vae"].seconds == 0
    untimed = with_workload(costs, load, None)
    assert all(not block.seconds for cost in untimed for block in cost.blocks)
    assert untimed[0].forwards == 50 and untimed[0].activation_nbytes == dit.activation_nbytes > 0


def test_other_families_are_unknown() -> None:
    for pipe in (
        tiny.build_sdxl()[0],
        pipeline({"transformer": Stack(blocks=3)}, block_attrs={"transformer": ("blocks",)}),
    ):
        _, stacks = survey_blocks(pipe, declarations=adapter_for(type(pipe)))
        assert workload(pipe, stacks, Call()) is None


# Activations on the simulated device, of models with the published shapes and fewer, narrower blocks ------------------


def measured(device: torch.device, run: Callable[[], Any]) -> int:
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with torch.inference_mode():
        kept = run()
    torch.accelerator.synchronize()
    del kept
    return torch.accelerator.max_memory_allocated() - before


def configured(model: str, part: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((PUBLISHED / model / part / "config.json").read_text())
    return {**{name: value for name, value in config.items() if not name.startswith("_")}, **changes}


STRIDES_OF_16 = {"tile_sample_stride_height": 16, "tile_sample_stride_width": 16}
TILES_OF_64 = {
    "tile_sample_min_height": 64,
    "tile_sample_min_width": 64,
    "tile_sample_stride_height": 48,
    "tile_sample_stride_width": 48,
}


@pytest.mark.parametrize(
    ("model", "changes", "num_frames"),
    [
        ("stable-diffusion-3.5-large", {"block_out_channels": [32, 64, 128, 128]}, 1),
        ("FLUX.2-dev", {"block_out_channels": [32, 64, 128, 128]}, 1),
        ("Wan2.2-T2V-A14B-Diffusers", {"base_dim": 16}, 9),
        ("Qwen-Image", {"base_dim": 16}, 1),
    ],
)
def test_decoders(device: torch.device, model: str, changes: dict[str, Any], num_frames: int) -> None:
    pipe, _, _ = published(model)
    vae = type(pipe.vae).from_config(configured(model, "vae", **changes)).eval().to(device)
    is_video = "dim_mult" in vae.config
    shape = (1, 16, (num_frames - 1) // 4 + 1, 8, 8) if is_video else (1, vae.config.latent_channels, 8, 8)
    latents = torch.randn(shape).to(device)
    peak = measured(device, lambda: vae.decode(latents).sample)
    assert peak <= decoder_nbytes(vae, 64, 64, num_frames) <= 1.5 * peak


@pytest.mark.parametrize(
    ("model", "changes", "sizes", "share"),
    [
        ("stable-diffusion-3.5-large", {"block_out_channels": [32, 64, 128, 128], "sample_size": 64}, {}, 8),
        ("Qwen-Image", {"base_dim": 16}, TILES_OF_64, 8),
        ("Qwen-Image", {"base_dim": 16}, TILES_OF_64 | STRIDES_OF_16, 4),
        ("Wan2.2-T2V-A14B-Diffusers", {"base_dim": 16}, TILES_OF_64, 8),
    ],
)
def test_decoders_with_tiles(
    device: torch.device, model: str, changes: dict[str, Any], sizes: dict[str, int], share: int
) -> None:
    """A part of what the whole would take; of tiles that overlap much, all are there at the end."""
    pipe, _, _ = published(model)
    vae = type(pipe.vae).from_config(configured(model, "vae", **changes)).eval().to(device)
    whole = decoder_nbytes(vae, 256, 256, 1)
    vae.enable_tiling(**sizes)
    latents = torch.randn((1, 16, 1, 32, 32) if sizes else (1, 16, 32, 32)).to(device)
    peak = measured(device, lambda: vae.decode(latents).sample)
    assert peak <= decoder_nbytes(vae, 256, 256, 1) <= 1.75 * peak
    assert decoder_nbytes(vae, 256, 256, 1) <= whole / share


@pytest.mark.parametrize("name", ["wan", "flux2", "qwen_image", "sd3"])
def test_dits(device: torch.device, name: str) -> None:
    model, size, latents, changes = {
        "wan": ("Wan2.2-T2V-A14B-Diffusers", 256, (1, 16, 3, 32, 32), {"ffn_dim": 1382, "num_layers": 2}),
        "flux2": ("FLUX.2-dev", 512, (1, 1024, 128), {"num_layers": 2, "num_single_layers": 2}),
        "qwen_image": ("Qwen-Image", 512, (1, 1024, 64), {"num_layers": 2}),
        "sd3": ("stable-diffusion-3.5-large", 512, (2, 16, 64, 64), {"num_layers": 3, "caption_projection_dim": 256}),
    }[name]
    pipe, _, _ = published(model)
    config = configured(model, "transformer", num_attention_heads=4, **changes)
    dit = type(pipe.transformer).from_config(config).eval().to(device)
    width, samples = dit.config.num_attention_heads * dit.config.attention_head_dim, latents[0]
    texts = {"wan": 4096, "flux2": 15360, "qwen_image": 3584, "sd3": 4096}
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(latents),
        "timestep": torch.ones(samples),
        "encoder_hidden_states": torch.randn(samples, 64, texts[name]),
    }
    inputs |= {
        "wan": {},
        "flux2": {"guidance": torch.ones(1), "img_ids": torch.zeros(1024, 4), "txt_ids": torch.zeros(64, 4)},
        "qwen_image": {"encoder_hidden_states_mask": torch.ones(1, 64), "img_shapes": [[(1, 32, 32)]]},
        "sd3": {"pooled_projections": torch.randn(2, 2048)},
    }[name]
    there = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    peak = measured(device, lambda: dit(**there, return_dict=False))
    small = build_small(pipe, dit)
    _, stacks = survey_blocks(small, declarations=adapter_for(type(small)))
    request = Call(size, size, 9 if name == "wan" else 1, 2)
    result = workload(small, stacks, request, text_tokens=64)
    assert result is not None and width == 4 * dit.config.attention_head_dim
    assert peak <= result.loads["transformer"].activation_nbytes <= 1.75 * peak


def build_small(pipe: Any, dit: Any) -> Any:
    """The published pipeline with another DiT."""
    small = type(pipe).__new__(type(pipe))
    small.register_modules(**{name: None for name in pipe.components} | {"vae": pipe.vae, "transformer": dit})
    return small
