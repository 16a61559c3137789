"""What the tests of torch.compile share: pipelines whose DiT is compiled, and how often dynamo compiled something."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests import tiny
from tests.equality import Call, assert_equal_outputs, build_as, build_resident, outputs
from tests.living import with_arguments
from tests.operations.placements import PLACEMENTS as WHOLE


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled before counts, and nothing of ours is traced that dynamo would warn of."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know", category=UserWarning)
        yield
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """How many graphs were compiled, those of recompilations too."""
    return int(counters["stats"]["unique_graphs"])


def graph_breaks() -> int:
    """How often a graph was broken."""
    return sum(counters["graph_break"].values())


class Backend:
    """A backend that runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.compiled = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@contextmanager
def nothing_new() -> Iterator[None]:
    """Within it everything that runs was compiled before: nothing is recompiled, no graph is added or broken."""
    before = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert before > 0, "nothing was compiled at all"
    assert graphs() == before, f"{graphs() - before} graphs more"
    assert graph_breaks() == 0, dict(counters["graph_break"])


@dataclass(frozen=True)
class Family:
    """A family of pipelines, in the sizes that are compiled here.

    Args:
        build: a pipeline with so many blocks in each stack of its DiT.
        stacks: the attributes of the DiT that hold its blocks.
        few: so many blocks that each form of block is among them.
        arguments: more arguments of a call, which make it short.
    """

    build: Callable[[int], tuple[Any, Call]]
    stacks: tuple[str, ...] = ("transformer_blocks",)
    few: int = 3
    arguments: tuple[tuple[str, Any], ...] = ()

    def fresh(self, blocks: int | None = None) -> tuple[Any, Call]:
        """A pipeline on the CPU."""
        pipe, call = build_as(lambda: self.build(blocks or self.few))
        return pipe, with_arguments(call, **dict(self.arguments))

    def blocks(self, pipe: Any) -> list[nn.Module]:
        """The blocks of the DiT."""
        return [block for stack in self.stacks for block in getattr(pipe.transformer, stack)]


FAMILIES = {
    "Wan": Family(lambda count: tiny.build_wan(count, two_stage=False), ("blocks",)),
    "Flux2": Family(
        lambda blocks: tiny.build_flux2(blocks, blocks), ("transformer_blocks", "single_transformer_blocks")
    ),
    # Its first two blocks, those in the middle and the last one differ in what they compute.
    "SD3": Family(lambda count: tiny.build_sd3(count, t5=False), few=4, arguments=(("guidance_scale", 1.0),)),
    "QwenImage": Family(tiny.build_qwen_image, arguments=(("true_cfg_scale", 1.0), ("height", 16), ("width", 16))),
}

PLACEMENTS: dict[str, dict[str, Any]] = {
    **WHOLE,
    "mixed": {
        "components": {"dit": "layer", "text_encoder": "module", "vae": "module"},
        "layer_options": {"dit": {"resident_layers": 1}},
    },
}
"""All blocks streamed; all on the device, in layer mode; DiT and text encoder swapped; one block on the device, the
others streamed, text encoder and VAE swapped."""


def compile_blocks(family: Family, pipe: Any, **options: Any) -> None:
    """Compile the DiT's blocks as full graphs: by the method for that, if the DiT says what is repeated."""
    options = {"fullgraph": True, **options}
    if pipe.transformer._repeated_blocks:
        pipe.transformer.compile_repeated_blocks(**options)
        return
    for block in family.blocks(pipe):
        block.compile(**options)


def compile_component(family: Family, pipe: Any, **options: Any) -> None:
    """Compile the DiT as a whole."""
    pipe.transformer.compile(**options)


COMPILED: dict[str, Callable[..., None]] = {"blocks": compile_blocks, "component": compile_component}


@functools.cache
def plain(device: torch.device) -> np.ndarray:
    """What a resident Wan gives that isn't compiled: backends that run each operator as it is give the same."""
    return tiny.run(*build_resident(FAMILIES["Wan"].fresh, device))


@dataclass(frozen=True)
class Expected:
    """What the resident pipeline gives whose DiT is compiled in the same way: its output, and the number of graphs."""

    output: np.ndarray
    graphs: int


@functools.cache
def expected(name: str, what: str, backend: str, device: torch.device, blocks: int | None = None) -> Expected:
    """Of a family of `FAMILIES`, with one of `COMPILED`."""
    family = FAMILIES[name]
    with fresh_compiler():
        pipe, call = family.fresh(blocks)
        COMPILED[what](family, pipe.to(device), backend=backend)
        first, second = outputs(pipe, call, 2)
        assert np.isfinite(first).all() and np.ptp(first) > 0 and np.array_equal(first, second)
        return Expected(first, graphs())


def assert_outputs(pipe: Any, call: Call, reference: np.ndarray, what: str, calls: int = 1) -> None:
    """So many calls all give the same output."""
    assert_equal_outputs(outputs(pipe, call, calls), [reference] * calls, what)
