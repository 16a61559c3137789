"""What a block's weights are while they are offloaded: leaves that get their bytes in a slot, forward by forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from diffusers_omni_offload.progress import SILENT, Bar
from diffusers_omni_offload.weights.kinds import wrappers_of
from diffusers_omni_offload.weights.leaves import Leaf, Placement, plainly
from diffusers_omni_offload.weights.snapshot import Snapshot
from diffusers_omni_offload.weights.withheld import cover, is_withheld, uncover

_Binding = list[tuple[torch.Tensor, torch.Tensor]]


class Master(ABC):
    """The authoritative copy of some leaves, wherever it is; `pack` makes it.

    Between forwards each leaf has its data at rest, or is withheld; inside a forward `bind` makes all of them views of
    a slot. What kind of master it is decides where the bytes are: packed in host memory, in the files of a checkpoint,
    or in shards on several ranks.

    Args:
        find: returns the leaves as the modules hold them now; called again by each `pack`.
        roots: the modules below which leaves may come, go or be replaced.
        path: dotted path for messages.

    Attributes:
        nbytes: size of the packed leaves in bytes.
        tensors: the leaves, as the objects that the modules hold.
        takes_casts: whether a cast that a forward makes for good is taken over; if not, each forward makes it anew.
    """

    takes_casts = True

    def __init__(self, find: Callable[[], list[Leaf]], roots: Sequence[nn.Module], path: str) -> None:
        self.path = path
        self.find, self._roots = find, roots
        self.nbytes = 0
        self.tensors: list[torch.Tensor] = []
        self._placements: list[Placement] = []
        self._paths: dict[int, str] = {}
        self._at_rest: _Binding = []
        self._withheld: list[torch.Tensor] = []
        self._tracked: list[torch.Tensor] = []
        self._wrappers: list[torch.Tensor] = []
        self._bindings: dict[int, _Binding] = {}
        self._plainly = plainly([])
        self._snapshot: Snapshot | None = None

    # ------------------------------------------------------------------ what each kind does in its own way

    @abstractmethod
    def pack(self, *, in_place: bool = True, bar: Bar = SILENT) -> None:
        """Take the leaves as they are now; what is new or was replaced is read from where it is.

        Args:
            in_place: whether bytes that are there may be overwritten, where the geometry stayed.
            bar: hears of bytes that were copied, as far as that is worth telling.

        Raises:
            TypeError, ValueError: a leaf can't be packed (`require_plain`); nothing was changed.
        """

    @abstractmethod
    def take_home(self, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> bool:
        """Make a leaf's bytes, which were elsewhere for a while, the truth.

        Args:
            tensor: the leaf.
            buffer: a buffer that is loaded with this master, and gets the bytes as well.

        Returns:
            Whether they could be; if not, nothing is done.
        """

    @abstractmethod
    def realize(self) -> None:
        """Have every leaf's bytes on this host between forwards."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what is held beside the leaves; they stay ordinary CPU tensors."""

    def abandon(self) -> None:
        """`release` without reading anything: leaves that were withheld before `pack` stay so."""
        self.release()

    @property
    @abstractmethod
    def is_pinned(self) -> bool:
        """Whether copies to the device come from page-locked memory."""

    @property
    @abstractmethod
    def host_nbytes(self) -> int:
        """Bytes of host memory that the master itself takes for good."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes that a slot must have for it."""
        return self.nbytes

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data begins in the master's own memory."""

    # ------------------------------------------------------------------ the same for all

    @property
    def withheld(self) -> Sequence[torch.Tensor]:
        """The leaves that can't be read between forwards."""
        return self._withheld

    def is_current(self) -> bool:
        """Whether the modules still hold these leaves, and the leaves these bytes."""
        return self._snapshot is not None and self._snapshot.is_current()

    def views_on(self, buffer: torch.Tensor) -> _Binding:
        """The leaves paired with their views of `buffer`, a uint8 tensor of at least `nbytes`; made once a buffer."""
        binding = self._bindings.get(id(buffer))
        if binding is None:
            with torch.inference_mode(False):
                binding = self._bindings[id(buffer)] = [
                    (tensor, view_in_mode(tensor, buffer[p.offset : p.offset + p.nbytes], p))
                    for tensor, p in zip(self.tensors, self._placements, strict=True)
                ]
        return binding

    def forget_views(self) -> None:
        """Drop the views of buffers that are given back."""
        self._bindings.clear()

    def bind(self, buffer: torch.Tensor) -> None:
        """Make the leaves views of `buffer`."""
        binding = self.views_on(buffer)
        for tensor in self._withheld:
            uncover(tensor)
        with self._plainly():
            for tensor, view in binding:
                tensor.data = view

    def unbind(self) -> None:
        """Give the leaves their data at rest."""
        with self._plainly():
            for tensor, view in self._at_rest:
                tensor.data = view
        for tensor in self._withheld:
            cover(tensor)

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
        known = {id(tensor): view for tensor, view in self._at_rest}
        for leaf in self.find():
            view = known.get(id(leaf.tensor))
            if not is_withheld(leaf.tensor) and (view is None or leaf.tensor.data_ptr() != view.data_ptr()):
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

    def _know(self, leaves: Sequence[Leaf], placements: Sequence[Placement], nbytes: int, at_rest: _Binding) -> None:
        """From now on these are the leaves, where they lie in a packed buffer, and the data at rest of those that have
        some."""
        self.tensors = [leaf.tensor for leaf in leaves]
        self._placements, self.nbytes, self._at_rest = list(placements), nbytes, at_rest
        self._withheld = [tensor for tensor in self.tensors if is_withheld(tensor)]
        self._tracked = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._paths = {id(leaf.tensor): leaf.path for leaf in leaves}
        self._plainly = plainly(self.tensors)
        self._bindings = {}

    def _watch(self, leaves: Sequence[Leaf]) -> None:
        """The leaves are at rest, and true: from now on `is_current` compares with what they are."""
        modules = [module for root in self._roots for module in root.modules()]
        self._wrappers = [weight for module in modules for weight in wrappers_of(module).values()]
        self._snapshot = Snapshot(modules, leaves)


def view_in_mode(tensor: torch.Tensor, source: torch.Tensor, placement: Placement) -> torch.Tensor:
    """`source` as the leaf `tensor`, in its mode: inference tensors take only inference data, others only normal."""
    with torch.inference_mode(tensor.is_inference()):
        return placement.view(source)


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape or tensor.device != other.device:
        return False
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
