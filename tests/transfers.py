"""The ways in which ranks get a pipeline's weights, and what one of the ranks finds when they take one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from diffusers_omni_offload import adapter_for, disable_omni_offload, enable_omni_offload, load_omni_pipeline
from diffusers_omni_offload.backends.distributed import DistributedLayerwiseBackend
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import distributed_cases as cases
from tests import simdevice, tiny
from tests.equality import Build, Call
from tests.living import with_arguments
from tests.ranks import DeviceName

ALLGATHER = {"weight_transfer": "allgather"}


@dataclass(frozen=True)
class Way:
    """How ranks get weights.

    Attributes:
        start: "built" in code, "loaded" by stock diffusers, which remembers the files, or "mapped" by
            `load_omni_pipeline`.
        dit, text_encoder: layer options; None leaves the text encoder on the device.
    """

    start: Literal["built", "loaded", "mapped"]
    dit: Mapping[str, Any]
    text_encoder: Mapping[str, Any] | None = None

    @property
    def gathers(self) -> bool:
        """Whether the DiTs' blocks are gathered from shards."""
        return self.dit.get("weight_transfer") == "allgather"

    @property
    def gathers_all(self) -> bool:
        """Whether all that is streamed is."""
        return self.gathers and self.text_encoder in (None, ALLGATHER)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `enable_omni_offload`."""
        options = {"dit": dict(self.dit)}
        if self.text_encoder is not None:
            options["text_encoder"] = dict(self.text_encoder)
        return {"mode": "layer", "components": list(options), "layer_options": options}


WAYS: dict[str, Way] = {
    "rank-local": Way("built", {"weight_transfer": "rank-local"}),
    "checkpoint": Way("loaded", {"source": "checkpoint"}),
    "mapped": Way("mapped", {}),
    "allgather": Way("built", ALLGATHER),
    "allgather of a checkpoint": Way("loaded", {"source": "checkpoint", **ALLGATHER}),
    "allgather of mapped files": Way("mapped", ALLGATHER),
    "allgather of encoders": Way("built", ALLGATHER, ALLGATHER),
    "allgather and encoders": Way("built", ALLGATHER, {"weight_transfer": "rank-local"}),
}

TOYS: dict[str, Build] = {
    "uneven": lambda: tiny.build_toy(5, sizes=[7, 64, 200, 3, 129]),
    "uneven and mixed": lambda: tiny.build_toy(7, sizes=[90, 5, 61], dtype="bfloat16", gate_dtype="float32"),
    "two blocks": lambda: tiny.build_toy(2, sizes=[1, 70]),
    "two DiTs": lambda: tiny.build_toy(3, two_stage=True, sizes=[33, 90], text_encoder=True),
}
"""Toy pipelines, whose ranks differ by their noise."""


@dataclass(frozen=True)
class Found:
    """What a rank has found.

    Attributes:
        equal: whether the output is that of the plain run: of two calls, and of one after disabling.
        loads: copies of blocks in those two calls.
        group_size: ranks that hold the weights together.
        blocks: packed bytes of what is streamed, one by one.
        host_nbytes: what each takes of host memory for good, by its master.
        pinned_nbytes: what is page-locked after a call, as the simulated device counts it; 0 on the CPU.
        withheld: weights that can't be read between calls.
        mappings: names of the checkpoint's files that are still mapped after a call.
        left: weights that aren't there, or not on the CPU, after disabling.
    """

    equal: list[bool]
    loads: int
    group_size: int
    blocks: list[int]
    host_nbytes: list[int]
    pinned_nbytes: int
    withheld: list[str]
    mappings: list[str]
    left: list[str]


def can_go(name: str, way: str) -> bool:
    """Whether there is such a way for a pipeline: some have no encoder to stream, some can't be saved whole."""
    if name in TOYS:
        return WAYS[way].start == "built" and WAYS[way].text_encoder is None
    if WAYS[way].start == "mapped":
        return name in cases.SAVED
    return WAYS[way].text_encoder is None or not name.startswith("cosmos")


def take(rank: int, size: int, name: str, way: str, device: DeviceName, folder: Path) -> Found:
    """Two calls of a pipeline that gets its weights in one of the `WAYS`, and one after disabling.

    Args:
        folder: where `save` has saved it.
    """
    chosen, expected = WAYS[way], reference(name, rank, device)
    pipe, call = _start(name, rank, chosen.start, folder)
    if chosen.text_encoder is not None:
        _declare_replicated(pipe)
    pinned = _pinned(device)
    handle = enable_omni_offload(pipe, **chosen.options, device=device)
    equal = [np.array_equal(tiny.run(pipe, call), expected) for _ in range(2)]
    gc.collect()
    masters = list(handle.backend.masters)
    found = Found(
        equal,
        handle.loads,
        handle.backend.group.size if isinstance(handle.backend, DistributedLayerwiseBackend) else 1,
        [master.nbytes for master in masters],
        [master.host_nbytes for master in masters],
        _pinned(device) - pinned,
        [path for path, tensor in _weights(pipe) if is_withheld(tensor)],
        _mapped_files(folder),
        [],
    )
    del masters
    disable_omni_offload(pipe)
    left = [path for path, tensor in _weights(pipe) if is_withheld(tensor) or tensor.device.type != "cpu"]
    equal.append(np.array_equal(tiny.run(_on(pipe, device), call), expected))
    return replace(found, left=left)


@cache
def reference(name: str, rank: int, device: DeviceName) -> np.ndarray:
    """What one plain pipeline gives for the rank's request; once for a process."""
    pipe, call = _build(name, rank)
    return tiny.run(pipe.to(device), call)


def save(name: str, folder: Path) -> Path:
    """Save a pipeline whole, or its DiTs' weights alone where it can't be; toys aren't needed in files."""
    if name in cases.SAVED:
        return cases.save(name, folder)
    if name in TOYS:
        return folder
    pipe, _ = _build(name, 0)
    for path, dit in _dits(pipe):
        (folder / path).mkdir(parents=True)
        save_file(dit.state_dict(), folder / path / "model.safetensors")
    return folder


def _build(name: str, rank: int) -> tuple[Any, Call]:
    if name in TOYS:
        pipe, call = TOYS[name]()
        return pipe, lambda: {**call(), "generator": torch.Generator("cpu").manual_seed(rank)}
    return cases.build(name, rank)


def _start(name: str, rank: int, start: str, folder: Path) -> tuple[Any, Call]:
    if start == "built":
        return _build(name, rank)
    if name not in cases.SAVED:
        pipe, call = _build(name, rank)
        for path, dit in _dits(pipe):
            # What stock loading notes.
            if hasattr(dit, "register_to_config"):
                dit.register_to_config(_name_or_path=str(folder / path))
            else:
                dit.name_or_path = str(folder / path)
        return pipe, call
    if start == "loaded":
        return cases.load(name, folder, rank)
    fresh, call = cases.BUILDS[name]()
    pipe = load_omni_pipeline(type(fresh), folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe, with_arguments(call, prompt=cases.prompt_of(rank))


def _dits(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """The declared DiTs that are there, by path."""
    for path in adapter_for(type(pipe))._dit_modules:  # type: ignore[union-attr]
        dit = attrgetter(path)(pipe) if hasattr(pipe, path.split(".")[0]) else None
        if dit is not None:
            yield path, dit


def _declare_replicated(pipe: Any) -> None:
    """Have the pipeline's class say that its encoders' weights are the same on every rank."""
    owner: Any = adapter_for(type(pipe))
    names = ("_dit_modules", "_encoder_modules", "_vae_modules")
    declared: dict[str, Any] = {name: getattr(owner, name) for name in names}
    plan = owner._offload_plan
    declared["_offload_plan"] = replace(plan, encoder_dlo_weight_replication=tuple(plan.encoder_block_attrs))
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), declared)


def _weights(pipe: Any) -> Iterator[tuple[str, torch.Tensor]]:
    components = pipe.components.items() if hasattr(pipe, "components") else pipe.named_children()
    for name, component in components:
        if isinstance(component, nn.Module):
            for path, tensor in (*component.named_parameters(), *component.named_buffers()):
                yield f"{name}.{path}", tensor


def _on(pipe: Any, device: DeviceName) -> Any:
    """The pipeline on the device, its weights in aligned memory, as those of the plain run are."""
    if hasattr(pipe, "components"):
        tiny.align_parameters(pipe)
    return pipe.to(device)


def _pinned(device: DeviceName) -> int:
    return simdevice.stats()["pinned_current"] if device == "sim" else 0


def _mapped_files(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1].removeprefix(f"{folder}/") for line in lines if f"{folder}/" in line})
