"""The published configurations of four large pipelines: parameters and bytes, exactly."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from diffusers_omni_offload import adapter_for
from diffusers_omni_offload.blueprint import build_blueprint
from diffusers_omni_offload.planning.costs import ComponentCost
from diffusers_omni_offload.planning.survey import survey

PUBLISHED = Path(__file__).parent / "data" / "published"
WAN, FLUX, QWEN, SD3 = "Wan2.2-T2V-A14B-Diffusers", "FLUX.2-dev", "Qwen-Image", "stable-diffusion-3.5-large"


@cache
def costs(model: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, ComponentCost]:
    pipe = build_blueprint(PUBLISHED / model, dtype=dtype)
    return {cost.path: cost for cost in survey(pipe, declarations=adapter_for(type(pipe)))}


PARAMETERS = {
    WAN: {
        "transformer": 14_288_491_584,
        "transformer_2": 14_288_491_584,
        "text_encoder": 5_680_910_336,
        "vae": 126_892_531,
    },
    FLUX: {"transformer": 32_223_281_152, "text_encoder": 24_011_361_280, "vae": 84_046_115},
    QWEN: {"transformer": 20_430_401_088, "text_encoder": 8_292_166_656, "vae": 126_892_531},
    SD3: {
        "transformer": 8_056_627_520,
        "text_encoder": 123_650_304,
        "text_encoder_2": 694_659_840,
        "text_encoder_3": 4_762_310_656,
        "vae": 83_819_683,
    },
}

BLOCKS = {
    WAN: {"transformer": 40, "transformer_2": 40, "text_encoder": 24, "vae": 0},
    FLUX: {"transformer": 8 + 48, "text_encoder": 24 + 40, "vae": 0},
    QWEN: {"transformer": 60, "text_encoder": 32 + 28, "vae": 0},
    SD3: {"transformer": 38, "text_encoder": 12, "text_encoder_2": 32, "text_encoder_3": 24, "vae": 0},
}

# Wan's experts: the time embedder, the scale and shift tables of each block and of the end, the affine norms, and the
# rotary table are in float32.
_WAN_FLOAT32 = 256 * 5120 + 5120 + 5120 * 5120 + 5120 + (40 * 6 + 2) * 5120 + 40 * 2 * 5120
_WAN_TABLE = 2 * 1024 * 128
_EXPERT = {"bfloat16": 2 * (14_288_491_584 - _WAN_FLOAT32), "float32": 4 * (_WAN_FLOAT32 + _WAN_TABLE)}
_SD3_POSITIONS = 192 * 192 * 2432

BYTES = {
    WAN: {
        "transformer": _EXPERT,
        "transformer_2": _EXPERT,
        "text_encoder": {"bfloat16": 2 * 5_680_910_336},
        "vae": {"bfloat16": 2 * 126_892_531},
    },
    FLUX: {
        "transformer": {"bfloat16": 2 * 32_223_281_152},
        # Two rotary tables of frequencies.
        "text_encoder": {"bfloat16": 2 * 24_011_361_280, "float32": 4 * (64 + 64 + 32 + 32)},
        # Running mean and variance of 128 channels, and the number of batches.
        "vae": {"bfloat16": 2 * (84_046_115 + 2 * 128), "int64": 8},
    },
    QWEN: {
        "transformer": {"bfloat16": 2 * 20_430_401_088},
        "text_encoder": {"bfloat16": 2 * 8_292_166_656, "float32": 4 * (64 + 64 + 20 + 20)},
        "vae": {"bfloat16": 2 * 126_892_531},
    },
    SD3: {
        "transformer": {"bfloat16": 2 * (8_056_627_520 + _SD3_POSITIONS)},
        "text_encoder": {"bfloat16": 2 * 123_650_304, "int64": 8 * 77},
        "text_encoder_2": {"bfloat16": 2 * 694_659_840, "int64": 8 * 77},
        "text_encoder_3": {"bfloat16": 2 * 4_762_310_656},
        "vae": {"bfloat16": 2 * 83_819_683},
    },
}


@pytest.mark.parametrize(("model", "path"), [(model, path) for model, found in PARAMETERS.items() for path in found])
def test_parameters_blocks_and_bytes(model: str, path: str) -> None:
    assert list(costs(model)) == list(PARAMETERS[model])
    cost = costs(model)[path]
    assert cost.parameters == PARAMETERS[model][path]
    assert len(cost.blocks) == BLOCKS[model][path]
    assert cost.dtypes == BYTES[model][path]
    # Packing aligns each tensor to 256 bytes; of these there are few beside their bytes.
    assert sum(cost.dtypes.values()) <= cost.nbytes < 1.0005 * sum(cost.dtypes.values())


def test_float32_is_twice_as_large() -> None:
    for path, cost in costs(SD3, torch.float32).items():
        halves = costs(SD3)[path]
        assert cost.parameters == halves.parameters
        assert cost.dtypes["float32"] == 2 * halves.dtypes["bfloat16"]


def test_blocks_hold_most_of_a_dit() -> None:
    for model in PARAMETERS:
        cost = costs(model)["transformer"]
        assert sum(block.nbytes for block in cost.blocks) > 0.97 * cost.nbytes
        assert cost.may_keep_blocks and cost.may_swap and cost.role == "dit"
