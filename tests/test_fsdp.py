"""What FSDP has sharded is left to it; the rest of the pipeline is offloaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diffusers_omni_offload import plan_omni_offload
from diffusers_omni_offload.backends import preflight
from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.apart import BOUND, Rank, attempt, weights
from tests.ranks import RankPool, answers

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("sim")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """On the CPU: FSDP knows no simulated device."""
    with RankPool(2, "cpu") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def on_sim() -> Iterator[RankPool]:
    with RankPool(2, "sim") as ranks:
        yield ranks


def blocks_of(pipe: Any, component: str) -> nn.ModuleList:
    return pipe.transformer.blocks if component == "transformer" else pipe.text_encoder.layers


def shard(pipe: Any, component: str = "transformer", *, on_host: bool = False) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy()
    for block in blocks_of(pipe, component):
        fully_shard(block, mesh=mesh, offload_policy=policy)


def sharded(pipe: Any) -> dict[str, tuple[Any, int]]:
    """What FSDP holds of each weight between calls: its identity, and where this rank's part is."""
    for module in (*blocks_of(pipe, "transformer"), *blocks_of(pipe, "text_encoder")):
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        path: (id(tensor), tensor.to_local().data_ptr())
        for path, tensor in weights(pipe).items()
        if hasattr(tensor, "to_local")
    }


def running(rank: int, size: int, device: str, on_host: bool, options: dict[str, Any]) -> dict[str, Any]:
    ours = Rank("toy with an encoder", rank, device)
    shard(ours.pipe, on_host=on_host)
    before = sharded(ours.pipe)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = ours.enable(**options)
    found = {
        "sharded": len(before),
        "said": [str(warning.message) for warning in said],
        "plan": str(handle.plan),
        "moved by us": [path for path, _ in handle.plan.streamed_blocks()] + list(handle.plan.swapped),
        "right": [ours.is_right(), ours.is_right()],
        "loads": handle.loads,
    }
    ours.pipe.disable_omni_offload()
    return found | {"kept": sharded(ours.pipe) == before, "right after": ours.is_right()}


OPTIONS: dict[str, dict[str, Any]] = {
    "layer": {"mode": "layer", "components": ["dit", "text_encoder"], "layer_options": {}},
    "by name": {"mode": "layer", "components": {"transformer": "layer", "text_encoder": "module"}, "layer_options": {}},
    "module": {"mode": "module", "layer_options": {}},
}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("how", OPTIONS)
def test_the_rest_is_offloaded(how: str, on_host: bool, pool: RankPool) -> None:
    for found in answers(pool.run(running, pool.device, on_host, OPTIONS[how])):
        assert found["sharded"] > 0 and found["kept"]
        assert any("'transformer' is left to FSDP" in sentence for sentence in found["said"])
        assert re.search(r"transformer +\w+ +dit .* left to FSDP", found["plan"])
        assert found["moved by us"] and all(path.startswith("text_encoder") for path in found["moved by us"])
        assert found["right"] == [True, True] and found["right after"]
        assert found["loads"] > 0 or how != "layer"


def elsewhere(rank: int, size: int, device: str) -> list[Any]:
    """What a plan would need on another device than that of the shards, by shapes and dtypes."""
    ours = Rank("toy with an encoder", rank, device)
    shard(ours.pipe, on_host=True)
    config = OffloadConfig(OffloadStrategy.MODEL_LEVEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = resolve_offload_plan(ours.pipe, config, declarations=adapter_for(type(ours.pipe)))
    accelerator = torch.device("cuda")
    need = preflight.device_need(plan, accelerator, slots=2)
    return [
        attempt(lambda: preflight.require_ready(plan, accelerator)),
        need.state + need.swapped,
        sum(_padded(tensor) for tensor in weights(ours.pipe).values() if not hasattr(tensor, "to_local")),
    ]


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256


def test_shards_on_the_host_count_for_nothing(pool: RankPool) -> None:
    for refused, need, others in answers(pool.run(elsewhere, pool.device)):
        assert refused.kind == "", refused
        assert 0 < need <= others


def places(pipe: Any) -> list[tuple[bool, str]]:
    """Of the transformer's parameters: whether FSDP has them, and where they are."""
    return sorted({(hasattr(tensor, "to_local"), tensor.device.type) for tensor in pipe.transformer.parameters()})


def on_the_device(rank: int, size: int, device: str) -> dict[str, Any]:
    """FSDP has the blocks, on the CPU. Nothing is run: it knows no simulated device."""
    ours = Rank("toy with an encoder", rank, device)
    shard(ours.pipe)
    before = sharded(ours.pipe)
    handle = ours.pipe.enable_omni_offload("module", device=device)
    placed = places(ours.pipe)
    report, forecast = str(handle.report()), str(plan_omni_offload(ours.pipe, memory_budget="1GiB", device=device))
    ours.pipe.disable_omni_offload()
    automatic = attempt(lambda: str(ours.pipe.enable_omni_offload("auto", device=device, profile=False).plan))
    ours.pipe.disable_omni_offload()
    return {"placed": placed, "kept": sharded(ours.pipe) == before, "said": [report, forecast], "auto": automatic}


def test_what_fsdp_has_not_taken_is_placed(on_sim: RankPool) -> None:
    for found in answers(on_sim.run(on_the_device, on_sim.device)):
        assert found["placed"] == [(False, "sim"), (True, "cpu")] and found["kept"]
        assert all("transformer" in text for text in found["said"])
        assert found["auto"].kind == "" and "left to FSDP" in found["auto"].result, found["auto"]


def replacing(rank: int, size: int, device: str) -> list[Any]:
    ours, other, third = (Rank("toy with an encoder", rank, device).pipe for _ in range(3))
    handle = ours.enable_omni_offload(components={"text_encoder": "module"}, device=device)
    shard(other)
    ours.transformer, first = other.transformer, ours.transformer
    before, found = sharded(ours), []
    for transformer in (other.transformer, third.transformer, other.transformer):
        ours.transformer = transformer
        with handle.call():
            found.append(places(ours))
    ours.disable_omni_offload()
    return [found, sharded(ours) == before, {tensor.device.type for tensor in first.parameters()}]


def test_one_that_comes_and_goes(on_sim: RankPool) -> None:
    for found, kept, first in answers(on_sim.run(replacing, on_sim.device)):
        sharded_ones = [(False, "sim"), (True, "cpu")]
        assert found == [sharded_ones, [(False, "sim")], sharded_ones]
        assert kept and first == {"cpu"}


def gathering(rank: int, size: int, device: str, component: str) -> list[Any]:
    ours = Rank("toy with an encoder", rank, device)
    shard(ours.pipe, component)
    before = sharded(ours.pipe)
    options = {component: {"weight_transfer": "allgather"}}
    refused = attempt(lambda: ours.enable(components={component: "layer"}, layer_options=options))
    return [refused, sharded(ours.pipe) == before, ours.is_right()]


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_it_is_not_gathered_twice(component: str, pool: RankPool) -> None:
    for refused, kept, right in answers(pool.run(gathering, pool.device, component)):
        assert refused.kind == "ValueError" and refused.seconds < BOUND
        assert re.search(r"HSDP\)? shards .* already", refused.text) and "'rank-local'" in refused.text
        assert kept and right
