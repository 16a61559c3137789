"""Masters whose bytes stay in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from diffusers_omni_offload.progress import SILENT, Bar
from diffusers_omni_offload.weights.checkpoint import CheckpointFile
from diffusers_omni_offload.weights.leaves import Leaf, copy_with_strides, place_apart, require_plain, span_bytes
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.sources import BlockSource, LeafSource
from diffusers_omni_offload.weights.withheld import give_back, is_withheld, withhold

Origin = tuple[torch.Tensor, LeafSource]
"""A weight, and where its bytes are."""


class MappedMaster(Master):
    """A block whose bytes are read from files for each load.

    At rest its leaves are views of the mapped files, which a write turns into private copies, page by page; what no
    view can give (a cast, a regrouping) is withheld. A leaf that was edited, replaced or added has bytes of its own in
    host memory from then on, and the rest of the block stays in the files.

    Args:
        find, roots, path: see `Master`.
        origins: `id` of a leaf -> the leaf, and where its bytes are. They are the same bytes, or it is withheld.
    """

    def __init__(
        self,
        find: Callable[[], list[Leaf]],
        roots: Sequence[nn.Module],
        path: str,
        origins: Mapping[int, Origin],
    ) -> None:
        super().__init__(find, roots, path)
        self._origins = dict(origins)
        self._views: dict[int, torch.Tensor] = {}
        self._left: list[tuple[torch.UntypedStorage, LeafSource]] = []
        self._ranges: dict[CheckpointFile, list[tuple[int, int, int]]] = {}
        self._source = BlockSource((), 0)

    @property
    def is_pinned(self) -> bool:
        return False

    @property
    def source(self) -> BlockSource:
        """Where the packed block's bytes are."""
        return self._source

    @property
    def host_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if id(tensor) not in self._origins)

    def is_current(self) -> bool:
        # A leaf that the modules don't hold any more may have been edited, too, and come back some day.
        return super().is_current() and self._edited().isdisjoint(map(id, self.tensors))

    def read_into(self, target: torch.Tensor, start: int = 0) -> None:
        """Read bytes [start, start + target.numel()) of the packed block into a uint8 CPU tensor; see `BlockSource`."""
        self._source.read_into(target, start)

    @torch.inference_mode(False)
    def pack(self, *, in_place: bool = True, bar: Bar = SILENT) -> None:
        """Take the leaves as they are now. No bytes are copied but those of leaves that aren't the files' any more.

        Raises:
            CheckpointError: a file was changed.
            TypeError, ValueError: a leaf can't be packed (`require_plain`); nothing was changed.
        """
        leaves = self.find()
        edited = self._edited()
        from_files = {id(leaf.tensor) for leaf in leaves if self._is_from_file(leaf.tensor, edited)}
        for leaf in leaves:
            if id(leaf.tensor) not in from_files:
                require_plain(leaf)
        for _, source in self._origins.values():
            source.require_unchanged()
        own: dict[int, torch.Tensor] = {}
        at_rest = []
        for leaf in leaves:
            tensor = leaf.tensor
            if id(tensor) in from_files:
                view = self._view(leaf)
            else:
                view = own[id(tensor)] = self._own(tensor)
            if view is not None:
                at_rest.append((tensor, view))
        placements, nbytes = place_apart([leaf.tensor for leaf in leaves])
        self._know(leaves, placements, nbytes, at_rest)
        self.unbind()
        parts: list[tuple[int, LeafSource | torch.Tensor]] = []
        for tensor, p in zip(self.tensors, placements, strict=True):
            is_own = id(tensor) in own
            parts.append((p.offset, span_bytes(own[id(tensor)]) if is_own else self._origins[id(tensor)][1]))
        self._source = BlockSource(parts, nbytes)
        self._ranges = {}
        for key in self._views:
            for file, start, size in self._origins[key][1].segments:
                self._ranges.setdefault(file, []).append((key, start, size))
        self._watch(leaves)
        self._give_pages_back()

    def take_home(self, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> bool:
        index = next((i for i, other in enumerate(self.tensors) if other is tensor), None)
        if index is None:
            return False
        p = self._placements[index]
        with torch.inference_mode(False), torch.no_grad(), self._plainly():
            if (tensor.dtype, tensor.shape, tensor.stride()) != (p.dtype, p.shape, p.stride):
                return False
            if buffer is not None:
                p.view(buffer[p.offset : p.offset + p.nbytes]).copy_(tensor.data)
            at_rest = {id(other): view for other, view in self._at_rest}
            if id(tensor) in at_rest and tensor.data_ptr() == at_rest[id(tensor)].data_ptr():
                return True
            at_rest[id(tensor)] = self._own(tensor)
            self._at_rest = [(other, at_rest[id(other)]) for other in self.tensors if id(other) in at_rest]
            leaves = list(self._source.leaves)
            leaves[index] = (p.offset, span_bytes(at_rest[id(tensor)]))
            self._source = BlockSource(leaves, self.nbytes)
            self._withheld = [other for other in self._withheld if other is not tensor]
            tensor.data = at_rest[id(tensor)]
        return True

    def realize(self) -> None:
        """Read what is withheld; it is in host memory from then on.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        if self._withheld:
            self._read_withheld()
            self.pack()

    def release(self) -> None:
        """Read what is withheld; the rest stay views of the mapped files.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        self.abandon()
        self._read_withheld()

    def abandon(self) -> None:
        self._bindings.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        if is_withheld(tensor):
            return False
        pointer = tensor.data_ptr()
        return any(view.data_ptr() <= pointer < view.data_ptr() + max(view.nbytes, 1) for _, view in self._at_rest)

    def _read_withheld(self) -> None:
        while self._withheld:
            tensor = self._withheld[-1]
            give_back(tensor, self._origins[id(tensor)][1].read())
            self._withheld.pop()

    def _is_from_file(self, tensor: torch.Tensor, edited: frozenset[int]) -> bool:
        if id(tensor) not in self._origins or id(tensor) in edited:
            return False
        if is_withheld(tensor) or self._snapshot is None:
            return True
        view = self._views.get(id(tensor))
        return view is not None and _is_the_same(tensor, view)

    def _view(self, leaf: Leaf) -> torch.Tensor | None:
        """The leaf's data at rest, of the mapped file; None if it is withheld."""
        tensor = leaf.tensor
        if is_withheld(tensor):
            withhold(tensor, _why_withheld(leaf.path))  # Whoever withheld it may have said something else.
            return None
        view = self._views.get(id(tensor))
        if view is None:
            found = self._origins[id(tensor)][1].view()
            if found is None:
                withhold(tensor, _why_withheld(leaf.path))
                return None
            with torch.inference_mode(tensor.is_inference()):
                view = self._views[id(tensor)] = found.view(found.shape)
        return view

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leaf's data in host memory of its own, which it has from now on."""
        origin = self._origins.pop(id(tensor), None)
        with torch.inference_mode(tensor.is_inference()):
            if origin is None and tensor.device.type == "cpu":
                return tensor.data
            data = copy_with_strides(tensor.data, torch.device("cpu"))
        view = self._views.pop(id(tensor), None)
        if origin is not None and view is not None:
            self._left.append((view.untyped_storage(), origin[1]))
        return data

    def _give_pages_back(self) -> None:
        """Private pages of leaves that have other data now are given back, unless somebody looks at them still: a leaf
        that they were handed to, or an alias."""
        for storage, source in self._left:
            if torch._C._storage_Use_Count(storage._cdata) == 1:
                for file, start, nbytes in source.segments:
                    file.forget_edits(start, nbytes)
        self._left = []

    def _edited(self) -> frozenset[int]:
        """`id` of the leaves of which a page was written to through its view."""
        edited: set[int] = set()
        for file, ranges in self._ranges.items():
            answers = file.edited([(start, nbytes) for _, start, nbytes in ranges])
            edited.update(key for (key, _, _), is_edited in zip(ranges, answers, strict=True) if is_edited)
        return frozenset(edited.intersection(self._views))


def _is_the_same(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        view.data_ptr(),
        view.dtype,
        view.shape,
        view.stride(),
    )


def _why_withheld(path: str) -> str:
    return (
        f"{path} isn't in memory between forwards: the checkpoint has it in another form, and it is read in calls. "
        "`with pipe.omni_offload.gather():` brings it here, and disable_omni_offload() for good."
    )
