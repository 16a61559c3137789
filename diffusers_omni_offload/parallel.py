"""The ranks that hold a pipeline's weights together. They follow from the parallel state; callers don't choose them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from diffusers_omni_offload.agreement import Agreement
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.topology.fsdp import is_left_to_fsdp
from diffusers_omni_offload.weights.withheld import is_withheld

_CACHE_HOOKS = ("cache", "fbc_", "pyramid_attention_broadcast")
"""Parts of the names that diffusers gives to hooks of caches."""

#: Default process group -> (ranks that work on one request, for all) -> this rank's data parallel group.
_data_groups: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class WeightGroup:
    """The ranks that hold a pipeline's weights together.

    Attributes:
        kind: how they share the work: "data" (each has its own requests), "sequence" (they share one), or "none".
        ranks: their global ranks, ascending.
        rank: this process, as an index into `ranks`.
        process_group: of these ranks; None for "none".
    """

    kind: Literal["none", "data", "sequence"]
    ranks: tuple[int, ...]
    rank: int
    process_group: Any = None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


@dataclass(frozen=True)
class ParallelFacts:
    """How the processes share work and weights.

    Attributes:
        world: number of processes; 1 without a process group.
        rank: this one.
        data: data parallel size: groups of ranks that work on different requests.
        sequence: ranks that share the tokens of a request (context parallel).
        tensor: ranks that share each weight (tensor parallel).
        together: the ranks that work on this rank's request, ascending; None if only their number is known.
        is_hsdp: whether FSDP shards weights.
    """

    world: int = 1
    rank: int = 0
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    together: tuple[int, ...] | None = None
    is_hsdp: bool = False


def parallel_facts(config: OffloadConfig, dits: Mapping[str, nn.Module]) -> ParallelFacts:
    """The parallel state. The data parallel size is what context and tensor parallel leave of the world.

    Args:
        config: its sizes fill in what the DiTs don't show, and mustn't contradict what they show.
        dits: path -> DiT.

    Raises:
        ValueError: a contradiction.
    """
    is_hsdp = config.use_hsdp or any(is_left_to_fsdp(dit) for dit in dits.values())
    if not (dist.is_available() and dist.is_initialized()):
        return ParallelFacts(is_hsdp=is_hsdp)
    world = dist.get_world_size()
    sequences = {path: ranks for path, dit in dits.items() if (ranks := _ranks_of(dit, "context"))}
    tensors = {path: ranks for path, dit in dits.items() if (ranks := _ranks_of(dit, "tensor"))}
    sequence_ranks = _the_same("context parallel", sequences)
    tensor_ranks = _the_same("tensor parallel", tensors)
    sequence = len(sequence_ranks) or config.sequence_parallel_size
    if config.sequence_parallel_size not in (1, sequence):
        raise ValueError(
            f"sequence_parallel_size is {config.sequence_parallel_size}, but {', '.join(sequences)} shares its tokens "
            f"among {sequence} ranks; leave sequence_parallel_size out, or make them the same."
        )
    tensor = len(tensor_ranks) or 1
    on_one = sequence * tensor
    data = world // on_one
    if data * on_one != world:
        raise ValueError(
            f"{world} processes can't be divided into groups of {on_one} that work on one request (sequence parallel "
            f"{sequence}, tensor parallel {tensor}); start a multiple of {on_one}."
        )
    if config.data_parallel_size not in (1, data):
        raise ValueError(
            f"data_parallel_size is {config.data_parallel_size}, but {world} processes with sequence parallel "
            f"{sequence} and tensor parallel {tensor} leave {data}; leave data_parallel_size out, or start "
            f"{config.data_parallel_size * on_one} processes."
        )
    together = sequence_ranks or tensor_ranks or (None if on_one > 1 else (dist.get_rank(),))
    if sequence_ranks and tensor_ranks and sequence_ranks != tensor_ranks:
        together = None
    return ParallelFacts(world, dist.get_rank(), data, sequence, tensor, together, is_hsdp)


def with_parallel_facts(config: OffloadConfig, components: Mapping[str, nn.Module]) -> OffloadConfig:
    """The configuration with the sizes of the parallel state in it, for what is resolved without a process group.

    Raises:
        ValueError: they contradict each other, or what was asked for.
    """
    facts = parallel_facts(config, components)
    if facts.world == 1:
        return config
    return replace(config, data_parallel_size=facts.data, sequence_parallel_size=facts.sequence, use_hsdp=facts.is_hsdp)


def weight_group(config: OffloadConfig, dits: Mapping[str, nn.Module]) -> WeightGroup:
    """The data parallel group if there are several requests at a time, else the ranks that share one. Every process has
    to ask, at the same time, because it may take a new process group; asked again, it is the same one.

    Raises:
        ValueError: sizes contradict each other, or all-gather was asked for with more ranks than there are processes.
        AgreementError: the processes don't see the same parallel state.
    """
    facts = parallel_facts(config, dits)
    if facts.world == 1:
        asked = config.group_size
        if config.uses_allgather and asked > 1 and not facts.is_hsdp:
            raise ValueError(
                f"weight_transfer='allgather' is for {asked} ranks by its configuration, but there is one process; "
                f"start {asked} with torchrun and call torch.distributed.init_process_group, or leave the sizes out."
            )
        return WeightGroup("none", (facts.rank,), 0)
    everybody = WeightGroup("data", tuple(range(facts.world)), facts.rank, dist.group.WORLD)
    if facts.data == 1:
        return WeightGroup("sequence", everybody.ranks, facts.rank, dist.group.WORLD)
    if facts.data == facts.world:
        return everybody
    groups = _data_parallel_ranks(facts, everybody)
    ranks = next(ranks for ranks in groups if facts.rank in ranks)
    return WeightGroup("data", ranks, ranks.index(facts.rank), _process_group(groups, ranks))


def require_compatible(config: OffloadConfig, facts: ParallelFacts, gathered: Mapping[str, nn.Module]) -> None:
    """Raise ValueError, with what to do instead, for what all-gather can't be combined with.

    Args:
        config: what was asked for.
        facts: the parallel state.
        gathered: path -> component whose blocks are to be sharded and gathered; empty for rank-local transfer.
    """
    for path, component in gathered.items():
        why = _why_not(path, component, facts)
        if why is not None:
            raise ValueError(f"weight_transfer='allgather' can't be used for {path!r}: {why}")


def cache_of(component: nn.Module) -> str | None:
    """What a cache of diffusers on `component` is called, one that may let a rank skip blocks; None without one."""
    if getattr(component, "is_cache_enabled", False):
        return type(getattr(component, "_cache_config", None)).__name__
    for module in component.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for name in getattr(registry, "hooks", ()):
            if any(part in name for part in _CACHE_HOOKS):
                return str(name)
    return None


def _why_not(path: str, component: nn.Module, facts: ParallelFacts) -> str | None:
    """Why a component can't be gathered, and what to do; None if it can."""
    rank_local = "Use 'rank-local' (dlo_use_allgather=False)"
    if facts.is_hsdp or is_left_to_fsdp(component):
        return (
            f"FSDP (HSDP) shards its weights already, so they would be sharded twice. {rank_local}, which leaves it to "
            "FSDP, or leave FSDP out."
        )
    sharing = _ranks_of(component, "tensor")
    if sharing or facts.tensor > 1 or any(_is_dtensor(tensor) for tensor in component.parameters()):
        degree = len(sharing) or facts.tensor
        return (
            f"tensor parallel{f' of {degree}' if degree > 1 else ''} gives each rank other parts of its weights, so "
            "the ranks' shards don't make up a block. Leave one of the two out."
        )
    quantizer = getattr(component, "hf_quantizer", None)
    if quantizer is not None and not getattr(quantizer, "pre_quantized", True):
        return (
            "its weights were quantized while they were loaded, by each rank for itself, so nothing says that the "
            f"ranks' bytes are the same. {rank_local}, or load a checkpoint that is quantized already."
        )
    cache = cache_of(component) if facts.data > 1 else None
    if cache is not None:
        return (
            f"its cache ({cache}) lets a rank skip blocks that {facts.data} data parallel ranks have to gather "
            f"together. Call {path}.disable_cache() first, or use 'rank-local' (dlo_use_allgather=False)."
        )
    return None


def _data_parallel_ranks(facts: ParallelFacts, everybody: WeightGroup) -> tuple[tuple[int, ...], ...]:
    """The data parallel groups of all ranks: those with the same place in the groups that work on one request."""
    size = facts.world // facts.data
    together = facts.together
    if together is None:
        first = facts.rank - facts.rank % size
        together = tuple(range(first, first + size))
    agreement = Agreement(everybody, "weight group")
    answers = agreement.exchange({"together": together}, "the choice of the ranks that share weights")
    requests = sorted({tuple(answer["together"]) for answer in answers})
    if sorted(rank for ranks in requests for rank in ranks) != list(everybody.ranks):
        raise ValueError(
            f"The ranks that work on one request are {', '.join(map(str, requests))}, by what the ranks say, but each "
            f"of {facts.world} has to be in one of them, with {size} in each; share the tokens alike everywhere."
        )
    return tuple(zip(*requests, strict=True))


def _process_group(groups: tuple[tuple[int, ...], ...], own: tuple[int, ...]) -> Any:
    known = _data_groups.setdefault(dist.group.WORLD, {})
    if groups not in known:
        # Every process makes all of them, in the same order, and is a member of one.
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        known[groups] = made[own]
    return known[groups]


def _ranks_of(component: nn.Module, kind: Literal["context", "tensor"]) -> tuple[int, ...]:
    """The ranks that share a component's work, as diffusers has set it up, ascending; none if it isn't shared."""
    parallel = getattr(component, "_parallel_config", None)
    config = getattr(parallel, f"{kind}_parallel_config", None)
    mesh = getattr(config, "_flattened_mesh" if kind == "context" else "_mesh", None)
    if mesh is None or mesh.size() == 1:
        return ()
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _the_same(what: str, found: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    if len(set(found.values())) > 1:
        each = ", ".join(f"{path} over ranks {_listed(ranks)}" for path, ranks in found.items())
        raise ValueError(f"The DiTs have different {what} ranks: {each}. Give them the same ones.")
    return next(iter(found.values()), ())


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _is_dtensor(tensor: Any) -> bool:
    if is_withheld(tensor):
        return False
    # Wrappers, whose parts may be withheld, can't be asked for their data.
    return type(tensor.data if type(tensor) is nn.Parameter else tensor).__name__ == "DTensor"
