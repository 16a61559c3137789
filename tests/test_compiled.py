"""torch.compile beside offload: the resident pipeline's output, no more graphs than it has, and none broken.

References are compiled in the same way, as a backend may compute something else than what isn't compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.compiling import (
    COMPILED,
    FAMILIES,
    PLACEMENTS,
    Backend,
    assert_outputs,
    compile_blocks,
    expected,
    fresh_compiler,
    graph_breaks,
    graphs,
    nothing_new,
)
from tests.equality import pairwise
from tests.living import fast_ones
from tests.operations.families import WAN
from tests.operations.subject import Subject

pytestmark = pytest.mark.usefixtures("compiler")


def cells() -> list[Any]:
    """Every two of the choices meet; blocks compiled in the cheapest family are fast."""
    rows = pairwise(
        {
            "name": tuple(FAMILIES),
            "placement": tuple(PLACEMENTS),
            "what": tuple(COMPILED),
            "when": ("before", "after"),
            "backend": ("aot_eager", "eager"),
        }
    )
    fast = [
        ("Wan", "streamed", "blocks", "before", "aot_eager"),
        ("Wan", "mixed", "blocks", "after", "aot_eager"),
        ("Wan", "module-swapped", "blocks", "after", "aot_eager"),
        ("Wan", "streamed", "component", "after", "aot_eager"),
    ]
    slow = [tuple(row.values()) for row in rows if tuple(row.values()) not in fast]
    return [pytest.param(*cell, id="-".join(cell)) for cell in fast] + [
        pytest.param(*cell, id="-".join(cell), marks=pytest.mark.slow) for cell in slow
    ]


@pytest.mark.parametrize(("name", "placement", "what", "when", "backend"), cells())
def test_compiled(
    device: torch.device, sim: ModuleType, name: str, placement: str, what: str, when: str, backend: str
) -> None:
    """Equal in five calls, as many graphs as the resident pipeline has, all of them in the first one."""
    reference = expected(name, what, backend, device)
    # Blocks with hooks of ours are compiled in the place of their component.
    is_whole = what == "component" and placement == "module-swapped"
    number = reference.graphs if is_whole else expected(name, "blocks", backend, device).graphs
    family, title = FAMILIES[name], f"{what} of {name} compiled {when} enabling, {placement}"
    with fresh_compiler():
        pipe, call = family.fresh()
        if when == "before":
            COMPILED[what](family, pipe, backend=backend)
        handle = pipe.enable_omni_offload(**PLACEMENTS[placement])
        if when == "after":
            assert_outputs(pipe, call, reference.output, f"{title}; not yet compiled")
            COMPILED[what](family, pipe, backend=backend)
        assert_outputs(pipe, call, reference.output, title)
        assert graphs() == number and graph_breaks() == 0
        with nothing_new():
            assert_outputs(pipe, call, reference.output, title, calls=4)
        assert handle.bytes_moved > 0 or placement == "resident"
        pipe.disable_omni_offload()
        compiled = [block for block in family.blocks(pipe) if block._compiled_call_impl is not None]
        assert compiled == (family.blocks(pipe) if what == "blocks" else [])
        assert (pipe.transformer._compiled_call_impl is not None) == (what == "component")


@pytest.mark.parametrize(
    ("name", "placement"),
    fast_ones([("Wan", "streamed"), ("Wan", "module-swapped"), ("Flux2", "streamed")], ("Wan", "streamed")),
)
def test_more_blocks_no_more_graphs(device: torch.device, sim: ModuleType, name: str, placement: str) -> None:
    """Slots change from block to block, and the graphs don't know."""
    family, few, many = (
        FAMILIES[name],
        expected(name, "blocks", "eager", device),
        expected(name, "blocks", "eager", device, 8),
    )
    with fresh_compiler():
        pipe, call = family.fresh(8)
        compile_blocks(family, pipe, backend="eager")
        handle = pipe.enable_omni_offload(**PLACEMENTS[placement])
        assert_outputs(pipe, call, many.output, f"{name} with 8 blocks")
        assert graphs() == few.graphs == many.graphs
        with nothing_new():
            assert_outputs(pipe, call, many.output, f"{name} with 8 blocks", calls=2)
        assert handle.bytes_moved > 0


@pytest.mark.parametrize(
    ("what", "placements"),
    fast_ones(
        [
            ("blocks", ("streamed", "module-swapped", "streamed", "mixed", "module-swapped", "resident")),
            ("component", ("streamed", "module-swapped", "streamed", "mixed")),
        ],
        ("blocks", ("streamed", "module-swapped", "streamed", "mixed", "module-swapped", "resident")),
    ),
)
def test_placements_change(device: torch.device, sim: ModuleType, what: str, placements: tuple[str, ...]) -> None:
    """Graphs outlive offload that is enabled anew, and without offload the pipeline is compiled as it would be."""
    family, backend = FAMILIES["Wan"], Backend()
    output, blocks = (expected("Wan", of, "eager", device) for of in (what, "blocks"))
    pipe, call = family.fresh()
    COMPILED[what](family, pipe, backend=backend)
    known: set[bool] = set()

    def check(title: str, is_whole: bool) -> None:
        before, calls = graphs(), backend.calls
        assert_outputs(pipe, call, output.output, title)
        most = (output if is_whole else blocks).graphs if is_whole not in known else 0
        known.add(is_whole)
        assert graphs() - before == most and backend.calls > calls, title

    for placement in placements:
        pipe.enable_omni_offload(**PLACEMENTS[placement])
        check(placement, what == "component" and placement == "module-swapped")
    pipe.disable_omni_offload()
    pipe.to(device)
    known.discard(True)  # Without hooks below it, it is another graph.
    check("disabled", what == "component")
    pipe.enable_omni_offload(**PLACEMENTS["streamed"])
    check("enabled once more", False)


@pytest.mark.slow
def test_enabled_often(device: torch.device, sim: ModuleType) -> None:
    """Other hooks below a swapped component are no reason to compile it again, up to dynamo's limit."""
    pipe, call = tiny.build_toy(4, text_encoder=True, vae=True)
    reference = tiny.run(pipe.to(device), call)
    pipe.transformer.compile(backend="eager", fullgraph=True)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        pipe.enable_omni_offload("module")
        assert_outputs(pipe, call, reference, "module mode")
        pipe.disable_omni_offload()
    assert graphs() == 1


# ---------------------------------------------------------------------- LoRA


def _second(subject: Subject) -> None:
    subject.load("larger", "detail")
    subject.pipe.set_adapters(["style", "detail"])


LORA_STEPS: dict[str, Callable[[Subject], None]] = {
    "compiled": lambda subject: None,
    "load_lora_weights": lambda subject: subject.load("plain"),
    "a second adapter": _second,
    "set_adapters": lambda subject: subject.pipe.set_adapters(["style", "detail"], [0.5, 0.25]),
    "set_adapters of one": lambda subject: subject.pipe.set_adapters("detail"),
    "unload_lora_weights": lambda subject: subject.pipe.unload_lora_weights(),
}


def lora_story(prepare: Callable[[Any], Any], when: str = "before") -> list[tuple[str, np.ndarray, int]]:
    """What happened, the output and the number of new graphs, of each of `LORA_STEPS`.

    Args:
        prepare: puts the pipeline where it runs.
        when: whether blocks are compiled before or after that.
    """
    told = []
    with fresh_compiler():
        subject = Subject(WAN)
        if when == "after":
            prepare(subject.pipe)
        for dit in subject.dits:
            dit.compile_repeated_blocks(fullgraph=True, backend="eager")
        if when == "before":
            prepare(subject.pipe)
        for title, change in LORA_STEPS.items():
            change(subject)
            before = graphs()
            told.append((title, subject.run(), graphs() - before))
            if subject.pipe.omni_offload is not None:
                with nothing_new():
                    assert np.array_equal(subject.run(), told[-1][1]), title
    return told


@functools.cache
def resident_lora_story(device: torch.device) -> list[tuple[str, np.ndarray, int]]:
    found = lora_story(lambda pipe: pipe.to(device))
    values = [output for _, output, _ in found]
    assert all(not np.array_equal(one, other) for one, other in itertools.pairwise(values))
    return found


@pytest.mark.parametrize(
    ("placement", "when"),
    [("streamed", "before"), ("module-swapped", "after")],
)
@pytest.mark.slow
def test_lora_layers_in_compiled_blocks(device: torch.device, sim: ModuleType, placement: str, when: str) -> None:
    """Stock recompiles what gets other layers; offloaded, no more is."""
    found = lora_story(lambda pipe: pipe.enable_omni_offload(**PLACEMENTS[placement]), when)
    for (title, output, new), (_, reference, most) in zip(found, resident_lora_story(device), strict=True):
        assert np.array_equal(output, reference), title
        assert new <= most, f"{title}: {new} new graphs, and {most} of the resident pipeline"
