"""Textual inversion beside offload: words that are learned and forgotten, wherever a text encoder's weights are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.equality import Call, assert_equal_outputs, assert_no_hazards, build_as, build_resident
from tests.living import fast_ones, ours_left, with_arguments
from tests.modes import MODES
from tests.zoo import PIPELINES
from tests.zoo.building import normal

PLACES: dict[str, dict[str, Any]] = {**MODES, "streamed": {"mode": "layer", "components": ["dit", "text_encoder"]}}
"""Where text encoders are: on the device, swapped, swapped beside a streamed DiT, streamed."""
PROMPT = "<one> <two> <more>"


def learn(pipe: Any, tokens: list[str], seed: int, vectors: int = 1, encoder: str = "") -> None:
    """New words for a text encoder; a word may be several vectors."""
    module = getattr(pipe, f"text_encoder{encoder}")
    width = module.get_input_embeddings().weight.shape[1]
    values = [normal(vectors, width, seed=seed + index) for index in range(len(tokens))]
    pipe.load_textual_inversion(
        [value if vectors > 1 else value[0] for value in values],
        token=list(tokens),
        tokenizer=getattr(pipe, f"tokenizer{encoder}"),
        text_encoder=module,
    )


def forget(pipe: Any, tokens: list[str] | None = None, encoder: str = "") -> None:
    names = {"tokenizer": getattr(pipe, f"tokenizer{encoder}"), "text_encoder": getattr(pipe, f"text_encoder{encoder}")}
    pipe.unload_textual_inversion(tokens=tokens, **names)


Change = Callable[[Any], None]
STEPS: list[Change] = [
    lambda pipe: learn(pipe, ["<one>"], 100),
    lambda pipe: learn(pipe, ["<more>"], 110, vectors=3),
    lambda pipe: learn(pipe, ["<two>"], 120),
    lambda pipe: forget(pipe, ["<one>"]),
    lambda pipe: forget(pipe),
]
PIPES: dict[str, tuple[str, list[Change]]] = {
    "clip": ("StableDiffusionPipeline", STEPS),
    "two clips": (
        "StableDiffusionXLPipeline",
        [*STEPS[:2], lambda pipe: learn(pipe, ["<two>"], 130, encoder="_2"), lambda pipe: forget(pipe, encoder="_2")],
    ),
    "clip of flux": ("FluxPipeline", STEPS[:3]),
    "t5": ("ChromaPipeline", [STEPS[0], STEPS[2], STEPS[4]]),
}
"""A pipeline class, and what is done to it between calls. Chroma's T5 has more embeddings than words: they shrink."""


def build(name: str) -> Callable[[], tuple[Any, Call]]:
    return PIPELINES[PIPES[name][0]]


@functools.cache
def resident(name: str, device: torch.device) -> list[np.ndarray]:
    """The resident pipeline's output at first and after each step."""
    pipe, call = build_resident(build(name), device)
    call = with_arguments(call, prompt=PROMPT)
    found = [tiny.run(pipe, call)]
    for step in PIPES[name][1]:
        step(pipe)
        found.append(tiny.run(pipe, call))
        assert np.isfinite(found[-1]).all() and not np.array_equal(found[-1], found[-2])
    return found


@pytest.mark.parametrize(
    ("name", "place", "when"),
    fast_ones(
        [
            *[("clip", place, "before") for place in PLACES],
            *[(name, place, "after") for name in PIPES for place in PLACES if name == "clip" or place != "layer"],
        ],
        ("clip", "streamed", "after"),
        ("clip", "module", "before"),
    ),
)
def test_words_are_learned_and_forgotten(when: str, name: str, place: str, device: torch.device, sim: Any) -> None:
    """The embeddings grow and shrink; they are there in the next call."""
    expected = resident(name, device)
    pipe, call = build_as(build(name))
    call = with_arguments(call, prompt=PROMPT)
    first, *steps = PIPES[name][1]
    found = []
    if when == "before":
        first(pipe)
        pipe.enable_omni_offload(**PLACES[place])
    else:
        pipe.enable_omni_offload(**PLACES[place])
        found.append(tiny.run(pipe, call))
        first(pipe)
    found.append(tiny.run(pipe, call))
    for step in steps:
        step(pipe)
        found.append(tiny.run(pipe, call))
    what = f"{name}, {place}, first word learned {when} enabling"
    assert_equal_outputs(found, expected[-len(found) :], what)
    assert_no_hazards(sim, what)
    weight = pipe.text_encoder.get_input_embeddings().weight
    swapped = "text_encoder" in pipe.omni_offload.plan.swapped
    assert weight.device.type == ("cpu" if swapped else "sim")
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []
    assert np.array_equal(tiny.run(pipe.to(device), call), expected[-1])
