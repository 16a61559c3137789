"""Masters of which each rank holds its share: together the ranks have the block's bytes once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.progress import SILENT, Bar
from diffusers_omni_offload.weights.leaves import (
    ALIGNMENT,
    Leaf,
    Placement,
    place_apart,
    require_plain,
    span_bytes,
    span_nbytes,
)
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.master import Master, view_in_mode
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget
from diffusers_omni_offload.weights.withheld import give_back, is_withheld, withhold


@dataclass(frozen=True)
class Chunk:
    """A part of a block that is gathered at once: each rank has a piece of it.

    Attributes:
        start: offset of the chunk in the padded block, bytes.
        shard_start: offset of this rank's piece in its shard, bytes.
        piece_nbytes: size of a rank's piece; the chunk has that many for each rank.
    """

    start: int
    shard_start: int
    piece_nbytes: int


@dataclass(frozen=True)
class Sharding:
    """How a block of `nbytes` is divided among ranks: into chunks, and each chunk into one piece a rank.

    Pieces are multiples of 256 bytes; what is missing at the end is zeros.

    Attributes:
        nbytes: size of the block.
        ranks: number of ranks.
        rank: this one.
        chunk_nbytes: size of a chunk, about.
    """

    nbytes: int
    ranks: int
    rank: int
    chunk_nbytes: int

    @property
    def shard_nbytes(self) -> int:
        """Bytes that each rank holds."""
        return _aligned(-(-self.nbytes // self.ranks))

    @property
    def padded_nbytes(self) -> int:
        """Bytes of all shards together, which a slot has room for."""
        return self.shard_nbytes * self.ranks

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in order."""
        step = max(ALIGNMENT, _aligned(self.chunk_nbytes // self.ranks))
        for start in range(0, self.shard_nbytes, step):
            yield Chunk(start * self.ranks, start, min(step, self.shard_nbytes - start))

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the shard, offset in the block, bytes) of a rank's pieces, without what is only padding."""
        for chunk in self.chunks():
            start = chunk.start + rank * chunk.piece_nbytes
            nbytes = min(chunk.piece_nbytes, self.nbytes - start)
            if nbytes > 0:
                yield chunk.shard_start, start, nbytes


class ShardedMaster(Master):
    """This rank's share of a block, page-locked where possible.

    `pack` takes the share and leaves the leaves as they are; `commit` lets their bytes go. From then on they are
    withheld between forwards, and only all ranks together can bring them back: `restore`.

    Args:
        find, roots, path: see `Master`.
        platform: where the copies go to.
        budget: what may be page-locked.
        share: (block's bytes) -> how it is divided.
        whole: reads the block from the checkpoint's files, if that is where it is; then nothing but the share is
            ever in memory.

    Attributes:
        sharding: how the block is divided.
        checksums: of this rank's share, and of the next rank's: what a rank has of its own has to be what the one
            before it has read for it.
        is_committed: whether the leaves' bytes are gone.
    """

    takes_casts = False

    def __init__(
        self,
        find: Callable[[], list[Leaf]],
        roots: Sequence[nn.Module],
        path: str,
        platform: Platform,
        budget: PinnedBudget,
        share: Callable[[int], Sharding],
        whole: MappedMaster | None = None,
    ) -> None:
        super().__init__(find, roots, path)
        self._platform, self._budget, self._share = platform, budget, share
        self._whole = whole
        self._leaves: list[Leaf] = []
        self._buffer: HostBuffer | None = None
        self.sharding = share(0)
        self.checksums = (0, 0)
        self.is_committed = False

    @property
    def is_pinned(self) -> bool:
        return self._buffer is not None and self._buffer.is_pinned

    @property
    def shard(self) -> torch.Tensor:
        """This rank's bytes: uint8, shape (shard_nbytes,)."""
        assert self._buffer is not None
        return self._buffer.bytes

    @property
    def host_nbytes(self) -> int:
        return self.sharding.shard_nbytes

    @property
    def slot_nbytes(self) -> int:
        return self.sharding.padded_nbytes

    @property
    def digest(self) -> str:
        """Tells whether two ranks mean the same leaves in the same places."""
        placements = [(p.offset, p.nbytes, str(p.dtype), tuple(p.shape), p.stride) for p in self._placements]
        paths = [leaf.path for leaf in self._leaves]
        return hashlib.sha256(repr((self.path, self.nbytes, paths, placements)).encode()).hexdigest()[:16]

    def is_current(self) -> bool:
        return not self.is_committed or super().is_current()

    @torch.inference_mode(False)
    def pack(self, *, in_place: bool = True, bar: Bar = SILENT) -> None:
        """Take this rank's share of the leaves, which stay as they are until `commit`.

        Raises:
            CheckpointError: a file can't be read or was changed.
            RuntimeError: the leaves were changed while they were withheld.
            TypeError, ValueError: a leaf can't be packed (`require_plain`).
        """
        if self.is_committed:
            raise RuntimeError(changed_message(self.path))
        self._leaves = self.find()
        if self._whole is not None:
            self._whole.pack()
            self._leaves = self._whole.find()
        for leaf in self._leaves:
            if self._whole is None or not is_withheld(leaf.tensor):
                require_plain(leaf)
        tensors = [leaf.tensor for leaf in self._leaves]
        placements, nbytes = place_apart(tensors)
        self.sharding = self._share(nbytes)
        if self._buffer is not None:
            self._buffer.unpin()
        self._buffer = HostBuffer(self.sharding.shard_nbytes, self._platform, self._budget, bar=bar)
        rank, ranks = self.sharding.rank, self.sharding.ranks
        own = following = 0
        for shard_start, start, size in self.sharding.pieces(rank):
            piece = self._buffer.bytes[shard_start : shard_start + size]
            self._read(placements, tensors, piece, start)
            own = zlib.crc32(piece.numpy().data, own)
        for _, start, size in self.sharding.pieces((rank + 1) % ranks):
            piece = torch.zeros(size, dtype=torch.uint8)
            self._read(placements, tensors, piece, start)
            following = zlib.crc32(piece.numpy().data, following)
        self.checksums = (own, following)
        self._know(self._leaves, placements, nbytes, [])

    def commit(self) -> None:
        """Let the leaves' bytes go: this rank has its share, and all ranks have theirs."""
        for leaf in self._leaves:
            withhold(leaf.tensor, withheld_message(leaf.path))
        self._whole = None
        self._know(self._leaves, self._placements, self.nbytes, [])
        self._watch(self._leaves)
        self.is_committed = True

    def restore(self, buffer: torch.Tensor) -> None:
        """Give the leaves their bytes back, each in memory of its own.

        Args:
            buffer: uint8 of at least `nbytes`, on the device: the whole block, gathered.
        """
        for tensor, p in zip(self.tensors, self._placements, strict=True):
            with torch.inference_mode(False):
                data = torch.empty(p.nbytes, dtype=torch.uint8)
                data.copy_(buffer[p.offset : p.offset + p.nbytes])
            give_back(tensor, view_in_mode(tensor, data, p))
        self._withheld, self._snapshot, self.is_committed = [], None, False
        self._know(self._leaves, self._placements, self.nbytes, [])

    def take_home(self, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> bool:
        if self.is_committed and any(tensor is other for other in self.tensors):
            raise RuntimeError(changed_message(self._paths[id(tensor)]))
        return False

    def realize(self) -> None:
        """Raises RuntimeError if only a share is here: one rank alone can't."""
        if self.is_committed:
            raise RuntimeError(changed_message(self.path))

    def release(self) -> None:
        """Unlock the share. Leaves that weren't restored stay withheld, and are lost."""
        self._bindings.clear()
        if self._buffer is not None:
            self._buffer.unpin()
        if self.is_committed:
            for tensor in self._withheld:
                withhold(tensor, _lost_message(self._paths[id(tensor)]))

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def _read(
        self, placements: Sequence[Placement], tensors: Sequence[torch.Tensor], target: torch.Tensor, start: int
    ) -> None:
        """Bytes [start, start + target.numel()) of the packed block."""
        if self._whole is not None:
            self._whole.read_into(target, start)
            return
        stop = start + target.numel()
        for tensor, p in zip(tensors, placements, strict=True):
            first, last = max(start, p.offset), min(stop, p.offset + p.nbytes)
            if first < last:
                target[first - start : last - start].copy_(_bytes_of(tensor)[first - p.offset : last - p.offset])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's span with zeros in its gaps, whatever is there: ranks compare it."""
    if span_nbytes(tensor) <= tensor.numel() * tensor.element_size():
        return span_bytes(tensor)
    clean = torch.zeros(span_nbytes(tensor), dtype=torch.uint8, device=tensor.device)
    clean.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())
    return clean


def withheld_message(path: str) -> str:
    """What to say to those who read a sharded weight between forwards."""
    return (
        f"{path} isn't here: each rank holds a share of it. `with pipe.omni_offload.gather():`, entered by all ranks, "
        "brings the weights to this host for reading, saving, casting or LoRA; so does disable_omni_offload() for good."
    )


def changed_message(path: str) -> str:
    """What to say of a sharded block whose leaves were added to, replaced or written to."""
    return (
        f"{path} was changed while each rank holds a share of it only. Change weights inside of "
        "`with pipe.omni_offload.gather():`, entered by all ranks, which divides them anew at its end."
    )


def _lost_message(path: str) -> str:
    return (
        f"{path} is lost on this rank: its weights were divided among ranks, and the others couldn't be asked for "
        "theirs any more. Start the processes anew."
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
