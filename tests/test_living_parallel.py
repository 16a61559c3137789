"""Context parallel of diffusers beside offload: two processes that share each attention, on CPUs."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from tests import simdevice, tiny
from tests.equality import Build, Call, build_as, build_resident
from tests.living import denoisers, enable, fast_ones, ours_left, with_arguments
from tests.modes import MODES
from tests.tiny.transformers import randomize_constants

RANKS = 2


def four_heads() -> tuple[Any, Call]:
    """A Qwen-Image pipeline whose heads and tokens can be shared by two."""
    pipe, call = tiny.build_qwen_image(3)
    sizes = {**pipe.transformer.config, "num_attention_heads": 4}
    torch.manual_seed(14)
    pipe.register_modules(transformer=randomize_constants(type(pipe.transformer).from_config(sizes), 14).eval())
    return pipe, with_arguments(call, prompt="dance monkey", negative_prompt="little queen")


BUILDS: dict[str, Build] = {
    "wan": lambda: tiny.build_wan(num_layers=3),
    "flux2": tiny.build_flux2,
    "qwen image": four_heads,
}
ORDERS = ("before", "after")
CHOICES: dict[str, dict[str, Any]] = {
    "layer": {"mode": "layer"},
    "residents": {"mode": "layer", "layer_options": {"dit": {"resident_layers": 1}}},
    "module": {"mode": "module"},
}
FINDINGS = ("moved", "first call", "second call", "turned off", "nothing left")
"""What each case says of itself: whether these are as they should be."""


def share(pipe: Any) -> None:
    """Each process computes with its share of the tokens, and of the heads within attention."""
    # Without a mesh diffusers makes one of accelerators, which have no collectives here.
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("ring", "ulysses"))
    for dit in denoisers(pipe):
        dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS, mesh=mesh))


def findings(name: str, choice: str, order: str, plain: np.ndarray, shared: np.ndarray) -> dict[str, bool]:
    """Of one offloaded pipeline."""
    pipe, call = build_as(BUILDS[name])
    if order == "before":
        share(pipe)
    handle = pipe.enable_omni_offload(**CHOICES[choice], device="cpu")
    if order == "after":
        assert np.array_equal(tiny.run(pipe, call), plain)
        share(pipe)
    loads, swaps = handle.loads, handle.swaps
    calls = [np.array_equal(tiny.run(pipe, call), shared) for _ in range(2)]
    moved = handle.swaps > swaps if choice == "module" else handle.loads > loads
    pipe.disable_omni_offload()
    values = [moved, *calls, np.array_equal(tiny.run(pipe, call), shared), ours_left(pipe) == []]
    return dict(zip(FINDINGS, values, strict=True))


def work(rank: int, folder: str) -> None:
    """One of the processes: all cases in turn; what it finds goes into a file, with the error of a case that raises."""
    torch.set_num_threads(1)
    simdevice.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for name in BUILDS:
        pipe, call = build_as(BUILDS[name])
        plain = tiny.run(pipe, call)
        share(pipe)
        shared = tiny.run(pipe, call)
        found[name] = bool(np.allclose(plain, shared, atol=1e-4) and np.ptp(shared) > 0)
        for choice in CHOICES:
            for order in ORDERS:
                try:
                    result: Any = findings(name, choice, order, plain, shared)
                except Exception as error:
                    result = repr(error)
                found[f"{name}, {choice}, {order}"] = result
                dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    """What each process found."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * RANKS
        yield [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", BUILDS)
def test_two_processes_share_a_dit(name: str, choice: str, order: str, found: list[dict[str, Any]]) -> None:
    """The same, bit for bit, as the two processes give without offload."""
    for rank in found:
        assert rank[name], "without offload the two processes give what one gives"
        assert rank[f"{name}, {choice}, {order}"] == dict.fromkeys(FINDINGS, True)


# ---------------------------------------------------------------------- one process


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refusal(share_one: Callable[[Any], None], pipe: Any, call: Call) -> tuple[type[Exception], np.ndarray]:
    """What sharing raises, and the pipeline's output after it."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        share_one(pipe.transformer)
    return raised.type, tiny.run(pipe, call)


def share_by_two(dit: Any) -> None:
    dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


def share_by_one(dit: Any) -> None:
    dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=1))


@pytest.mark.parametrize("share_one", [share_by_one, share_by_two])
@pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))
def test_one_process_has_nobody_to_share_with(
    mode: str, share_one: Callable[[Any], None], device: torch.device, one_process: None
) -> None:
    """Diffusers refuses it, and so it does beside offload; the pipeline goes on as before."""
    expected = refusal(share_one, *build_resident(tiny.build_flux2, device))
    pipe, call = build_as(tiny.build_flux2)
    enable(pipe, mode)
    error, output = refusal(share_one, pipe, call)
    assert error is expected[0] and np.array_equal(output, expected[1])
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


@pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))
def test_without_a_process_group_it_is_refused(mode: str, device: torch.device) -> None:
    expected = refusal(share_by_two, *build_resident(tiny.build_flux2, device))
    pipe, call = build_as(tiny.build_flux2)
    enable(pipe, mode)
    error, output = refusal(share_by_two, pipe, call)
    assert error is expected[0] and np.array_equal(output, expected[1])
