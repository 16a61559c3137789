"""What a model says of itself: which components it has, and what of them can be offloaded. Data and protocols
only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

V = TypeVar("V")

OFFLOAD_PLAN_ATTRIBUTE = "_offload_plan"
"""Class attribute of a pipeline (or of its adapter) that holds its :class:`OffloadPlan`."""

ENCODER_COMPONENT_TYPES = ("text_encoder", "image_encoder")
"""The selectors that an encoder can answer to."""

_LISTS_BY_PATH = {
    "block_attrs": "block containers",
    "encoder_block_attrs": "block containers",
    "entry_points": "methods",
}
_STRINGS_BY_PATH = {
    "offload_submodules": "a block container",
    "encoder_component_types": "a component type",
    "post_load": "a method",
}


def a_type(value: Any) -> str:
    """The class of `value` in words: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


class FrozenMapping(Mapping[str, V]):
    """A read-only, hashable and picklable mapping (a `MappingProxyType` can't be pickled)."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only, so {name!r} can't be set; build a new one instead.")

    def __getitem__(self, key: str) -> V:
        return self._items[key]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type[FrozenMapping[V]], tuple[dict[str, V]]]:
        return type(self), (dict(self._items),)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return repr(self._items)  # type: ignore[attr-defined]


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline that names its components. Each entry is an attribute name or a dotted path ("pipe.transformer").

    Works as a mixin before or after `nn.Module` or a pipeline class. Inheriting is optional: the attributes are enough.
    """

    _dit_modules: ClassVar[list[str]]
    """The denoising modules: their blocks are streamed."""
    _encoder_modules: ClassVar[list[str]]
    """Text, image and other encoders: run before the denoising loop."""
    _vae_modules: ClassVar[list[str]]
    """Autoencoders and vocoders: stay on the device, unless they are chosen."""
    _resident_modules: ClassVar[list[str]] = []
    """Modules that are used beside the DiT in each step and stay on the device, unless they are chosen
    (ControlNets, connectors)."""


def _pass_on_init(self: Any, *args: Any, **kwargs: Any) -> None:
    super(SupportsComponentDiscovery, self).__init__(*args, **kwargs)


# typing.Protocol gives protocol classes an __init__ that ends the chain of super().__init__() calls, so a class that
# lists the protocol before nn.Module would never be initialised. Set here, because Python 3.10 overwrites one in the
# class body.
SupportsComponentDiscovery.__init__ = _pass_on_init  # type: ignore[method-assign]


@runtime_checkable
class SupportsModelCpuOffload(Protocol):
    """A pipeline that moves its own phases between host and device; model-level offload delegates to it."""

    def enable_omni_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Have the phases moved from now on.

        Args:
            args: none are given.
            kwargs: `device`, where to run, and `pin_memory`, whether host memory is page-locked.
        """
        ...

    def disable_omni_model_cpu_offload(self) -> None:
        """Leave all weights on the CPU, ordinary tensors again."""
        ...


@dataclass(frozen=True)
class Stored:
    """How a parameter lies in the checkpoint's file, if not whole, under its own name and in its own dtype.

    The stored tensor's first dimension is divided into `groups` equal groups, and each group in proportion to `sizes`.
    The parameter is, for one of `parts` after the other, that part of all groups.

    >>> Stored(key="blocks.*.attn.qkv.weight", sizes=(1, 1, 1), parts=(0,))  # the first third of a fused weight
    >>> Stored(key="blocks.*.qkv.weight", groups=8, sizes=(4, 1, 1), parts=(0, 1, 2))  # q, k, v of each of 8 groups

    Raises TypeError where a field has the wrong shape and ValueError where a number makes no sense.
    """

    key: str
    """Name in the checkpoint; a "*" stands for what the same "*" of the parameter's pattern stands for."""
    groups: int = 1
    """Number of equal groups."""
    sizes: tuple[int, ...] = (1,)
    """Sizes of a group's parts, in proportion: rows of heads, say, or (4, 1, 1)."""
    parts: tuple[int, ...] = (0,)
    """Which of the parts make up the parameter, in that order."""
    cast: bool = False
    """Whether the file may have another floating point dtype, which is cast while it is read."""

    def __post_init__(self) -> None:
        _check_path("Stored.key", self.key)
        if not isinstance(self.cast, bool):
            raise TypeError(f"Stored.cast is {self.cast!r} ({a_type(self.cast)}), but True or False is needed.")
        for name in ("sizes", "parts"):
            value = getattr(self, name)
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
                raise TypeError(f"Stored.{name} is {a_type(value)}, but a sequence of whole numbers is needed.")
            object.__setattr__(self, name, tuple(value))
        numbers = {"groups": (self.groups,), "sizes": self.sizes, "parts": self.parts}
        for name, values in numbers.items():
            for number in values:
                if type(number) is not int:
                    raise TypeError(f"Stored.{name} holds {number!r} ({a_type(number)}), but whole numbers are needed.")
        if self.groups < 1 or not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"Stored.groups is {self.groups} and Stored.sizes is {self.sizes}; there has to be at least one group "
                "and one size, and each at least 1."
            )
        if not self.parts or len(set(self.parts)) < len(self.parts) or set(self.parts) - set(range(len(self.sizes))):
            raise ValueError(
                f"Stored.parts is {self.parts}, but each of its numbers has to be one of 0 to {len(self.sizes) - 1} "
                f"(there are {len(self.sizes)} sizes), and none may come twice."
            )


@dataclass(frozen=True)
class OffloadPlan:
    """What can be offloaded in a pipeline, as declared by its author. All paths are dotted; nothing is looked up here.

    A block container may give alternatives, "encoder.layers|vision_model.encoder.layers": the first that is there is
    used, for models whose attributes are named differently from one release of a library to the next.

    Raises TypeError where a field has the wrong shape and ValueError where a path or a type name is wrong.
    """

    block_attrs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """DiT path -> its block containers, relative to the DiT, in execution order."""
    encoder_block_attrs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Encoder path -> its block containers, relative to the encoder, in execution order."""
    on_demand_component_paths: tuple[str, ...] = ()
    """Components whose residency the pipeline manages; they have `load_to_device` and `offload_to_cpu`."""
    resident_dit_paths: tuple[str, ...] = ()
    """DiTs that may keep some of their blocks on the device (`resident_layers`)."""
    encoder_dlo_weight_replication: tuple[str, ...] = ()
    """Encoders whose loaded weights are the same on every rank, so that they may be sharded and gathered."""
    offload_submodules: Mapping[str, str] = field(default_factory=dict)
    """Submodule of a DiT, relative to it -> the block container that it streams as a stack of its own."""
    encoder_component_types: Mapping[str, str] = field(default_factory=dict)
    """Encoder path -> the selector it answers to: "text_encoder" or "image_encoder"."""
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component path -> its methods besides `forward` that the pipeline calls and that use its weights: names, relative
    to the component ("forward_model", "image_head.sample"). Those that diffusers and transformers have (`encode`,
    `decode`, `generate` ...) are known without it."""
    checkpoint_layouts: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    """DiT path -> its parameters that the checkpoint has in another form: name relative to the DiT, where "*" is any
    one step ("blocks.*.attn.to_q.weight") -> what the checkpoint has. The first pattern that fits counts."""
    post_load: Mapping[str, str] = field(default_factory=dict)
    """Component path -> its method without arguments that is called once its weights are there."""

    def __post_init__(self) -> None:
        for name, what in _LISTS_BY_PATH.items():
            mapping = _checked_mapping(name, getattr(self, name))
            values = {path: _checked_paths(f"{name}[{path!r}]", value) for path, value in mapping.items()}
            for path, names in values.items():
                if not names:
                    raise ValueError(f"OffloadPlan.{name}[{path!r}] is empty; name its {what} or leave {path!r} out.")
            object.__setattr__(self, name, FrozenMapping(values))
        for name in ("on_demand_component_paths", "resident_dit_paths"):
            object.__setattr__(self, name, _checked_paths(name, getattr(self, name)))
        replicated = self.encoder_dlo_weight_replication
        if isinstance(replicated, Mapping):
            replicated = tuple(path for path, is_replicated in replicated.items() if is_replicated)
        object.__setattr__(
            self, "encoder_dlo_weight_replication", _checked_paths("encoder_dlo_weight_replication", replicated)
        )
        object.__setattr__(self, "checkpoint_layouts", _checked_layouts(self.checkpoint_layouts))
        for name, what in _STRINGS_BY_PATH.items():
            mapping = _checked_mapping(name, getattr(self, name))
            for path, value in mapping.items():
                if not isinstance(value, str):
                    raise TypeError(
                        f"OffloadPlan.{name}[{path!r}] is {a_type(value)}, but one string is needed ({what})."
                    )
                if name != "encoder_component_types":
                    _check_path(f"{name}[{path!r}]", value)
                elif value not in ENCODER_COMPONENT_TYPES:
                    raise ValueError(
                        f"OffloadPlan.{name}[{path!r}] is {value!r}; choose from {', '.join(ENCODER_COMPONENT_TYPES)}."
                    )
            object.__setattr__(self, name, FrozenMapping(mapping))


def checked_paths(owner: str, value: Any) -> tuple[str, ...]:
    """`value` as a tuple of dotted paths. TypeError if it is a string or holds anything but strings; ValueError for a
    bad path."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{owner} is the string {value!r}, but a sequence of strings is needed; write [{value!r}].")
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{owner} is {a_type(value)}, but a sequence of strings (dotted paths) is needed.")
    paths = tuple(value)
    for path in paths:
        _check_path(owner, path)
    return paths


def _checked_paths(name: str, value: Any) -> tuple[str, ...]:
    return checked_paths(f"OffloadPlan.{name}", value)


def _check_path(owner: str, path: Any) -> None:
    if not isinstance(path, str):
        raise TypeError(f"{owner} holds {path!r} ({a_type(path)}), but each path must be a string.")
    if not path or any(not part or part != part.strip() for part in re.split(r"[.|]", path)):
        raise ValueError(
            f"{owner} holds the path {path!r}; a path is attribute names joined by dots, such as 'pipe.transformer'."
        )


def _checked_mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"OffloadPlan.{name} is {a_type(value)}, but a mapping from dotted paths is needed.")
    for path in value:
        _check_path(f"OffloadPlan.{name}", path)
    return dict(value)


def _checked_layouts(value: Any) -> FrozenMapping[Mapping[str, Stored]]:
    layouts = _checked_mapping("checkpoint_layouts", value)
    for path, patterns in layouts.items():
        owner = f"checkpoint_layouts[{path!r}]"
        for pattern, stored in _checked_mapping(owner, patterns).items():
            if not isinstance(stored, Stored):
                raise TypeError(f"OffloadPlan.{owner}[{pattern!r}] is {a_type(stored)}, but a Stored is needed.")
            wanted, found = pattern.split(".").count("*"), stored.key.split(".").count("*")
            if wanted != found:
                raise ValueError(
                    f"OffloadPlan.{owner} maps {pattern!r} to the key {stored.key!r}, but each '*' of one has to have "
                    f"its '*' in the other; there are {wanted} and {found}."
                )
    return FrozenMapping({path: FrozenMapping(patterns) for path, patterns in layouts.items()})
