"""Quantized weights: equal to the resident run, moved as the bytes that they are, the same objects afterwards."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.equality import Build, assert_equal_outputs, assert_no_hazards, outputs
from tests.living import fast_ones, ours_left, with_arguments
from tests.modes import MODES
from tests.quantized import (
    KINDS,
    ONE_A_LIBRARY,
    TEXT_KINDS,
    QuantizedState,
    build,
    build_text,
    bytes_of,
    inner_tensors,
    quantized_bytes,
    to_resident,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*[Qq]uanto:FutureWarning")

LIBRARIES = tuple(ONE_A_LIBRARY.values())


@functools.cache
def of_kind(kind: str, family: str = "sd3", width: int = 256) -> Build:
    return functools.partial(build, kind, family, width)


@functools.cache
def with_text(kind: str, encoder: str) -> Build:
    return functools.partial(build_text, kind, encoder)


@functools.cache
def expected(build: Build, device: torch.device) -> list[np.ndarray]:
    """What two calls give of the pipeline that lives on the device."""
    pipe, call = build()
    found = outputs(to_resident(pipe, device), call, 2)
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0
    return found


def check(build: Build, names: tuple[str, ...], options: dict[str, Any], device: torch.device, sim: ModuleType) -> None:
    """Two calls equal the resident ones; when offload is off again, the models are what they were, and still equal."""
    reference = expected(build, device)
    pipe, call = build()
    before = {name: QuantizedState.of(getattr(pipe, name)) for name in names}
    handle = pipe.enable_omni_offload(**options)
    assert_equal_outputs(outputs(pipe, call, 2), reference, str(options))
    assert_no_hazards(sim, str(options))
    assert handle.bytes_moved > 0
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []
    for name in names:
        before[name].assert_same(QuantizedState.of(getattr(pipe, name)))
    assert_equal_outputs(outputs(to_resident(pipe, device), call, 1), reference[:1], "offload turned off again")


@pytest.mark.parametrize(
    ("kind", "mode"),
    fast_ones(
        [(kind, mode) for kind in KINDS for mode in ("layer", "module")] + [("bitsandbytes nf4 nested", "mixed")],
        *[(kind, "layer") for kind in LIBRARIES],
        ("bitsandbytes int8", "module"),
    ),
)
def test_a_quantized_dit(kind: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    check(of_kind(kind), ("transformer",), MODES[mode], device, sim)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("family", ["wan", "flux2", "qwen_image"])
def test_other_families(family: str, kind: str, device: torch.device, sim: ModuleType) -> None:
    names = ("transformer", "transformer_2") if family == "wan" else ("transformer",)
    check(of_kind(kind, family, 128), names, MODES["layer"], device, sim)


TEXT_MODES = {
    "layer": {"mode": "layer", "components": ["text_encoder"]},
    "module": {"mode": "module"},
    "resident": {"mode": "layer"},
}
"""What is chosen for the text encoders."""


@pytest.mark.parametrize(
    ("kind", "mode", "encoder"),
    fast_ones(
        [(kind, mode, encoder) for kind in TEXT_KINDS for mode in TEXT_MODES for encoder in ("t5", "clip")],
        ("bitsandbytes int8", "layer", "t5"),
        ("bitsandbytes nf4", "module", "t5"),
        ("bitsandbytes int8", "resident", "clip"),
    ),
)
def test_a_quantized_text_encoder(kind: str, mode: str, encoder: str, device: torch.device, sim: ModuleType) -> None:
    name = "text_encoder_3" if encoder == "t5" else "text_encoder"
    check(with_text(kind, encoder), (name,), TEXT_MODES[mode], device, sim)


@pytest.mark.parametrize("mode", ["layer", "module"])
@pytest.mark.parametrize("kind", fast_ones([*LIBRARIES, "bitsandbytes int8"], "torchao int8", "bitsandbytes int8"))
def test_state_dicts_at_rest(kind: str, mode: str, device: torch.device) -> None:
    """Between calls they are what they were before."""
    pipe, call = build(kind, "sd3", 128)
    before = {path: described(value) for path, value in pipe.transformer.state_dict().items()}
    pipe.enable_omni_offload(mode)
    for _ in range(2):
        found = {path: described(value) for path, value in pipe.transformer.state_dict().items()}
        assert found.keys() == before.keys()
        for path, (cls, parts) in found.items():
            assert cls is before[path][0] and parts.keys() == before[path][1].keys(), path
            for name, part in parts.items():
                assert torch.equal(part, before[path][1][name]), (path, name)
        outputs(pipe, call, 1)


def described(value: torch.Tensor) -> tuple[type, dict[str, torch.Tensor]]:
    """A weight's class, and the bytes of which it is made."""
    inner = torch.nn.Module()
    inner.register_buffer("value", value)
    return type(value), {name: bytes_of(part).cpu().clone() for name, part in inner_tensors(inner).items()}


# ---------------------------------------------------------------------- bytes

WIDE = 512
"""Wide enough that neither padding nor statistics of a few bytes matter."""


def close(found: int, wanted: int) -> bool:
    """Within one percent."""
    return abs(found - wanted) <= 0.01 * wanted


OF_THE_SIZE_OF_OTHERS = (
    "torchao int8 dynamic",
    "bitsandbytes int8 outliers",
    "bitsandbytes fp4",
    "bitsandbytes fp4 nested",
)
SIZED = [kind for kind in KINDS if kind not in OF_THE_SIZE_OF_OTHERS]


@pytest.mark.parametrize("kind", fast_ones(SIZED, "bitsandbytes nf4 nested"))
def test_a_pass_moves_the_quantized_bytes(kind: str, device: torch.device, sim: ModuleType) -> None:
    pipe, call = build(kind, "sd3", WIDE, 2)
    call = with_arguments(call, num_inference_steps=1)
    wanted = quantized_bytes(pipe.transformer.transformer_blocks)
    plain = sum(linear.in_features * linear.out_features * 2 for linear in linears(pipe.transformer.transformer_blocks))
    assert wanted < (1.02 if kind == "gguf bf16" else 0.8) * plain
    handle = pipe.enable_omni_offload("layer")
    assert close(handle.pinned_bytes, wanted)
    outputs(pipe, call, 1)
    loads, moved, copied = handle.loads, handle.bytes_moved, sim.stats()["h2d_bytes"]
    outputs(pipe, call, 1)
    assert handle.loads - loads == 2
    assert close(handle.bytes_moved - moved, wanted)
    # What a call copies beside weights: prompts, latents, time steps.
    assert sim.stats()["h2d_bytes"] - copied - (handle.bytes_moved - moved) < 32 << 10


@pytest.mark.parametrize("kind", fast_ones(LIBRARIES, "torchao int8"))
def test_a_swap_moves_the_quantized_bytes(kind: str, device: torch.device) -> None:
    pipe, call = build(kind, "sd3", WIDE, 2)
    call = with_arguments(call, num_inference_steps=1)
    wanted = quantized_bytes([pipe.transformer])
    handle = pipe.enable_omni_offload(components={"dit": "module"})
    outputs(pipe, call, 1)
    swaps, moved = handle.swaps, handle.bytes_moved
    outputs(pipe, call, 1)
    assert handle.swaps - swaps == 1 and close(handle.bytes_moved - moved, wanted)


def linears(blocks: torch.nn.Module) -> list[torch.nn.Linear]:
    """The layers whose weights were quantized."""
    return [part for part in blocks.modules() if isinstance(part, torch.nn.Linear)]


DEQUANTIZING = (
    "bitsandbytes.functional.dequantize_4bit",
    "bitsandbytes.functional.dequantize_blockwise",
    "bitsandbytes.functional.int8_vectorwise_dequant",
    "bitsandbytes.functional.int8_vectorwise_quant",
    "diffusers.quantizers.gguf.utils.dequantize_gguf_tensor",
)
"""Functions of libraries whose weights aren't wrappers, which have a method for it."""


@pytest.mark.parametrize(
    "kind", fast_ones([kind for kind in KINDS if KINDS[kind].library != "diffusers"], "torchao int8")
)
def test_offload_itself_dequantizes_nothing(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, sim: ModuleType
) -> None:
    reference = expected(of_kind(kind), device)
    pipe, call = build(kind)
    wrappers = {type(weight) for weight in pipe.transformer.parameters() if is_traceable_wrapper_subclass(weight)}

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("dequantized")

    for mode in ("module", "layer"):
        with monkeypatch.context() as patched:
            for name in DEQUANTIZING:
                patched.setattr(name, refuse)
            for wrapper in wrappers:
                patched.setattr(wrapper, "dequantize", refuse)
            pipe.disable_omni_offload()
            handle = pipe.enable_omni_offload(**MODES[mode])
            handle.refresh()
        assert_equal_outputs(outputs(pipe, call, 1), reference[:1], mode)
