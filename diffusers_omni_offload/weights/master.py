"""The authoritative host copy of a block: every leaf in one buffer, which the leaves themselves are views of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from diffusers_omni_offload.platform import Platform, return_freed_host_memory
from diffusers_omni_offload.weights.kinds import wrappers_of
from diffusers_omni_offload.weights.leaves import Layout, Leaf, Placement, plainly, require_plain
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget
from diffusers_omni_offload.weights.snapshot import Snapshot

#: Freed heap memory goes back to the system whenever so many bytes were packed.
_TRIM_BYTES = 32 << 20

_Binding = list[tuple[torch.Tensor, torch.Tensor]]


class Master:
    """The packed host copy of some leaves; `pack` makes it.

    Between forwards the leaves are views of the host buffer, so reading or editing them reads or edits the truth;
    inside a forward `bind` makes them views of a slot.

    Args:
        find: returns the leaves as the modules hold them now; called again by each `pack`.
        roots: the modules below which leaves may come, go or be replaced.
        path: dotted path for messages.
        platform: where the copies go to.
        budget: what may be page-locked.

    Attributes:
        nbytes: size of the packed leaves in bytes.
        tensors: the leaves, as the objects that the modules hold.
    """

    def __init__(
        self,
        find: Callable[[], list[Leaf]],
        roots: Sequence[nn.Module],
        path: str,
        platform: Platform,
        budget: PinnedBudget,
    ) -> None:
        self.path = path
        self.find, self._roots = find, roots
        self._platform, self._budget = platform, budget
        self._buffer: HostBuffer | None = None
        self.nbytes = 0
        self.tensors: list[torch.Tensor] = []
        self._bindings: dict[int, _Binding] = {}
        self._wrappers: list[torch.Tensor] = []
        self._plainly = plainly([])
        self._is_disjoint = False
        self._snapshot: Snapshot | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the host buffer is page-locked."""
        return self._buffer is not None and self._buffer.is_pinned

    @property
    def host(self) -> torch.Tensor:
        """The packed bytes: uint8, shape (nbytes,)."""
        assert self._buffer is not None
        return self._buffer.bytes

    def is_current(self) -> bool:
        """Whether the modules still hold these leaves, and the leaves these bytes."""
        return self._snapshot is not None and self._snapshot.is_current()

    @torch.inference_mode(False)
    def pack(self, *, in_place: bool = True) -> None:
        """Take the leaves as they are now; what is new or was replaced is read from where it is.

        Args:
            in_place: whether bytes that are there may be overwritten, where the geometry stayed.

        Raises:
            TypeError, ValueError: a leaf can't be packed (`require_plain`); nothing was changed.
        """
        leaves = self.find()
        for leaf in leaves:
            require_plain(leaf)
        self._plainly = plainly(leaf.tensor for leaf in leaves)
        with self._plainly():
            if not in_place or not self._take_in_place([leaf.tensor for leaf in leaves]):
                self._take_anew(leaves)
        modules = [module for root in self._roots for module in root.modules()]
        self._wrappers = [weight for module in modules for weight in wrappers_of(module).values()]
        self._snapshot = Snapshot(modules, leaves)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data begins in the host buffer."""
        first = self.host.data_ptr()
        return first <= tensor.data_ptr() < first + self.nbytes

    def take_home(self, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> bool:
        """Copy a leaf's bytes, which were elsewhere for a while, to their place in the host buffer.

        Args:
            tensor: the leaf.
            buffer: a buffer that is loaded with this master, and gets the bytes as well.

        Returns:
            Whether they fit there; if not, nothing is done.
        """
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

    def views_on(self, buffer: torch.Tensor) -> _Binding:
        """The leaves paired with their views of `buffer`, a uint8 tensor of at least `nbytes`; made once a buffer."""
        binding = self._bindings.get(id(buffer))
        if binding is None:
            with torch.inference_mode(False):
                binding = self._bindings[id(buffer)] = [
                    (tensor, self._view_in_mode(tensor, buffer[p.offset : p.offset + p.nbytes], p))
                    for tensor, p in zip(self.tensors, self._placements, strict=True)
                ]
        return binding

    def forget_views(self) -> None:
        """Drop the views of buffers that are given back."""
        self._bindings.clear()

    def bind(self, buffer: torch.Tensor) -> None:
        """Make the leaves views of `buffer`."""
        binding = self.views_on(buffer)
        with self._plainly():
            for tensor, view in binding:
                tensor.data = view

    def unbind(self) -> None:
        """Make the leaves views of the host buffer."""
        with self._plainly():
            for tensor, view in self._host_binding:
                tensor.data = view

    def versions(self) -> list[int]:
        """A number for each leaf that grows when it is written to in place."""
        return [tensor._version for tensor in self._tracked]

    def written_leaf(self, versions: Sequence[int]) -> str | None:
        """The path of the first leaf written to since `versions` were read."""
        if versions == self.versions():
            return None
        for tensor, before in zip(self._tracked, versions, strict=True):
            if tensor._version != before:
                return self._paths[id(tensor)]
        return None

    def replaced_leaf(self, buffer: torch.Tensor) -> str | None:
        """The path of the first leaf that isn't the view of `buffer` any more that `bind` made it, and differs from it.

        Layerwise casting puts an equal tensor in a leaf's place; that is lost without loss. Nor is a cast a difference.
        """
        with self._plainly():
            for tensor, view in self.views_on(buffer):
                if tensor.data_ptr() != view.data_ptr() and not _same_bytes(tensor.data, view.to(tensor.dtype)):
                    return self._paths[id(tensor)]
        return None

    def casts(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The leaves that a forward has cast since `bind`, for good, and to what."""
        with self._plainly():
            return [(tensor, tensor.dtype) for tensor, view in self.views_on(buffer) if tensor.dtype != view.dtype]

    def changed_leaf(self) -> str | None:
        """The path of the first leaf that came, or got other data, since the leaves were packed."""
        known = {id(tensor): view for tensor, view in self._host_binding}
        for leaf in self.find():
            view = known.get(id(leaf.tensor))
            if view is None or leaf.tensor.data_ptr() != view.data_ptr():
                return leaf.path
        return None

    def attribute_where(self, test: Callable[[torch.Tensor], bool]) -> str | None:
        """The path of the first plain tensor attribute below the roots for which `test` holds."""
        for root in self._roots:
            for path, module in root.named_modules(prefix=self.path):
                for name, value in vars(module).items():
                    if isinstance(value, torch.Tensor) and test(value):
                        return f"{path}.{name}"
        return None

    def requires_grad(self) -> bool:
        """Whether any weight asks for a gradient."""
        return any([tensor.requires_grad for tensor in (*self.tensors, *self._wrappers)])

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
            for (tensor, view), p in zip(self._host_binding, self._placements, strict=True)
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

    def _take_anew(self, leaves: list[Leaf]) -> None:
        """Pack the leaves into a buffer of their own."""
        tensors = [leaf.tensor for leaf in leaves]
        layout = Layout(tensors)
        if self._buffer is not None:
            # Between calls no copy is under way; the new buffer may need the budget of the old one.
            self._buffer.unpin()
        # Locking a page makes it real, so the lock comes when the old bytes are gone.
        buffer = HostBuffer(layout.nbytes, self._platform, self._budget, pin=False)
        binding = [
            (tensor, self._view_in_mode(tensor, buffer.view(p.offset, p.nbytes), p))
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
            if freed > _TRIM_BYTES:
                freed = 0
                return_freed_host_memory()

        layout.copy_to(buffer.bytes, arrived)
        buffer.pin()
        self.tensors, self._placements, self._host_binding = tensors, layout.placements, binding
        self._tracked = [tensor for tensor in tensors if not tensor.is_inference()]
        self._places = {id(tensor): (view, p) for (tensor, view), p in zip(binding, layout.placements, strict=True)}
        self._paths = {id(leaf.tensor): leaf.path for leaf in leaves}
        self._bindings, self._is_disjoint = {}, layout.is_disjoint
        self.nbytes, self._buffer = layout.nbytes, buffer
        self.unbind()

    @staticmethod
    def _view_in_mode(tensor: torch.Tensor, source: torch.Tensor, placement: Placement) -> torch.Tensor:
        # An inference tensor takes only inference data, a normal one only normal data.
        with torch.inference_mode(tensor.is_inference()):
            return placement.view(source)


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape or tensor.device != other.device:
        return False
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
