"""The plain tensors that hold a module's bytes, and how they lie in one packed buffer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.weights.kinds import PLAIN_TYPES, parts_of, why_refused
from diffusers_omni_offload.weights.withheld import is_withheld

#: Every packed leaf starts at a multiple of this many bytes: enough for any kernel's vector loads.
ALIGNMENT = 256


_DISABLED: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def plainly(tensors: Iterable[torch.Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which subclasses among `tensors` are handled as the plain tensors that they are.

    That is also ten times as fast. Where there are none they do nothing, since what an interrupt leaves of one is felt
    everywhere.
    """
    return _DISABLED if any([type(tensor) not in PLAIN_TYPES for tensor in tensors]) else nullcontext


#: Allocators of devices give multiples of so many bytes.
_ALLOCATION_NBYTES = 512


def allocated_nbytes(nbytes: int) -> int:
    """What a device's allocator counts for `nbytes`."""
    return -(-nbytes // _ALLOCATION_NBYTES) * _ALLOCATION_NBYTES


@dataclass(frozen=True)
class Leaf:
    """A plain tensor that holds bytes: a parameter, a buffer, or a part of a quantized one.

    Attributes:
        tensor: the tensor.
        path: the first path that it was found under.
        holder: the object that has a part as the attribute `attribute`; None for one in a module's own tables.
        attribute: see there.
    """

    tensor: torch.Tensor
    path: str
    holder: Any = None
    attribute: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.tensor.numel() * self.tensor.element_size()


def find_leaves(module: nn.Module, path: str, exclude: AbstractSet[int] = frozenset()) -> list[Leaf]:
    """The leaves below `module`, each object once, in registration order.

    Args:
        module: where to look.
        path: the module's own dotted path, for messages.
        exclude: `id` of tensors to leave out.
    """
    return distinct_leaves(module.named_modules(prefix=path), exclude)


def distinct_leaves(modules: Iterable[tuple[str, nn.Module]], exclude: AbstractSet[int] = frozenset()) -> list[Leaf]:
    """The leaves that these modules, given with their paths, hold themselves; each object once."""
    seen = set(exclude)
    leaves = []
    for path, module in modules:
        for tensor, name, holder, attribute in parts_of(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                leaves.append(Leaf(tensor, f"{path}.{name}" if path else name, holder, attribute))
    return leaves


def is_plain(leaf: Leaf) -> bool:
    """Whether all of the leaf's bytes are in its own storage."""
    return why_refused(leaf.tensor) is None


def require_plain(leaf: Leaf) -> None:
    """Refuse a tensor whose bytes aren't all in its own storage.

    Raises:
        TypeError: the tensor is of a subclass that isn't known, not strided, or a conjugated or negated view.
        ValueError: the tensor is on the meta device.
    """
    tensor = leaf.tensor
    why = why_refused(tensor)
    if why is not None:
        kind = type(tensor).__name__ if type(tensor) not in PLAIN_TYPES else f"{tensor.layout} tensor"
        raise TypeError(f"{leaf.path} is a {kind}, and can't be offloaded: it {why}, or leave it out of `components`.")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            f"{leaf.path} is a conjugated or negated view, whose bytes aren't its values. Replace it by "
            ".resolve_conj().resolve_neg() before enabling."
        )
    if tensor.is_meta:
        raise ValueError(
            f"{leaf.path} is on the meta device and has no weights: load the component's weights before enabling."
        )


@dataclass(frozen=True)
class Placement:
    """Where a leaf lies in the packed buffer: bytes [offset, offset + nbytes), read with this dtype and geometry."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, source: torch.Tensor) -> torch.Tensor:
        """The leaf in `source`, the uint8 tensor of exactly its bytes."""
        flat = source.view(self.dtype)
        return flat.as_strided(self.shape, self.stride) if self.nbytes else flat.view(self.shape)


@dataclass(frozen=True)
class _Span:
    """Bytes [start, stop) of a storage that the `members`, indices of leaves, read; the offset they get when packed."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    offset: int
    members: list[int]

    def bytes(self) -> torch.Tensor:
        device = self.storage.device
        source = torch.empty(0, dtype=torch.uint8, device=device)
        return source.set_(self.storage, self.start, (self.stop - self.start,), (1,))


class Layout:
    """The packed form of some tensors: strides are kept, and tensors that overlap in memory still do.

    Attributes:
        placements: one for each tensor, in order.
        nbytes: size of the packed buffer.
        is_disjoint: whether no two tensors share bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        extents = [extent(tensor) for tensor in tensors]
        spans: dict[int, list[_Span]] = {}
        offset = 0
        for storage, start, stop in _merge(extents):
            spans.setdefault(storage.data_ptr(), []).append(_Span(storage, start, stop, offset, []))
            offset += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset
        self._spans = [span for group in spans.values() for span in group]
        stored = sum(1 for _, start, stop in extents if stop > start)
        self.is_disjoint = len(self._spans) == stored
        self.placements: list[Placement] = []
        for index, (tensor, (storage, start, stop)) in enumerate(zip(tensors, extents, strict=True)):
            packed = 0
            if stop > start:
                group = spans[storage.data_ptr()]
                # The spans of a storage are sorted and disjoint.
                span = group[bisect_right(group, start, key=lambda span: span.start) - 1]
                span.members.append(index)
                packed = span.offset + start - span.start
            self.placements.append(Placement(packed, stop - start, tensor.dtype, tensor.shape, tuple(tensor.stride())))

    def copy_to(self, buffer: torch.Tensor, arrived: Callable[[int], None] | None = None) -> None:
        """Copy every byte into `buffer`, a uint8 tensor of shape (nbytes,), and let the old storages go one by one, so
        that it can be done once.

        Args:
            buffer: where to.
            arrived: called with a tensor's index when its bytes are in the buffer.
        """
        self._spans.reverse()
        while self._spans:
            span = self._spans.pop()
            size = span.stop - span.start
            buffer[span.offset : span.offset + size].copy_(span.bytes())
            if arrived is not None:
                for index in span.members:
                    arrived(index)

    def forget_sources(self) -> None:
        """Drop the references to the storages that the tensors came from."""
        self._spans = []


def extent(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """The storage of `tensor` and the bytes [start, stop) of it that the tensor reads."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage(), start, start + span_nbytes(tensor)


def span_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last, gaps between them included. Reads no data."""
    if tensor.numel() == 0:
        return 0
    last = int(sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    return (last + 1) * tensor.element_size()


def span_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to its last: uint8 of shape (`span_nbytes`,), in the same memory."""
    storage, start, stop = extent(tensor)
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (stop - start,), (1,))


def place_apart(tensors: Sequence[torch.Tensor]) -> tuple[list[Placement], int]:
    """Where tensors lie in a packed buffer, each for itself and in order, and the buffer's size in bytes.

    It follows from shapes, strides and dtypes alone, so it is the same for the same weights in any process.
    """
    placements, offset = [], 0
    for tensor in tensors:
        nbytes = span_nbytes(tensor)
        placements.append(Placement(offset, nbytes, tensor.dtype, tensor.shape, tuple(tensor.stride())))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return placements, offset


def packed_nbytes(leaves: Sequence[Leaf]) -> int:
    """Size in bytes of the buffer that leaves are packed in, whether they have memory here or not."""
    tensors = [leaf.tensor for leaf in leaves]
    # Those without memory of their own share none.
    apart = [tensor for tensor in tensors if tensor.is_meta or is_withheld(tensor)]
    together = [tensor for tensor in tensors if not (tensor.is_meta or is_withheld(tensor))]
    return place_apart(apart)[1] + Layout(together).nbytes


def _merge(
    extents: Iterable[tuple[torch.UntypedStorage, int, int]],
) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    """Overlapping extents of one storage become one; their common start keeps every dtype aligned."""
    by_storage: dict[int, tuple[torch.UntypedStorage, set[tuple[int, int]]]] = {}
    for storage, start, stop in extents:
        if stop > start:
            by_storage.setdefault(storage.data_ptr(), (storage, set()))[1].add((start, stop))
    for storage, intervals in by_storage.values():
        merged: list[tuple[int, int, int]] = []
        for start, stop in sorted(intervals):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]), merged[-1][2] + 1)
            else:
                merged.append((start, stop, 1))
        for start, stop, count in merged:
            yield storage, start - start % 16 if count > 1 else start, stop


def rebind(tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
    """Give `tensor` the data of `make()`, made in the tensor's own mode: normal, or for inference only."""
    with torch.inference_mode(tensor.is_inference()), plainly([tensor])():
        tensor.data = make()


@torch.inference_mode(False)
def move_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Move tensors to `device` in place: identity, strides and shared storage are kept.

    Args:
        tensors: leaves; those that are there already, or are withheld, stay as they are.
        device: where to.
    """
    with plainly(tensors)():
        _move_tensors(tensors, device)


def _move_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    elsewhere = [tensor for tensor in tensors if not is_withheld(tensor) and tensor.device != device]
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in elsewhere:
        groups.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), []).append(tensor)
    for group in groups.values():
        layout = Layout(group)
        if any(tensor.is_conj() or tensor.is_neg() for tensor in group):
            for tensor in group:
                rebind(tensor, lambda tensor=tensor: tensor.data.to(device))  # type: ignore[misc]
            continue
        if layout.is_disjoint:
            layout.forget_sources()
            for tensor in group:
                rebind(tensor, lambda tensor=tensor: copy_with_strides(tensor, device))  # type: ignore[misc]
            continue
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        layout.copy_to(buffer)
        for tensor, placement in zip(group, layout.placements, strict=True):
            source = buffer[placement.offset : placement.offset + placement.nbytes]
            rebind(tensor, lambda source=source, placement=placement: placement.view(source))  # type: ignore[misc]


def cast_tensors(casts: Iterable[tuple[torch.Tensor, torch.dtype]]) -> None:
    """Cast each tensor in place to the dtype beside it."""
    for tensor, dtype in casts:
        rebind(tensor, lambda tensor=tensor, dtype=dtype: tensor.data.to(dtype))  # type: ignore[misc]


def move_back(homes: Sequence[tuple[torch.Tensor, torch.device]]) -> None:
    """Move each tensor to the device beside it."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor, device in homes:
        by_device.setdefault(device, []).append(tensor)
    for device, tensors in by_device.items():
        move_tensors(tensors, device)


def copy_with_strides(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of `tensor` on `device` with a storage of its own, of just its bytes."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if moved.numel():
        storage_view = Layout([tensor])
        target = torch.empty(0, dtype=torch.uint8, device=device)
        target.set_(moved.untyped_storage(), 0, (storage_view.placements[0].nbytes,), (1,))
        storage_view.copy_to(target)
    return moved
