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
        sum(_padded(tensor) for path, tensor in weights(ours.pipe).items() if not path.startswith("transformer.")),
    ]


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256


def test_shards_on_the_host_count_for_nothing(pool: RankPool) -> None:
    for refused, need, others in answers(pool.run(elsewhere, pool.device)):
        assert refused.kind == "", refused
        assert 0 < need <= others


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
