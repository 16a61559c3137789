"""What the user asked for, parsed and validated. Knows no pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from diffusers_omni_offload.checks import check_keys, gibibytes, integer, one_of
from diffusers_omni_offload.declarations import ENCODER_COMPONENT_TYPES, FrozenMapping, a_type

COMPONENTS = ("dit", *ENCODER_COMPONENT_TYPES)
"""The components that a sequence of them may select, in the order that a configuration keeps them."""
SELECTORS = (*COMPONENTS, "vae")
"""Names that stand for all components of a kind, in a mapping of them."""
MODES = ("layer", "module")
CHOICES = (*MODES, "resident")
"""What a mapping of components may choose for each."""
SOURCES = ("auto", "memory", "checkpoint")
"""Where streamed weights are: in host memory, in the files that they came from, or where the loader left them."""
RESIDENT_POLICIES = ("spread", "leading")
MAX_SLOTS = 64


class OffloadStrategy(str, Enum):
    """The backend that carries out a configuration.

    Attributes:
        NONE: nothing is offloaded.
        MODEL_LEVEL: whole components are swapped.
        LAYERWISE: blocks are streamed; swapped components may stand beside.
        DISTRIBUTED_LAYERWISE: the same, with resident blocks, or with blocks that several ranks share.
    """

    NONE = "none"
    MODEL_LEVEL = "model-level"
    LAYERWISE = "layerwise"
    DISTRIBUTED_LAYERWISE = "distributed-layerwise"


class WeightTransfer(str, Enum):
    """How a block's bytes reach the device.

    Attributes:
        RANK_LOCAL: from this rank's host memory or files.
        ALLGATHER: from shards of all ranks.
    """

    RANK_LOCAL = "rank-local"
    ALLGATHER = "allgather"


@dataclass(frozen=True)
class LayerOptions:
    """Options of one streamed component.

    Attributes:
        weight_transfer: whether each rank has all of its blocks, or a share of them.
        resident_layers: how many of its blocks stay on the device (DiTs only).
        source: "memory" packs the weights into host memory, "checkpoint" reads them from the files that they were
            loaded from, "auto" leaves them where the loader has: in the files with `load_omni_pipeline`, in memory
            otherwise.
        host_registration_limit_gib: so many GiB of the files are page-locked in the page cache, where the platform can,
            and copied without staging.

    Raises TypeError or ValueError for values that aren't allowed, or not together.
    """

    weight_transfer: WeightTransfer = WeightTransfer.RANK_LOCAL
    resident_layers: int = 0
    source: str = "auto"
    host_registration_limit_gib: float = 0.0

    def __post_init__(self) -> None:
        transfer = one_of("weight_transfer", self.weight_transfer, [transfer.value for transfer in WeightTransfer])
        object.__setattr__(self, "weight_transfer", WeightTransfer(transfer))
        integer("resident_layers", self.resident_layers, minimum=0)
        object.__setattr__(self, "source", one_of("source", self.source, SOURCES))
        limit = gibibytes("host_registration_limit_gib", self.host_registration_limit_gib)
        object.__setattr__(self, "host_registration_limit_gib", limit)
        if limit and (self.source == "memory" or self.weight_transfer is WeightTransfer.ALLGATHER):
            what = "source='memory'" if self.source == "memory" else "weight_transfer='allgather'"
            raise ValueError(
                f"host_registration_limit_gib={limit:g} is for weights that stay in their files, but {what} was asked "
                "for; leave one of the two out."
            )
        if self.resident_layers and self.weight_transfer is WeightTransfer.ALLGATHER:
            raise ValueError(
                f"resident_layers={self.resident_layers} needs weight_transfer='rank-local', but 'allgather' was "
                "asked for; leave one of the two out."
            )

    @classmethod
    def parse(cls, component: str, options: Any) -> LayerOptions:
        """From a mapping with any of the fields' names.

        Args:
            component: whose options they are: a selector or a path.
            options: the mapping, or options that were made before.

        Returns:
            The options.

        Raises:
            TypeError, ValueError: a name or a value isn't allowed. The message has `component` and the choices.
        """
        if isinstance(options, LayerOptions):
            parsed = options
        else:
            name = f"layer_options[{component!r}]"
            check_keys(name, options, tuple(field.name for field in fields(cls)))
            try:
                parsed = cls(**options)
            except (TypeError, ValueError) as error:
                raise type(error)(f"In {name}: {error}") from None
        if parsed.resident_layers and component in ENCODER_COMPONENT_TYPES:
            raise ValueError(
                f"layer_options[{component!r}] asks for resident_layers={parsed.resident_layers}, but only 'dit' can "
                "keep blocks on the device; leave it out (an unselected encoder stays on the device as a whole)."
            )
        return parsed


@dataclass(frozen=True)
class OffloadConfig:
    """A validated request.

    Attributes:
        strategy: the backend.
        components: what is offloaded. None for configurations from the legacy flags, which select nothing: what can't
            be done for a pipeline is warned about and skipped then; with a selection it raises.
        choices: instead of `components`, a choice for each, by selector ("dit", "text_encoder", "image_encoder", "vae")
            or path: "layer", "module" or "resident". A path goes before a selector.
        is_default: the selection is the mode's own, so what a pipeline lacks of it isn't missed.
        layer_options: selector or path -> options of what is streamed.
        pin_memory: page-lock all offloaded weights, none, or at most that many bytes.
        slots: device buffers, each as large as the largest streamed block.
        resident_policy: "spread" or "leading".
        data_parallel_size, sequence_parallel_size: numbers of ranks.
        hsdp_shard_size, hsdp_replicate_size, use_hsdp: likewise, of hybrid sharding, and whether it is on.

    Raises TypeError or ValueError, with the choices.
    """

    strategy: OffloadStrategy
    components: tuple[str, ...] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    is_default: bool = False
    layer_options: Mapping[str, LayerOptions] = field(default_factory=dict)
    pin_memory: bool | int = True
    slots: int = 2
    resident_policy: str = "spread"
    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    hsdp_shard_size: int = 1
    hsdp_replicate_size: int = 1
    use_hsdp: bool = False

    def __post_init__(self) -> None:
        strategy = one_of("strategy", self.strategy, [strategy.value for strategy in OffloadStrategy])
        object.__setattr__(self, "strategy", OffloadStrategy(strategy))
        if self.components is not None:
            object.__setattr__(self, "components", _parse_components(self.components))
        object.__setattr__(self, "choices", FrozenMapping(_parse_choices(self.choices) if self.choices else {}))
        if self.components is not None and self.choices:
            raise ValueError("Both components and choices select what is offloaded; leave one of the two out.")
        check_keys("layer_options", self.layer_options, (*COMPONENTS, *self.choices))
        options = {name: LayerOptions.parse(name, value) for name, value in self.layer_options.items()}
        object.__setattr__(self, "layer_options", FrozenMapping(options))
        if not isinstance(self.pin_memory, bool):
            try:
                integer("pin_memory", self.pin_memory, minimum=0)
            except TypeError:
                raise TypeError(
                    f"pin_memory is {self.pin_memory!r}, but True, False or a budget in bytes (an int) is needed."
                ) from None
        integer("slots", self.slots, minimum=1, maximum=MAX_SLOTS)
        one_of("resident_policy", self.resident_policy, RESIDENT_POLICIES)
        for name in ("data_parallel_size", "sequence_parallel_size", "hsdp_shard_size", "hsdp_replicate_size"):
            integer(name, getattr(self, name), minimum=1)
        if self.uses_allgather and self.use_hsdp:
            raise ValueError(
                "HSDP shards the weights already, so weight_transfer='allgather' would shard them twice; use "
                "'rank-local' (dlo_use_allgather=False) or switch HSDP off."
            )

    @classmethod
    def from_options(
        cls,
        mode: str | None,
        *,
        components: Collection[str] | Mapping[str, str] | None = None,
        layer_options: Mapping[str, Any] | None = None,
        pin_memory: bool | int = True,
        slots: int = 2,
        resident_policy: str = "spread",
    ) -> OffloadConfig:
        """What the arguments of `enable_omni_offload` mean.

        Args:
            mode: "layer" or "module"; None means "layer", or what `components` chooses.
            components: a sequence of "dit", "text_encoder", "image_encoder"; None means ["dit"] in layer mode and all
                of them in module mode. Or a mapping from these, "vae" or a component's path to "layer", "module" or
                "resident".
            layer_options: component -> any of the fields of `LayerOptions`.
            pin_memory, slots, resident_policy: see the attributes.

        Returns:
            The configuration.

        Raises:
            TypeError, ValueError: an argument isn't allowed. The message has the choices.
        """
        if mode is not None:
            mode = one_of("mode", mode, MODES)
        if isinstance(components, Mapping):
            choices = _parse_choices(components)
            strategy_mode = _mode_of(choices, mode)
            selected: tuple[str, ...] | None = None
            layered = tuple(name for name, choice in choices.items() if choice == "layer")
        else:
            choices, strategy_mode = {}, mode or "layer"
            is_module = strategy_mode == "module"
            default = COMPONENTS if is_module else ("dit",)
            selected = layered = default if components is None else _parse_components(components)
        options = _parse_layer_options(strategy_mode, layered, layer_options)
        return cls(
            strategy=_strategy_of(strategy_mode, options.values()),
            components=selected,
            choices=choices,
            is_default=components is None and strategy_mode == "module",
            layer_options=options,
            pin_memory=pin_memory,
            slots=slots,
            resident_policy=resident_policy,
        )

    @classmethod
    def parse(cls, mapping: Any) -> OffloadConfig:
        """The compact form: a `mapping` with `mode` and `components` (both needed), `layer_options`, `pin_memory` (a
        bool). Raises TypeError or ValueError, with the choices."""
        check_keys("The offload configuration", mapping, ("mode", "components", "layer_options", "pin_memory"))
        for name, choices in (("mode", MODES), ("components", COMPONENTS)):
            if mapping.get(name) is None:
                raise ValueError(f"The offload configuration has no {name!r}; give it, from {', '.join(choices)}.")
        pin_memory = mapping.get("pin_memory", True)
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory is {pin_memory!r} ({a_type(pin_memory)}), but True or False is needed.")
        return cls.from_options(
            mapping["mode"],
            components=mapping["components"],
            layer_options=mapping.get("layer_options"),
            pin_memory=pin_memory,
        )

    @classmethod
    def from_od_config(cls, od_config: Any) -> OffloadConfig:
        """From any object or mapping that has `diffusion_offload_config` or the legacy flags; see `legacy_flags.py`.
        Raises TypeError or ValueError for fields that contradict each other."""
        from diffusers_omni_offload.legacy_flags import config_from_flags

        return config_from_flags(od_config)

    @property
    def is_explicit(self) -> bool:
        """True if components were selected, so that whatever can't be done raises."""
        return self.components is not None or bool(self.choices)

    @property
    def has_selection(self) -> bool:
        """True if the user selected components, and not the mode alone, so that each of them has to be there."""
        return self.is_explicit and not self.is_default

    @property
    def uses_allgather(self) -> bool:
        """True if any component's weights are sharded over ranks."""
        return any(options.weight_transfer is WeightTransfer.ALLGATHER for options in self.layer_options.values())

    @property
    def group_size(self) -> int:
        """Ranks that hold the weights together: the data parallel size; HSDP's shards and replicas come first if it is
        on, the sequence parallel size is taken where that leaves one."""
        size = self.data_parallel_size
        if self.use_hsdp:
            size = self.hsdp_shard_size * self.hsdp_replicate_size
        return size if size > 1 else self.sequence_parallel_size

    def selects(self, component: str) -> bool:
        """True if `component` ("dit", "text_encoder", "image_encoder", "vae") is to be offloaded. Without a selection
        that is the DiT for layerwise strategies and DiT and encoders for the model-level one."""
        return self.choice_for(component) != "resident"

    def choice_for(self, selector: str, path: str = "") -> str:
        """What is chosen for a component.

        Args:
            selector: the name that stands for all of its kind.
            path: its own, which goes first.

        Returns:
            "layer", "module" or "resident".
        """
        if self.strategy is OffloadStrategy.NONE:
            return "resident"
        if self.choices:
            return self.choices.get(path) or self.choices.get(selector, "resident")
        is_model_level = self.strategy is OffloadStrategy.MODEL_LEVEL
        selected = self.components or (COMPONENTS if is_model_level else ("dit",))
        if selector not in selected:
            return "resident"
        return "module" if is_model_level else "layer"

    def options_for(self, selector: str, path: str = "") -> LayerOptions:
        """The options of a component.

        Args:
            selector: the name that stands for all of its kind.
            path: its own, which goes first.

        Returns:
            Its options; the defaults if none were given.
        """
        return self.layer_options.get(path) or self.layer_options.get(selector, LayerOptions())


def _strategy_of(mode: str, options: Iterable[LayerOptions]) -> OffloadStrategy:
    if mode == "module":
        return OffloadStrategy.MODEL_LEVEL
    if any(option.resident_layers or option.weight_transfer is WeightTransfer.ALLGATHER for option in options):
        return OffloadStrategy.DISTRIBUTED_LAYERWISE
    return OffloadStrategy.LAYERWISE


def _parse_choices(components: Mapping[Any, Any]) -> dict[str, str]:
    """Component or path -> choice. Paths are looked up when the pipeline is known."""
    if not components:
        raise ValueError(f"components is empty; choose for at least one component, from {', '.join(CHOICES)}.")
    for name in components:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"components has the key {name!r} ({a_type(name)}), but a component ({', '.join(SELECTORS)}) or the "
                "path of one is needed."
            )
    return {name: one_of(f"components[{name!r}]", choice, CHOICES) for name, choice in components.items()}


def _mode_of(choices: Mapping[str, str], mode: str | None) -> str:
    """The mode that decides on the strategy: "layer" if anything is streamed."""
    chosen = [choice for choice in MODES if choice in choices.values()]
    if not chosen:
        raise ValueError(
            "components keeps everything resident, so nothing would be offloaded; choose 'layer' or 'module' for "
            "at least one."
        )
    if mode is not None and mode not in chosen:
        raise ValueError(
            f"The mode is {mode!r}, but components chooses that for none of {', '.join(choices)}; leave the mode out."
        )
    return chosen[0]


def _parse_components(components: Any) -> tuple[str, ...]:
    if isinstance(components, str):
        raise TypeError(
            f"components is the string {components!r}, but a list is needed; write components=[{components!r}]."
        )
    if isinstance(components, Mapping) or not isinstance(components, Collection):
        raise TypeError(
            f"components is {a_type(components)}, but a list of names or a mapping is needed; choose from "
            f"{', '.join(COMPONENTS)}."
        )
    if not components:
        raise ValueError(f"components is empty; choose at least one of {', '.join(COMPONENTS)}.")
    chosen = {one_of("components", component, COMPONENTS) for component in components}
    # One order, so that two requests that mean the same compare equal.
    return tuple(component for component in COMPONENTS if component in chosen)


def _parse_layer_options(mode: str, components: tuple[str, ...], layer_options: Any) -> dict[str, LayerOptions]:
    """The options of the streamed `components`."""
    if layer_options is None:
        layer_options = {}
    check_keys("layer_options", layer_options, tuple(dict.fromkeys((*COMPONENTS, *components))))
    if mode != "layer":
        if layer_options:
            raise ValueError(
                f"layer_options belong to mode='layer', but the mode is {mode!r}; leave them out or change it."
            )
        return {}
    for component in layer_options:
        if component not in components:
            raise ValueError(
                f"layer_options has {component!r}, which isn't selected to be streamed; add it to components "
                f"({', '.join(components)}) or leave it out."
            )
    return {component: LayerOptions.parse(component, layer_options.get(component, {})) for component in components}
