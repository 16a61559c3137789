"""Masters in host memory: every leaf of a block in one buffer, which the leaves themselves are views of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from diffusers_omni_offload.host import return_freed_host_memory
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.progress import SILENT, Bar
from diffusers_omni_offload.weights.leaves import Layout, Leaf, Placement, plainly, require_plain
from diffusers_omni_offload.weights.master import Master, view_in_mode
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget

#: Freed heap memory goes back to the system whenever so many bytes were packed.
_TRIM_BYTES = 32 << 20


class PackedMaster(Master):
    """The packed host copy of some leaves.

    Between forwards the leaves are views of the host buffer, so reading or editing them reads or edits the truth.

    Args:
        find, roots, path: see `Master`.
        platform: where the copies go to.
        budget: what may be page-locked.
    """

    def __init__(
        self,
        find: Callable[[], list[Leaf]],
        roots: Sequence[nn.Module],
        path: str,
        platform: Platform,
        budget: PinnedBudget,
    ) -> None:
        super().__init__(find, roots, path)
        self._platform, self._budget = platform, budget
        self._buffer: HostBuffer | None = None
        self._places: dict[int, tuple[torch.Tensor, Placement]] = {}
        self._is_disjoint = False

    @property
    def is_pinned(self) -> bool:
        return self._buffer is not None and self._buffer.is_pinned

    @property
    def host(self) -> torch.Tensor:
        """The packed bytes: uint8, shape (nbytes,)."""
        assert self._buffer is not None
        return self._buffer.bytes

    @property
    def host_nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    @torch.inference_mode(False)
    def pack(self, *, in_place: bool = True, bar: Bar = SILENT) -> None:
        leaves = self.find()
        for leaf in leaves:
            require_plain(leaf)
        self._plainly = plainly(leaf.tensor for leaf in leaves)
        with self._plainly():
            if not in_place or not self._take_in_place([leaf.tensor for leaf in leaves]):
                self._take_anew(leaves, bar)
        self._watch(leaves)

    def holds(self, tensor: torch.Tensor) -> bool:
        if self._buffer is None:
            return False
        first = self.host.data_ptr()
        return first <= tensor.data_ptr() < first + self.nbytes

    def take_home(self, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> bool:
        if id(tensor) not in self._places:
            return False
        view, p = self._places[id(tensor)]
        with torch.inference_mode(False), torch.no_grad(), self._plainly():
            if (tensor.dtype, tensor.shape, tensor.stride()) != (p.dtype, p.shape, p.stride):
                return False
            if buffer is not None:
                p.view(buffer[p.offset : p.offset + p.nbytes]).copy_(tensor.data)
            if tensor.data_ptr() != view.data_ptr():
                self._write(tensor, view, p)
        return True

    def realize(self) -> None:
        """They are there."""

    def release(self) -> None:
        """Unlock the host buffer; the leaves stay views of it, ordinary CPU tensors."""
        self._bindings.clear()
        if self._buffer is not None:
            self._buffer.unpin()

    def _take_in_place(self, tensors: list[torch.Tensor]) -> bool:
        """Copy what was replaced into the bytes that are there, if it fits there; aliases of the rest stay true."""
        if self._buffer is None or list(map(id, tensors)) != list(map(id, self.tensors)):
            return False
        for tensor, p in zip(tensors, self._placements, strict=True):
            if (tensor.dtype, tensor.shape, tensor.stride()) != (p.dtype, p.shape, p.stride):
                return False
        changed = [
            (tensor, view, p)
            for (tensor, view), p in zip(self._at_rest, self._placements, strict=True)
            if tensor.data_ptr() != view.data_ptr()
        ]
        if not changed:
            return True
        sources = Layout([tensor for tensor, _, _ in changed])
        if not self._is_disjoint or not sources.is_disjoint or any(self.holds(tensor) for tensor, _, _ in changed):
            return False  # Data that was swapped or tied: what is written first may be what is read next.
        for tensor, view, p in changed:
            self._write(tensor, view, p)
        return True

    def _write(self, tensor: torch.Tensor, view: torch.Tensor, p: Placement) -> None:
        Layout([tensor]).copy_to(self.host[p.offset : p.offset + p.nbytes])
        tensor.data = view

    def _take_anew(self, leaves: list[Leaf], bar: Bar) -> None:
        """Pack the leaves into a buffer of their own."""
        tensors = [leaf.tensor for leaf in leaves]
        layout = Layout(tensors)
        if self._buffer is not None:
            # Between calls no copy is under way; the new buffer may need the budget of the old one.
            self._buffer.unpin()
        # Locking a page makes it real, so the lock comes when the old bytes are gone.
        buffer = HostBuffer(layout.nbytes, self._platform, self._budget, pin=False)
        binding = [
            (tensor, view_in_mode(tensor, buffer.view(p.offset, p.nbytes), p))
            for tensor, p in zip(tensors, layout.placements, strict=True)
        ]
        freed = 0

        def arrived(index: int) -> None:
            # Each leaf changes from one complete set of bytes to another, and lets the old ones go at once: the peak in
            # host memory is one leaf above the weights.
            nonlocal freed
            tensor, view = binding[index]
            tensor.data = view
            freed += layout.placements[index].nbytes
            bar.advance(layout.placements[index].nbytes)
            if freed > _TRIM_BYTES:
                freed = 0
                return_freed_host_memory()

        layout.copy_to(buffer.bytes, arrived)
        buffer.pin(bar)
        self._know(leaves, layout.placements, layout.nbytes, binding)
        self._places = {id(tensor): (view, p) for (tensor, view), p in zip(binding, layout.placements, strict=True)}
        self._is_disjoint, self._buffer = layout.is_disjoint, buffer
        self.unbind()
