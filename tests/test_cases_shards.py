"""Public cases of weights in shards that aren't plain: float8 by columns, wrappers, odd strides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from tests import tiny
from tests.doubles import Wrapped
from tests.equality import Build
from tests.quantized import KINDS, QuantizedState, transformer
from tests.ranks import RankPool, answers
from tests.test_cases_distributed import ALLGATHER, ENCODERS_APART, twice
from tests.test_cases_quantized import toy, weight_as, with_odd_tensors
from tests.tiny import build_toy

pytestmark = pytest.mark.processes

RESIDENTS: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"resident_layers": 1}}}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, device="sim") as pool:
        yield pool


class Float8Linear(nn.Module):
    """Float8 codes that lie column by column, as its kernels want them, and a float32 scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 448
        codes = (linear.weight.detach() / scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes.t().contiguous().t(), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.seen: set[tuple[Any, ...]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((self.weight.dtype, self.weight.shape, self.weight.stride(), self.weight.device.type))
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def with_float8() -> tuple[Any, Any]:
    pipe, call = build_toy(4, width=64, sizes=[100, 33])
    for block in pipe.transformer.blocks:
        block.expand, block.contract = Float8Linear(block.expand), Float8Linear(block.contract)
    return pipe, call


def streaming_float8(rank: int, size: int, options: dict[str, Any]) -> list[Any]:
    pipe, call = with_float8()
    expected = tiny.run(pipe.to("sim"), call)
    pipe, call = with_float8()
    layers = [module for module in pipe.transformer.modules() if isinstance(module, Float8Linear)]
    codes = [layer.weight.detach().clone() for layer in layers]
    handle = pipe.enable_omni_offload(**options, device="sim")
    equal = [np.array_equal(tiny.run(pipe, call), expected) for _ in range(2)]
    assert len(layers) == 8 and handle.loads > 0
    kept = [(torch.float8_e4m3fn, code.shape, (1, code.shape[0]), "sim") for code in codes]
    pipe.disable_omni_offload()
    return [
        equal,
        all(layer.seen == {geometry} for layer, geometry in zip(layers, kept, strict=True)),
        all(torch.equal(layer.weight.view(torch.uint8), code.view(torch.uint8)) for layer, code in zip(layers, codes)),  # noqa: B905
        all(layer.weight.stride() == code.stride() for layer, code in zip(layers, codes)),  # noqa: B905
    ]


@pytest.mark.parametrize("options", [ALLGATHER, RESIDENTS], ids=["gathered", "with residents"])
def test_vllm_omni_6279_transposed_float8_and_its_scale(options: dict[str, Any], two: RankPool) -> None:
    """One of two ways to restore weights forgot their strides, and the other one was forgotten itself."""
    assert answers(two.run(streaming_float8, options)) == [[[True, True], True, True, True]] * 2


DOUBLES: dict[str, Build] = {"wrapped": lambda: toy(weight_as(Wrapped)), "odd": with_odd_tensors}


def streaming_doubles(rank: int, size: int, name: str, options: dict[str, Any]) -> list[bool]:
    pipe, call = DOUBLES[name]()
    before = [QuantizedState.of(part) for part in (pipe.transformer, pipe.text_encoder)]
    pipe.enable_omni_offload(**options, device="sim")
    tiny.run(pipe, call)
    pipe.disable_omni_offload()
    for state, part in zip(before, (pipe.transformer, pipe.text_encoder), strict=True):
        state.assert_same(QuantizedState.of(part))
    return twice(DOUBLES[name], options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [ALLGATHER, RESIDENTS, ENCODERS_APART], ids=["gathered", "residents", "encoders"])
@pytest.mark.parametrize("name", DOUBLES)
def test_vllm_omni_6279_wrappers_and_odd_strides(name: str, options: dict[str, Any], two: RankPool) -> None:
    assert answers(two.run(streaming_doubles, name, options)) == [[True] * 3] * 2


def streaming_saved_float8(rank: int, size: int, folder: Path, options: dict[str, Any]) -> list[bool]:
    def load() -> tuple[Any, Any]:
        pipe, call = tiny.build_sd3(t5=False)
        pipe.to(torch.bfloat16)
        pipe.transformer = SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        return pipe, call

    assert type(load()[0].transformer.transformer_blocks[0].attn.to_q.weight).__name__ == "Float8Tensor"
    return twice(load, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [ALLGATHER, RESIDENTS], ids=["gathered", "with residents"])
def test_vllm_omni_6279_saved_float8_of_torchao(options: dict[str, Any], two: RankPool, tmp_path: Path) -> None:
    KINDS["torchao float8"].apply(transformer("sd3", 128)).save_pretrained(tmp_path)
    assert answers(two.run(streaming_saved_float8, tmp_path, options, timeout=200.0)) == [[True] * 3] * 2
