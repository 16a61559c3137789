"""Sharded masters: how blocks are divided among ranks, and that ranks together have every byte once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusers_omni_offload.platform import CpuPlatform
from diffusers_omni_offload.weights.checkpoint import Checkpoint
from diffusers_omni_offload.weights.leaves import ALIGNMENT, find_leaves
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.proof import prove, stored_weights
from diffusers_omni_offload.weights.sharded import ShardedMaster, Sharding
from diffusers_omni_offload.weights.withheld import is_withheld
from tests.tiny.toy import ToyBlock

CHUNKS = (1, 256, 700, 4096, 1 << 20)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# How blocks are divided


def check_sharding(nbytes: int, ranks: int, chunk_nbytes: int) -> None:
    """Every claim about the division of one block, on all of its ranks."""
    shardings = [Sharding(nbytes, ranks, rank, chunk_nbytes) for rank in range(ranks)]
    (shard,), (padded,) = {s.shard_nbytes for s in shardings}, {s.padded_nbytes for s in shardings}
    assert shard % ALIGNMENT == 0 and padded == shard * ranks
    assert nbytes <= padded < nbytes + ranks * ALIGNMENT + ranks
    chunks = [list(s.chunks()) for s in shardings]
    assert all(other == chunks[0] for other in chunks), "all ranks gather the same chunks"
    # Chunks follow each other without a gap, in the slot as in the shard, and are aligned.
    start = shard_start = 0
    for chunk in chunks[0]:
        assert (chunk.start, chunk.shard_start) == (start, shard_start)
        assert chunk.piece_nbytes > 0 and chunk.piece_nbytes % ALIGNMENT == chunk.start % ALIGNMENT == 0
        assert chunk.piece_nbytes * ranks <= max(chunk_nbytes + ranks * ALIGNMENT, ranks * ALIGNMENT)
        start, shard_start = start + chunk.piece_nbytes * ranks, shard_start + chunk.piece_nbytes
    assert (start, shard_start) == (padded, shard)
    # The pieces of all ranks make up the block, each byte once.
    found = []
    for sharding in shardings:
        last = 0
        for at, begin, size in sharding.pieces(sharding.rank):
            assert at >= last and at % ALIGNMENT == begin % ALIGNMENT == 0 and size > 0
            last = at + size
            assert last <= shard and begin + size <= nbytes
            found.append((begin, begin + size))
    covered = 0
    for begin, end in sorted(found):
        assert begin == covered
        covered = end
    assert covered == nbytes
    # A gather puts a rank's piece of a chunk where the rank's pieces say that it belongs.
    for sharding in shardings:
        belongs = {(at, begin) for at, begin, _ in sharding.pieces(sharding.rank)}
        for chunk in sharding.chunks():
            begin = chunk.start + sharding.rank * chunk.piece_nbytes
            assert ((chunk.shard_start, begin) in belongs) == (begin < nbytes)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_pieces_of_all_ranks_tile_the_block(ranks: int) -> None:
    rng = random.Random(ranks)
    sizes = [1, 2, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 5000, *rng.sample(range(1, 5001), 150)]
    for nbytes in sizes:
        for chunk_nbytes in CHUNKS:
            check_sharding(nbytes, ranks, chunk_nbytes)


@pytest.mark.parametrize("ranks", range(1, 5))
def test_blocks_of_a_few_bytes(ranks: int) -> None:
    for numel in range(1, 18):
        for itemsize in (1, 2, 4, 8):
            check_sharding(numel * itemsize, ranks, 64 << 20)


def test_large_blocks_in_real_chunks() -> None:
    for nbytes in (700 << 20, (700 << 20) + 12345):
        for ranks in (1, 2, 3, 8):
            check_sharding(nbytes, ranks, 64 << 20)
            assert len(list(Sharding(nbytes, ranks, 0, 64 << 20).chunks())) in (11, 12)


def test_an_empty_block_has_no_pieces() -> None:
    for ranks in (1, 3):
        sharding = Sharding(0, ranks, ranks - 1, 4096)
        assert sharding.shard_nbytes == sharding.padded_nbytes == 0
        assert list(sharding.chunks()) == list(sharding.pieces(0)) == []


# Ranks in one process

Build = Callable[[], nn.Module]


def toy(dtype: torch.dtype = torch.float32, gate: torch.dtype | None = None, hidden: int = 48) -> ToyBlock:
    return ToyBlock(16, hidden, dtype, gate, seed=3).eval().requires_grad_(False)


class Odd(nn.Module):
    """Leaves of odd sizes, strides, kinds and dtypes, two of them with one storage, and one twice."""

    def __init__(self, numel: int = 17) -> None:
        super().__init__()
        values = torch.arange(1.0, numel + 1)
        self.small = nn.Parameter(values.clone(), requires_grad=False)
        self.halves = nn.Parameter(values.to(torch.bfloat16).repeat(3, 1).t(), requires_grad=False)
        self.tied = self.small
        self.scalar = nn.Buffer(torch.tensor(numel))
        self.register_buffer("flags", values > 3)
        self.register_buffer("empty", torch.empty(0, 3), persistent=False)
        self.register_buffer("column", torch.arange(4.0 * numel).reshape(numel, 4)[:, 1])
        self.register_buffer("spread", torch.ones(1, 3).expand(5, 3))
        with torch.inference_mode():
            self.register_buffer("inference", values.clone())


BUILDS: dict[str, Build] = {
    "float32": toy,
    "bfloat16": lambda: toy(torch.bfloat16),
    "mixed": lambda: toy(torch.bfloat16, torch.float32, hidden=100),
    **{f"odd {numel}": lambda numel=numel: Odd(numel) for numel in range(1, 18)},  # type: ignore[misc]
}


class Rank:
    """One rank's block and its master."""

    def __init__(
        self, build: Build, ranks: int, rank: int, chunk_nbytes: int = 700, whole: MappedMaster | None = None
    ) -> None:
        self.block = build()
        if whole is not None:
            self.block = whole._roots[0]
        self.master = ShardedMaster(
            lambda: find_leaves(self.block, "block"),
            [self.block],
            "block",
            CpuPlatform(torch.device("cpu")),
            PinnedBudget(True),
            lambda nbytes: Sharding(nbytes, ranks, rank, chunk_nbytes),
            whole,
        )
        self.master.pack()


def gathered(masters: list[ShardedMaster]) -> torch.Tensor:
    """What an all-gather of each chunk gives."""
    (padded,) = {master.slot_nbytes for master in masters}
    buffer = torch.full((padded,), 77, dtype=torch.uint8)
    for chunks in zip(*[list(master.sharding.chunks()) for master in masters], strict=True):
        at = chunks[0].start
        for master, chunk in zip(masters, chunks, strict=True):
            buffer[at : at + chunk.piece_nbytes] = master.shard[chunk.shard_start :][: chunk.piece_nbytes]
            at += chunk.piece_nbytes
    return buffer


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    found, wanted = tensors_of(module), tensors_of(expected)
    assert found.keys() == wanted.keys()
    for path, tensor in found.items():
        other = wanted[path]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()), path
        assert tensor.is_inference() == other.is_inference() and tensor.requires_grad == other.requires_grad
        assert torch.equal(tensor, other), path


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_there_and_back(build: Build, ranks: int) -> None:
    """Shares are taken, the leaves' bytes let go, and what the ranks have together is the block."""
    members = [Rank(build, ranks, rank) for rank in range(ranks)]
    masters = [member.master for member in members]
    plain = build()
    for member in members:
        assert_same(member.block, plain)
        identities = [id(tensor) for tensor in member.master.tensors]
        member.master.commit()
        assert all(is_withheld(tensor) for tensor in tensors_of(member.block).values())
        assert [id(tensor) for tensor in member.master.tensors] == identities
        assert member.master.is_current()
    assert len({master.digest for master in masters}) == 1
    following = [*masters[1:], masters[0]]
    assert all(a.checksums[1] == b.checksums[0] for a, b in zip(masters, following, strict=True))
    total = sum(master.host_nbytes for master in masters)
    nbytes = masters[0].nbytes
    assert nbytes <= total <= nbytes + ranks * (ALIGNMENT + 1)
    block_bytes = gathered(masters)
    assert torch.equal(block_bytes[nbytes:], torch.zeros(total - nbytes, dtype=torch.uint8)), "padding is zeros"
    for member in members:
        for _ in range(2):  # a forward's time
            member.master.bind(block_bytes)
            assert_same(member.block, plain)
            member.master.unbind()
            assert all(is_withheld(tensor) for tensor in tensors_of(member.block).values())
        member.master.restore(block_bytes.clone())
        assert_same(member.block, plain)
        assert not member.master.is_committed and member.master.changed_leaf() in (
            None,
            *[leaf.path for leaf in member.master.find()],
        )
        storages = [tensor.untyped_storage().nbytes() for tensor in member.master.tensors]
        assert sum(storages) < nbytes + len(storages) * ALIGNMENT, "each has bytes of its own and no more"
    # And once more, after they were edited in the same way on all ranks.
    for module in (plain, *[member.block for member in members]):
        for tensor in module.parameters():
            tensor.data.mul_(2)
    for member in members:
        member.master.pack()
        member.master.commit()
    for member in members:
        member.master.restore(gathered(masters))
        assert_same(member.block, plain)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_shares_are_read_from_the_file(tmp_path: Path, ranks: int, stored: torch.dtype) -> None:
    """The same shares as of a block in memory, whether it is mapped or has to be cast."""
    tensors = {key: tensor.to(stored) for key, tensor in toy(torch.bfloat16).state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    members = []
    for rank in range(ranks):
        block = toy(torch.bfloat16)
        sources = prove(block, Checkpoint.find(tmp_path), casts=True)
        assert isinstance(sources, dict)
        origins = {id(tensor): (tensor, sources[path]) for path, tensor in stored_weights(block).items()}
        whole = MappedMaster(lambda block=block: find_leaves(block, "block"), [block], "block", origins)  # type: ignore[misc]
        members.append(Rank(lambda: toy(torch.bfloat16), ranks, rank, whole=whole))
        in_memory = Rank(lambda: toy(torch.bfloat16), ranks, rank)
        assert torch.equal(members[-1].master.shard, in_memory.master.shard)
        assert members[-1].master.digest == in_memory.master.digest
    for member in members:
        member.master.commit()
    for member in members:
        member.master.restore(gathered([other.master for other in members]))
        assert_same(member.block, toy(torch.bfloat16))


# What differs


def _other_strides(block: ToyBlock) -> None:
    block.expand.weight.data = block.expand.weight.data.t().contiguous().t()


def _other_name(block: ToyBlock) -> None:
    block.shrink = block._modules.pop("contract")


def _other_order(block: ToyBlock) -> None:
    block._modules["expand"] = block._modules.pop("expand")


DIFFERENT: dict[str, Build] = {
    "dtype": lambda: toy(torch.bfloat16),
    "one dtype": lambda: toy(gate=torch.bfloat16),
    "size": lambda: toy(hidden=49),
    "a leaf more": lambda: _changed(lambda block: block.register_buffer("more", torch.ones(1))),
    "an empty leaf more": lambda: _changed(lambda block: block.register_buffer("more", torch.ones(0))),
    "a leaf less": lambda: _changed(lambda block: setattr(block.expand, "bias", None)),
    "strides": lambda: _changed(_other_strides),
    "a name": lambda: _changed(_other_name),
    "the order": lambda: _changed(_other_order),
    "an alias more": lambda: _changed(lambda block: setattr(block, "again", nn.Parameter(block.gate.data, False))),
    "a shape": lambda: _changed(lambda block: setattr(block.gate, "data", block.gate.data.view(4, 4))),
}


def _changed(change: Callable[[ToyBlock], object]) -> ToyBlock:
    block = toy()
    change(block)
    return block


@pytest.mark.parametrize("build", DIFFERENT.values(), ids=DIFFERENT)
def test_digests_tell_blocks_apart(build: Build) -> None:
    expected = Rank(toy, 2, 0).master.digest
    assert Rank(toy, 2, 1).master.digest == Rank(toy, 3, 0, 4096).master.digest == expected, "it isn't about ranks"
    assert Rank(build, 2, 0).master.digest != expected


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("differs", [0, 1])
def test_checksums_tell_values_apart(ranks: int, differs: int) -> None:
    """One rank has another value somewhere: its share, or what it reads of the next one's, shows it."""
    members = [Rank(toy, ranks, rank, 256) for rank in range(ranks)]
    for path, tensor in tensors_of(members[differs].block).items():
        before = tensor.view(-1)[-1].item()
        tensor.view(-1)[-1] = before + 1
        members[differs].master.pack()
        sums = [member.master.checksums for member in members]
        assert any(sums[rank][1] != sums[(rank + 1) % ranks][0] for rank in range(ranks)) or ranks > 2, path
        tensor.view(-1)[-1] = before
        members[differs].master.pack()
    sums = [member.master.checksums for member in members]
    assert all(sums[rank][1] == sums[(rank + 1) % ranks][0] for rank in range(ranks))


def test_digests_tell_paths_apart() -> None:
    member = Rank(toy, 2, 0)
    before = member.master.digest
    member.master.path = "another"
    assert member.master.digest != before


# Changes that aren't allowed


def committed() -> Rank:
    member = Rank(toy, 2, 0)
    member.master.commit()
    return member


@pytest.mark.parametrize(
    "attempt",
    [
        lambda member: member.master.pack(),
        lambda member: member.master.realize(),
        lambda member: member.master.take_home(member.block.gate),
    ],
    ids=["pack", "realize", "take_home"],
)
def test_one_rank_alone_can_do_nothing(attempt: Callable[[Rank], object]) -> None:
    member = committed()
    with pytest.raises(RuntimeError, match=r"^block.* was changed while each rank holds a share of it only\. .*gather"):
        attempt(member)
    assert all(map(is_withheld, member.master.tensors)) and member.master.is_committed


def test_a_withheld_weight_says_how_to_read_it() -> None:
    member = committed()
    with pytest.raises(RuntimeError, match=r"^block\.expand\.weight isn't here: each rank holds a share .*gather\(\)"):
        member.block.expand.weight.sum()


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "gate", nn.Parameter(torch.ones(16), False)),
        lambda block: block.register_buffer("more", torch.ones(1)),
        lambda block: setattr(block.expand, "bias", None),
        lambda block: block.add_module("more", nn.Linear(1, 1)),
        lambda block: torch.utils.swap_tensors(block.gate, nn.Parameter(torch.ones(16), False)),
        lambda block: block.load_state_dict({"shift": torch.ones(16)}, strict=False, assign=True),
    ],
    ids=["replaced", "added", "removed", "a module", "swapped", "assigned"],
)
def test_what_came_or_went_is_noticed(change: Callable[[ToyBlock], object]) -> None:
    member = committed()
    assert member.master.is_current()
    change(member.block)  # type: ignore[arg-type]
    assert not member.master.is_current()


def test_before_it_is_committed_anything_may_change() -> None:
    member = Rank(toy, 2, 0)
    member.block.gate = nn.Parameter(torch.ones(16), False)
    assert member.master.is_current() and not member.master.take_home(member.block.gate)
    member.master.pack()
    member.master.commit()
    assert is_withheld(member.block.gate)


def test_what_could_not_be_brought_back_is_lost_and_says_so() -> None:
    member = committed()
    member.master.release()
    with pytest.raises(RuntimeError, match=r"block\.expand\.weight is lost on this rank: .* anew\.$"):
        member.block.expand.weight.sum()
    restored = committed()
    restored.master.restore(torch.zeros(restored.master.slot_nbytes, dtype=torch.uint8))
    restored.master.release()
    assert restored.block.expand.weight.sum() == 0


def test_a_leaf_that_cannot_be_packed_leaves_all_as_they_are() -> None:
    member = Rank(toy, 2, 0)
    before = member.master.shard.clone()
    member.block.expand.weight = nn.Parameter(torch.empty(48, 16, device="meta"), False)
    with pytest.raises(ValueError, match=r"block\.expand\.weight is on the meta device"):
        member.master.pack()
    assert torch.equal(member.master.shard, before) and not member.master.is_committed
    assert not any(map(is_withheld, member.master.tensors))


def test_what_lies_between_a_strided_weights_elements_does_not_count() -> None:
    checksums, shards = [], []
    for filler in (0.0, 7.0):
        block = nn.Module()
        wide = torch.full((40, 96), filler)
        wide[:, :64] = torch.arange(40 * 64).reshape(40, 64)
        block.weight = nn.Parameter(wide[:, :64], requires_grad=False)
        assert not block.weight.is_contiguous()
        master = ShardedMaster(
            lambda block=block: find_leaves(block, "block"),  # type: ignore[misc]
            [block],
            "block",
            CpuPlatform(torch.device("cpu")),
            PinnedBudget(False),
            lambda nbytes: Sharding(nbytes, 2, 0, 1 << 20),
        )
        master.pack()
        checksums.append(master.checksums)
        shards.append(master.shard.clone())
    assert checksums[0] == checksums[1] and torch.equal(*shards)
