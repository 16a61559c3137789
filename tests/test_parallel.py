"""Which ranks hold weights together, and what all-gather can't be combined with."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig, ParallelConfig, TensorParallelConfig
from torch import nn

from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.parallel import (
    ParallelFacts,
    WeightGroup,
    cache_of,
    parallel_facts,
    require_compatible,
    weight_group,
)
from tests import simdevice, tiny
from tests.test_agreement import free_port

GATHERING = OffloadConfig.from_options("layer", layer_options={"dit": {"weight_transfer": "allgather"}})
RANK_LOCAL = OffloadConfig.from_options("layer")

Scenario = Callable[[], Any]
SCENARIOS: dict[int, dict[str, Scenario]] = {2: {}, 4: {}}
"""What the processes do in turn, by how many there are."""


def scenario(*worlds: int) -> Callable[[Scenario], Scenario]:
    def add(function: Scenario) -> Scenario:
        for world in worlds:
            SCENARIOS[world][function.__name__] = function
        return function

    return add


def flags(**fields: Any) -> OffloadConfig:
    """All-gather, by the older flags."""
    return OffloadConfig.from_od_config({"enable_distributed_layerwise_offload": True, **fields})


def a_dit() -> Any:
    return tiny.build_wan(num_layers=2)[0].transformer


def shared_over(*shape: int, names: tuple[str, ...]) -> Any:
    """A DiT whose tokens are shared along the dimension "ulysses" of a mesh of all processes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    dit = a_dit()
    degree = shape[names.index("ulysses")]
    dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree, mesh=mesh))
    return dit


def described(group: WeightGroup) -> list[Any]:
    """A group, and what its members gather from each other, which are their ranks."""
    if group.process_group is None:
        return [group.kind, list(group.ranks), group.rank, [dist.get_rank()]]
    mine = torch.tensor([dist.get_rank()])
    gathered = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(gathered, mine, group=group.process_group)
    return [group.kind, list(group.ranks), group.rank, torch.cat(gathered).tolist()]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


# ---------------------------------------------------------------------- what the processes do


@scenario(2, 4)
def nothing_shared() -> Any:
    return described(weight_group(GATHERING, {"transformer": a_dit()}))


@scenario(2, 4)
def tokens_shared_by_all() -> Any:
    dit = shared_over(1, dist.get_world_size(), names=("ring", "ulysses"))
    return described(weight_group(GATHERING, {"transformer": dit, "transformer_2": a_dit()}))


@scenario(4)
def tokens_shared_by_neighbours() -> Any:
    dits = {"transformer": shared_over(2, 1, 2, names=("data", "ring", "ulysses"))}
    group = weight_group(GATHERING, dits)
    assert weight_group(GATHERING, dits).process_group is group.process_group, "no second one is made"
    return described(group)


@scenario(4)
def tokens_shared_by_every_second() -> Any:
    return described(weight_group(GATHERING, {"transformer": shared_over(1, 2, 2, names=("ring", "ulysses", "data"))}))


@scenario(4)
def tokens_shared_says_the_configuration() -> Any:
    config = flags(sequence_parallel_size=2, data_parallel_size=2)
    return described(weight_group(config, {"transformer": a_dit()}))


@scenario(4)
def contradictions() -> Any:
    dits = {"transformer": a_dit()}
    shared = {"transformer": shared_over(2, 1, 2, names=("data", "ring", "ulysses"))}
    other = {**shared, "transformer_2": shared_over(1, 2, 2, names=("ring", "ulysses", "data"))}
    return [
        refusal(lambda: weight_group(flags(data_parallel_size=2), dits)),
        refusal(lambda: weight_group(flags(sequence_parallel_size=3), dits)),
        refusal(lambda: weight_group(flags(sequence_parallel_size=4), shared)),
        refusal(lambda: weight_group(GATHERING, other)),
    ]


@scenario(2)
def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    dit = a_dit()
    for block in dit.blocks:
        fully_shard(block, mesh=mesh)
    facts = parallel_facts(RANK_LOCAL, {"transformer": dit})
    require_compatible(RANK_LOCAL, facts, {})
    group = weight_group(RANK_LOCAL, {"transformer": dit})
    return [facts.is_hsdp, group.kind, refusal(lambda: require_compatible(GATHERING, facts, {"transformer": dit}))]


@scenario(2)
def tensor_parallel() -> Any:
    """As diffusers sets it up, which it does on accelerators only."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(mesh=mesh))
    config.setup(dist.get_rank(), 2, torch.device("cpu"), mesh=mesh)
    dit = a_dit()
    dit._parallel_config = config
    facts = parallel_facts(GATHERING, {"transformer": dit})
    refused = refusal(lambda: require_compatible(GATHERING, facts, {"transformer": dit}))
    return [facts.tensor, facts.data, weight_group(RANK_LOCAL, {"transformer": dit}).kind, refused]


@scenario(2)
def an_encoder_that_torch_has_split() -> Any:
    """Whatever the DiT says."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    encoder = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    facts = parallel_facts(GATHERING, {"transformer": a_dit()})
    return refusal(lambda: require_compatible(GATHERING, facts, {"text_encoder": encoder}))


# ---------------------------------------------------------------------- the processes


def work(rank: int, world: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    simdevice.install()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {name: function() for name, function in SCENARIOS[world].items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int) -> list[dict[str, Any]]:
    """What each of `world` processes found."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [context.Process(target=work, args=(rank, world, folder, port)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=150)
            process.kill()
            process.join()
        assert [process.exitcode for process in processes] == [0] * world
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def of_two() -> Iterator[list[dict[str, Any]]]:
    yield run(2)


@pytest.fixture(scope="module")
def of_four() -> Iterator[list[dict[str, Any]]]:
    yield run(4)


def of(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in found]


# ---------------------------------------------------------------------- what has to come of it


@pytest.mark.processes
def test_two_processes_with_requests_of_their_own(of_two: list[dict[str, Any]]) -> None:
    assert of(of_two, "nothing_shared") == [["data", [0, 1], rank, [0, 1]] for rank in range(2)]


@pytest.mark.processes
def test_two_processes_that_share_a_request(of_two: list[dict[str, Any]]) -> None:
    assert of(of_two, "tokens_shared_by_all") == [["sequence", [0, 1], rank, [0, 1]] for rank in range(2)]


@pytest.mark.processes
def test_fsdp_is_for_rank_local_transfer_only(of_two: list[dict[str, Any]]) -> None:
    for is_hsdp, kind, refused in of(of_two, "fsdp"):
        assert is_hsdp and kind == "data"
        assert "'transformer': FSDP (HSDP) shards its weights already" in refused and "sharded twice" in refused


@pytest.mark.processes
def test_tensor_parallel_is_not_for_all_gather(of_two: list[dict[str, Any]]) -> None:
    """Rank-local transfer isn't advised: the parts of divided weights can't be streamed at all."""
    for tensor, data, kind, refused in of(of_two, "tensor_parallel"):
        assert (tensor, data, kind) == (2, 1, "sequence")
        assert "'transformer': tensor parallel of 2 gives each rank other parts" in refused
        assert "Leave one of the two out." in refused and "'rank-local'" not in refused


@pytest.mark.processes
def test_an_encoder_with_a_group_of_its_own_is_refused(of_two: list[dict[str, Any]]) -> None:
    for refused in of(of_two, "an_encoder_that_torch_has_split"):
        assert "'text_encoder': tensor parallel gives each rank other parts" in refused


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "name, kind, groups",
    [
        ("nothing_shared", "data", [[0, 1, 2, 3]]),
        ("tokens_shared_by_all", "sequence", [[0, 1, 2, 3]]),
        ("tokens_shared_by_neighbours", "data", [[0, 2], [1, 3]]),
        ("tokens_shared_by_every_second", "data", [[0, 1], [2, 3]]),
        ("tokens_shared_says_the_configuration", "data", [[0, 2], [1, 3]]),
    ],
)
def test_four_processes(name: str, kind: str, groups: list[list[int]], of_four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(of(of_four, name)):
        its = next(ranks for ranks in groups if rank in ranks)
        assert found == [kind, its, its.index(rank), its]


@pytest.mark.slow
@pytest.mark.processes
def test_contradictions(of_four: list[dict[str, Any]]) -> None:
    for data, sequence, mesh, different in of(of_four, "contradictions"):
        assert "data_parallel_size is 2, but 4 processes" in data and "leave 4" in data
        assert "4 processes can't be divided into groups of 3" in sequence
        assert "sequence_parallel_size is 4, but transformer shares its tokens among 2 ranks" in mesh
        assert "different context parallel ranks: transformer over ranks" in different


# ---------------------------------------------------------------------- one process


def test_without_a_process_group_nothing_is_shared() -> None:
    dits = {"transformer": nn.Linear(2, 2)}
    assert parallel_facts(GATHERING, dits) == ParallelFacts()
    assert weight_group(GATHERING, dits) == WeightGroup("none", (0,), 0)


@pytest.mark.parametrize("field", ["data_parallel_size", "sequence_parallel_size"])
def test_a_group_without_processes_is_refused(field: str) -> None:
    config = flags(**{field: 4})
    with pytest.raises(ValueError, match="is for 4 ranks by its configuration, but there is one process"):
        weight_group(config, {"transformer": nn.Linear(2, 2)})
    local = flags(**{field: 4}, dlo_use_allgather=False)
    assert weight_group(local, {"transformer": nn.Linear(2, 2)}).kind == "none"


def test_a_world_of_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert weight_group(GATHERING, {"transformer": nn.Linear(2, 2)}) == WeightGroup("none", (0,), 0)
    finally:
        dist.destroy_process_group()


def test_hsdp_by_the_configuration_is_refused() -> None:
    """By the configuration itself, and for one that says it of a pipeline later."""
    with pytest.raises(ValueError, match="HSDP shards the weights already"):
        flags(use_hsdp=True, hsdp_shard_size=4)
    facts = parallel_facts(flags(use_hsdp=True, dlo_use_allgather=False), {})
    assert facts.is_hsdp
    with pytest.raises(ValueError, match="sharded twice"):
        require_compatible(GATHERING, facts, {"transformer": nn.Linear(2, 2)})


def test_resident_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="resident_layers=2 needs weight_transfer='rank-local'"):
        OffloadConfig.from_options(
            "layer", layer_options={"dit": {"weight_transfer": "allgather", "resident_layers": 2}}
        )
    with pytest.raises(ValueError, match="dlo_resident_layers=2 needs rank-local weights"):
        flags(dlo_resident_layers=2)


def quantized(pre_quantized: bool) -> nn.Module:
    component = nn.Linear(2, 2)
    component.hf_quantizer = SimpleNamespace(pre_quantized=pre_quantized)
    return component


def test_online_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="quantized while they were loaded, by each rank for itself"):
        require_compatible(GATHERING, ParallelFacts(world=2, data=2), {"transformer": quantized(False)})
    require_compatible(GATHERING, ParallelFacts(world=2, data=2), {"transformer": quantized(True)})
    require_compatible(RANK_LOCAL, ParallelFacts(world=2, data=2), {})


@pytest.mark.parametrize("is_told", [True, False])
def test_a_cache_is_refused_with_several_requests(is_told: bool) -> None:
    """Whether the DiT says that it has one, or only its hooks do."""
    dit = a_dit()
    dits = {"transformer": dit}
    assert cache_of(dit) is None
    dit.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    if not is_told:
        dit._cache_config = None
    with pytest.raises(ValueError, match=r"its cache \(.*\) lets a rank skip blocks .* transformer.disable_cache\(\)"):
        require_compatible(GATHERING, ParallelFacts(world=4, data=2, sequence=2), dits)
    require_compatible(GATHERING, ParallelFacts(world=4, sequence=4), dits)
    require_compatible(RANK_LOCAL, ParallelFacts(world=4, data=4), {})


def test_caches_of_the_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_backend='cache_dit' lets a rank skip blocks"):
        flags(data_parallel_size=2, cache_backend="cache_dit")
    compact = {
        "mode": "layer",
        "components": ["dit", "text_encoder"],
        "layer_options": {"text_encoder": {"weight_transfer": "allgather"}},
    }
    with pytest.raises(ValueError, match="A prompt cache lets a rank skip its encoder"):
        OffloadConfig.from_od_config(
            {"diffusion_offload_config": compact, "data_parallel_size": 2, "enable_prompt_cache": True}
        )


def test_the_configurations_mean_distributed_layerwise() -> None:
    assert GATHERING.strategy is flags().strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE
