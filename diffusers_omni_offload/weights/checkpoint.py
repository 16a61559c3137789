"""Safetensors files that weights are read from while a pipeline runs: open, checked, and never trusted to stay the
same."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffusers_omni_offload.weights.header import CheckpointError, read_header
from diffusers_omni_offload.weights.pagemap import PAGE, why_unknown, written

__all__ = ["WEIGHT_NAMES", "Checkpoint", "CheckpointError", "CheckpointFile", "Entry"]

#: What diffusers and transformers call the file of a model's weights.
WEIGHT_NAMES = ("diffusion_pytorch_model", "model")

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")

#: Python learned this name in 3.12. Without it a mapping that is larger than the host's memory might be refused.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: bytes [start, start + nbytes), counted from the file's beginning."""

    key: str
    file: CheckpointFile = field(repr=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class CheckpointFile:
    """An open safetensors file: what is in it, reads that can't be short, and a private (copy-on-write) mapping.

    Args:
        path: the file.

    Attributes:
        entries: its tensors by key, in the order of their bytes.
        nbytes: size of the file.

    Raises:
        CheckpointError: it can't be opened, or its header can't be true; or the system lacks what is needed here.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        _require_supported(self.path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be opened: {error.strerror}.") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._mapping: mmap.mmap | None = None
        self._address = 0
        status = os.fstat(self._descriptor)
        self.nbytes, self._modified = status.st_size, status.st_mtime_ns
        try:
            header = read_header(self._descriptor, self.path, self.nbytes)
        except BaseException:
            self._close()
            raise
        self.entries: dict[str, Entry] = {
            tensor.key: Entry(tensor.key, self, tensor.dtype, tensor.shape, tensor.start, tensor.nbytes)
            for tensor in header
        }

    def __repr__(self) -> str:
        return f"CheckpointFile({str(self.path)!r})"

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing can be read any more. The mapping goes with the last view of it."""
        self._close()
        self._mapping = None

    def require_unchanged(self) -> None:
        """CheckpointError if the file's size or modification time isn't what it was when the file was opened."""
        if not self._close.alive:
            raise CheckpointError(f"{self.path} was closed; load the pipeline anew to read from it.")
        status = os.fstat(self._descriptor)
        if status.st_size != self.nbytes:
            raise CheckpointError(
                f"{self.path} was changed since it was opened: it had {self.nbytes} bytes and has {status.st_size}. "
                "Put it back and load the pipeline anew."
            )
        if status.st_mtime_ns != self._modified:
            raise CheckpointError(
                f"{self.path} was written to since it was opened (its modification time is another). Load the pipeline "
                "anew."
            )

    def read(self, start: int, targets: Sequence[memoryview]) -> None:
        """Read consecutive bytes, from `start` on, into one buffer after the other. Any thread; the GIL is released.

        Args:
            start: offset in the file.
            targets: writable buffers of single bytes.

        Raises:
            CheckpointError: the file changed, or ends too early; what is in the targets then isn't to be used.
        """
        self.require_unchanged()
        pending = list(targets)
        while pending:
            if not pending[0].nbytes:
                del pending[0]
                continue
            try:
                count = os.preadv(self._descriptor, pending[:_MOST_BUFFERS], start)
            except OSError as error:
                raise CheckpointError(f"{self.path} can't be read at byte {start}: {error.strerror}.") from error
            if count == 0:
                self.require_unchanged()
                raise CheckpointError(f"{self.path} ends at byte {start}, where more was expected; fetch it anew.")
            start += count
            while pending and count >= pending[0].nbytes:
                count -= pending.pop(0).nbytes
            if count:
                pending[0] = pending[0][count:]
        self.require_unchanged()

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes [start, start + nbytes) of the mapping: uint8 of shape (nbytes,), with a storage of its own.

        Writing to it copies pages for this process; the file stays as it is.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None:
            self.require_unchanged()
            self._mapping = mmap.mmap(
                self._descriptor,
                self.nbytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
            self._address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=start)

    def map_shared(self) -> mmap.mmap:
        """Another mapping, of the page cache's own pages: what other processes have in memory as well. Read-only.

        Raises:
            CheckpointError: the file was changed.
        """
        self.require_unchanged()
        try:
            return mmap.mmap(self._descriptor, self.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} can't be mapped: {error}.") from error

    def is_viewed_by(self, tensor: torch.Tensor, start: int) -> bool:
        """Whether the tensor's data begins where byte `start` is mapped."""
        return self._mapping is not None and tensor.data_ptr() == self._address + start

    def edited(self, ranges: Sequence[tuple[int, int]]) -> list[bool]:
        """For each byte range (start, nbytes): whether a page of it was written to through a view.

        A range may be called edited because a neighbour on its first or last page was; never the other way round.
        """
        if self._mapping is None or not ranges:
            return [False] * len(ranges)
        first, last = min(start for start, _ in ranges), max(start + nbytes for start, nbytes in ranges)
        regions = written(self._address + _page_down(first), self._address + _page_up(last))
        stops = [stop - self._address for _, stop in regions]
        starts = [start - self._address for start, _ in regions]
        answers = []
        for start, nbytes in ranges:
            # The first region that ends behind the range's beginning.
            index = bisect_left(stops, _page_down(start) + 1)
            answers.append(bool(nbytes) and index < len(starts) and starts[index] < _page_up(start + nbytes))
        return answers

    def forget_edits(self, start: int, nbytes: int) -> None:
        """Give private copies of the pages that lie wholly inside of a byte range back; they show the file again."""
        first, last = _page_up(start), _page_down(start + nbytes)
        if self._mapping is not None and last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


class Checkpoint:
    """The weights of one model in one or more files.

    Attributes:
        entries: the tensors of all files by key.
        files: the files, in the order of their names.
        nbytes: size of all tensors.
    """

    def __init__(self, files: Sequence[CheckpointFile]) -> None:
        self.files = tuple(files)
        self.entries: Mapping[str, Entry] = {key: entry for file in files for key, entry in file.entries.items()}
        self.nbytes = sum(entry.nbytes for entry in self.entries.values())

    @classmethod
    def find(cls, folder: Path, *, variant: str | None = None, names: Sequence[str] = WEIGHT_NAMES) -> Checkpoint:
        """The checkpoint in a folder, as diffusers and transformers write it: with an index, or one file.

        Args:
            folder: where it lies.
            variant: "fp16" for `diffusion_pytorch_model.fp16.safetensors` and the like.
            names: what the files may be called; the first that is there is taken.

        Raises:
            CheckpointError: there is none, its index and its files contradict each other, or a file is damaged.
        """
        folder = Path(folder)
        for name in names:
            for index in _index_names(name, variant):
                if (folder / index).is_file():
                    return cls._indexed(folder, folder / index)
            if (folder / _single_name(name, variant)).is_file():
                return cls([CheckpointFile(folder / _single_name(name, variant))])
        wanted = " or ".join(_single_name(name, variant) for name in names)
        shards = sorted(file.name for name in names for file in folder.glob(f"{name}*-of-*.safetensors"))
        if shards:
            index = " or ".join(_index_names(name, variant)[0] for name in names)
            raise CheckpointError(f"{folder} has {len(shards)} shards ({shards[0]} ...) but no {index}; fetch it too.")
        raise CheckpointError(f"{folder} has no {wanted}, and no index of shards with that name.")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; mappings go with the last views of them."""
        for file in self.files:
            file.close()

    @classmethod
    def _indexed(cls, folder: Path, index: Path) -> Checkpoint:
        places = _weight_map(index)
        names = sorted(set(places.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(
                    f"{index} names the file {name!r}, which isn't in the same folder; fetch it anew."
                )
            if not (folder / name).is_file():
                raise CheckpointError(f"{index} names the file {name}, but {folder} has none; fetch it too.")
        checkpoint = cls([CheckpointFile(folder / name) for name in names])
        for file in checkpoint.files:
            expected = {key for key, name in places.items() if name == file.path.name}
            for key in sorted(expected ^ file.entries.keys()):
                problem = "says that it has" if key in expected else "doesn't say that it has"
                found = "it hasn't" if key in expected else "it has"
                checkpoint.close()
                raise CheckpointError(f"{file.path}: {index.name} {problem} {key!r}, but {found}; fetch both anew.")
        return checkpoint


def variants_in(folder: Path, names: Sequence[str] = WEIGHT_NAMES) -> Iterator[tuple[str, str | None]]:
    """The checkpoints that a folder seems to have: (name, variant), for `Checkpoint.find`."""
    seen: set[tuple[str, str | None]] = set()
    for file in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
        for name in names:
            rest = file.name.removeprefix(name + ".")
            if rest == file.name:
                continue
            words = set(rest.split("."))
            others = words - {"safetensors", "index", "json"}
            if "safetensors" not in words or len(others) > 1 or any("-of-" in word for word in others):
                continue
            found = (name, next(iter(others), None))
            if found not in seen:
                seen.add(found)
                yield found


def _single_name(name: str, variant: str | None) -> str:
    return f"{name}.{variant}.safetensors" if variant else f"{name}.safetensors"


def _index_names(name: str, variant: str | None) -> tuple[str, ...]:
    """As it is written today, and as diffusers once did it."""
    if variant is None:
        return (f"{name}.safetensors.index.json",)
    return (f"{name}.safetensors.index.{variant}.json", f"{name}.safetensors.{variant}.index.json")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} can't be read ({error}); fetch it anew.") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no `weight_map` from keys to files; fetch it anew.")
    return places


def _require_supported(path: Path) -> None:
    why = why_unknown() if hasattr(os, "preadv") else "this system has no preadv; Linux does"
    if why is not None:
        raise CheckpointError(f"{path} can't serve as the source of weights: {why}. Load the weights the ordinary way.")


def _page_down(offset: int) -> int:
    return offset // PAGE * PAGE


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
