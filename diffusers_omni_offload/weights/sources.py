"""Where the bytes of a weight, and of a packed block, lie in files; any range of them can be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from diffusers_omni_offload.weights.checkpoint import CheckpointFile

#: So many bytes are read at once of what is cast or compared.
_CHUNK_BYTES = 4 << 20


class Segment(NamedTuple):
    """Bytes [start, start + nbytes) of a file."""

    file: CheckpointFile
    start: int
    nbytes: int


class _Piece(NamedTuple):
    """A segment, or a part of one, and its offset in what is being read."""

    segment: Segment
    offset: int

    def clipped(self, start: int, stop: int) -> _Piece | None:
        """What of it lies in [start, stop), with the offset counted from `start`."""
        first, last = max(self.offset, start), min(self.offset + self.segment.nbytes, stop)
        if first >= last:
            return None
        file, begin, _ = self.segment
        return _Piece(Segment(file, begin + first - self.offset, last - first), first - start)


@dataclass(frozen=True)
class LeafSource:
    """Where a leaf's bytes are.

    Attributes:
        segments: what makes up the stored form, in order.
        stored_dtype: what the file has.
        dtype: what the leaf has; the stored values are cast to it while they are read.
        shape: of the leaf.
    """

    segments: tuple[Segment, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    shape: torch.Size

    @property
    def is_cast(self) -> bool:
        """Whether the file has another dtype than the leaf."""
        return self.stored_dtype != self.dtype

    @property
    def nbytes(self) -> int:
        """Size of the leaf."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """The files that are read."""
        return tuple(dict.fromkeys(segment.file for segment in self.segments))

    def require_unchanged(self) -> None:
        """CheckpointError if a file was changed since it was opened."""
        for file in self.files:
            file.require_unchanged()

    def view(self) -> torch.Tensor | None:
        """The leaf as a view of the mapped file; None if it has to be cast or put together, or isn't aligned there."""
        if self.is_cast or len(self.segments) > 1:
            return None
        with torch.inference_mode(False):
            if not self.segments:
                return torch.empty(self.shape, dtype=self.dtype)
            ((file, start, nbytes),) = self.segments
            if start % self.dtype.itemsize:
                return None
            return file.view(start, nbytes).view(self.dtype).view(self.shape)

    def read(self) -> torch.Tensor:
        """The leaf, read into memory of its own. CheckpointError if that fails."""
        with torch.inference_mode(False):
            flat = torch.empty(self.nbytes, dtype=torch.uint8)
            self.read_into(flat)
            return flat.view(self.dtype).view(self.shape)

    def read_into(self, target: torch.Tensor, start: int = 0) -> None:
        """Read bytes [start, start + target.numel()) of the leaf. Any thread.

        Args:
            target: uint8, in host memory and contiguous.
            start: offset in the leaf's bytes.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        if self.is_cast:
            self._cast_into(_plain(target), start)
        else:
            _read(_clipped(self._pieces(), start, start + target.numel()), target)

    def _pieces(self, offset: int = 0) -> Iterator[_Piece]:
        for segment in self.segments:
            yield _Piece(segment, offset)
            offset += segment.nbytes

    def _cast_into(self, target: torch.Tensor, start: int) -> None:
        size, stored_size = self.dtype.itemsize, self.stored_dtype.itemsize
        stop = start + target.numel()
        step = _CHUNK_BYTES // stored_size
        pieces = list(self._pieces())
        stored = torch.empty(min(step, -(-stop // size) - start // size) * stored_size, dtype=torch.uint8)
        for first in range(start // size, -(-stop // size), step):
            last = min(first + step, -(-stop // size))
            chunk = stored[: (last - first) * stored_size]
            _read(_clipped(pieces, first * stored_size, last * stored_size), chunk)
            # A range may begin or end inside of an element.
            values = chunk.view(self.stored_dtype).to(self.dtype).view(torch.uint8)
            begin, end = max(start, first * size), min(stop, last * size)
            target[begin - start : end - start].copy_(values[begin - first * size : end - first * size])


class BlockSource:
    """The bytes of a packed block.

    Args:
        leaves: (offset in the packed block, where the leaf's bytes are): in files, or in a tensor in host memory for
            what no file has (non-persistent buffers). What lies between leaves is padding, and left as it is.
        nbytes: size of the packed block.
    """

    def __init__(self, leaves: Iterable[tuple[int, LeafSource | torch.Tensor]], nbytes: int) -> None:
        self.leaves = tuple(leaves)
        self.nbytes = nbytes
        sources = [source for _, source in self.leaves if isinstance(source, LeafSource)]
        self.files = tuple(dict.fromkeys(file for source in sources for file in source.files))
        self._kept = [(offset, tensor) for offset, tensor in self.leaves if isinstance(tensor, torch.Tensor)]
        self._casts = [(o, source) for o, source in self.leaves if isinstance(source, LeafSource) and source.is_cast]
        self._pieces = [
            piece
            for offset, source in self.leaves
            if isinstance(source, LeafSource) and not source.is_cast
            for piece in source._pieces(offset)
        ]

    def require_unchanged(self) -> None:
        """CheckpointError if a file was changed since it was opened."""
        for file in self.files:
            file.require_unchanged()

    def read_into(self, target: torch.Tensor, start: int = 0) -> None:
        """Read bytes [start, start + target.numel()) of the packed block. Any thread.

        Args:
            target: uint8, in host memory and contiguous.
            start: offset in the packed block.

        Raises:
            CheckpointError: a file can't be read or was changed; what is in the target then isn't to be used.
        """
        stop = start + target.numel()
        _read(_clipped(self._pieces, start, stop), target)
        for offset, nbytes, source in self._other():
            first, last = max(offset, start), min(offset + nbytes, stop)
            if first < last:
                part = target[first - start : last - start]
                if isinstance(source, LeafSource):
                    source.read_into(part, first - offset)
                else:
                    _plain(part).copy_(bytes_of(source)[first - offset : last - offset])

    def _other(self) -> Iterator[tuple[int, int, LeafSource | torch.Tensor]]:
        for offset, source in self._casts:
            yield offset, source.nbytes, source
        for offset, tensor in self._kept:
            yield offset, tensor.numel() * tensor.element_size(), tensor


def same_bytes(tensor: torch.Tensor, source: LeafSource) -> bool:
    """Whether a tensor in host memory holds exactly what its source has.

    A view of the mapping is asked for edits, which costs nothing; another tensor is compared, a chunk at a time.
    CheckpointError if a file can't be read or was changed.
    """
    if (tensor.dtype, tensor.shape) != (source.dtype, source.shape) or not tensor.is_contiguous():
        return False
    if not source.is_cast and len(source.segments) == 1:
        ((file, start, nbytes),) = source.segments
        if file.is_viewed_by(tensor, start):
            file.require_unchanged()
            if file.edited([(start, nbytes)]) == [False]:
                return True
    found = bytes_of(tensor)
    expected = torch.empty(min(_CHUNK_BYTES, found.numel()), dtype=torch.uint8)
    for start in range(0, found.numel(), _CHUNK_BYTES):
        part = found[start : start + _CHUNK_BYTES]
        source.read_into(expected[: part.numel()], start)
        if not torch.equal(part, expected[: part.numel()]):
            return False
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes: uint8, of the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _clipped(pieces: Iterable[_Piece], start: int, stop: int) -> list[_Piece]:
    clipped = (piece.clipped(start, stop) for piece in pieces)
    return [piece for piece in clipped if piece is not None]


def _read(pieces: Sequence[_Piece], target: torch.Tensor) -> None:
    """Read pieces to their offsets in `target`; those that follow each other in a file in one go."""
    if not pieces:
        return
    memory = memoryview(target.numpy())  # type: ignore[arg-type]
    ordered = sorted(pieces, key=lambda piece: (id(piece.segment.file), piece.segment.start))
    buffers: list[memoryview] = []
    file, begin, end = ordered[0].segment.file, 0, -1
    for (next_file, start, nbytes), offset in ordered:
        if next_file is not file or start != end:
            if buffers:
                file.read(begin, buffers)
            file, begin, end, buffers = next_file, start, start, []
        buffers.append(memory[offset : offset + nbytes])
        end += nbytes
    file.read(begin, buffers)


def _plain(target: torch.Tensor) -> torch.Tensor:
    """The same memory, writable in any mode: a thread of its own isn't in the inference mode of whoever made it."""
    return torch.from_numpy(target.numpy())
