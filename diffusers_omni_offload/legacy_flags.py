"""Configurations in the older form of flags (`enable_layerwise_offload`, `dlo_use_allgather` ...), alone or beside the
compact form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer
from diffusers_omni_offload.declarations import a_type
from diffusers_omni_offload.messages import logger

STRATEGY_FLAGS: tuple[tuple[str, OffloadStrategy], ...] = (
    ("enable_distributed_layerwise_offload", OffloadStrategy.DISTRIBUTED_LAYERWISE),
    ("enable_layerwise_offload", OffloadStrategy.LAYERWISE),
    ("enable_cpu_offload", OffloadStrategy.MODEL_LEVEL),
)
"""The flags that choose a strategy; the first one that is set wins."""

_REGISTRATION_LIMIT = "dlo_host_registration_limit_gib"
_HOST_WEIGHTS = "host_weight_runtime_mode"


class _Fields:
    """Reads fields of an object or of a mapping; one that is missing or None gives the default."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self.source, Mapping):
            value = self.source.get(name)
        else:
            value = getattr(self.source, name, None)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r} ({a_type(value)}), but True or False is needed.")
        return value

    def count(self, name: str, default: int, minimum: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} ({a_type(value)}), but an int is needed.")
        if value < minimum:
            raise ValueError(f"{name} is {value}, but it must be at least {minimum}.")
        return value


def config_from_flags(od_config: Any) -> OffloadConfig:
    """The configuration in an object or mapping with `diffusion_offload_config` (compact form, or an `OffloadConfig`)
    and/or flags.

    Flags alone select no components; they keep leading residents and, in the distributed strategy, all-gather unless
    `dlo_use_allgather` is False. Raises TypeError or ValueError for fields that contradict each other. Changes nothing
    in `od_config`.
    """
    if od_config is None or isinstance(od_config, (str, bytes, bool, int, float)):
        raise TypeError(
            f"from_od_config takes an object or a mapping with configuration fields; it was given {od_config!r}."
        )
    fields = _Fields(od_config)
    parallel = _parallel_facts(fields)
    compact = fields.get("diffusion_offload_config")
    if compact is not None:
        config = compact if isinstance(compact, OffloadConfig) else OffloadConfig.parse(_with_pinning(compact, fields))
        _check_beside_compact(config, fields)
        # Facts that the fields leave at their defaults don't overrule those of a ready-made configuration.
        defaults = {item.name: item.default for item in dataclass_fields(OffloadConfig)}
        config = replace(config, **{name: value for name, value in parallel.items() if value != defaults[name]})
    else:
        config = _from_flags_alone(fields, parallel)
    _check_registration_limit(config, fields)
    _check_caches(config, fields)
    _check_compilation(config, fields)
    if config.group_size > 1 and config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE and not config.uses_allgather:
        logger.info("Each of the %d ranks streams its own weights; nothing is sharded or gathered.", config.group_size)
    return config


def _legacy_strategy(fields: _Fields) -> tuple[str, OffloadStrategy] | None:
    chosen = [(name, strategy) for name, strategy in STRATEGY_FLAGS if fields.flag(name)]
    return chosen[0] if chosen else None


def _from_flags_alone(fields: _Fields, parallel: dict[str, Any]) -> OffloadConfig:
    chosen = _legacy_strategy(fields)
    strategy = chosen[1] if chosen else OffloadStrategy.NONE
    uses_allgather = fields.flag("dlo_use_allgather", True)
    resident_layers = fields.count("dlo_resident_layers", 0, 0)
    options: dict[str, LayerOptions] = {}
    if strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE:
        if resident_layers and uses_allgather:
            raise ValueError(
                f"dlo_resident_layers={resident_layers} needs rank-local weights, but dlo_use_allgather is on (its "
                "default); set dlo_use_allgather=False or leave dlo_resident_layers out."
            )
        transfer = WeightTransfer.ALLGATHER if uses_allgather else WeightTransfer.RANK_LOCAL
        options = {"dit": LayerOptions(weight_transfer=transfer, resident_layers=resident_layers)}
        limit = _registration_limit(fields)
        if limit and transfer is WeightTransfer.RANK_LOCAL and _uses_host_weights(fields):
            options["dit"] = replace(options["dit"], source="checkpoint", host_registration_limit_gib=limit)
    elif strategy is OffloadStrategy.LAYERWISE:
        options = {"dit": LayerOptions()}
    if resident_layers and strategy is not OffloadStrategy.DISTRIBUTED_LAYERWISE:
        logger.warning(
            "dlo_resident_layers=%d has no effect with the strategy %r; it belongs to "
            "enable_distributed_layerwise_offload.",
            resident_layers,
            strategy.value,
        )
    return OffloadConfig(
        strategy=strategy,
        components=None,
        layer_options=options,
        pin_memory=fields.flag("pin_cpu_memory", True),
        resident_policy="leading",
        **parallel,
    )


def _with_pinning(compact: Any, fields: _Fields) -> Any:
    # `pin_cpu_memory` is the same choice under its older name, so it fills in for a compact form that doesn't make it.
    if isinstance(compact, Mapping) and "pin_memory" not in compact and not fields.flag("pin_cpu_memory", True):
        return {**compact, "pin_memory": False}
    return compact


def _check_beside_compact(config: OffloadConfig, fields: _Fields) -> None:
    chosen = _legacy_strategy(fields)
    if chosen is not None and chosen[1] is not config.strategy:
        raise ValueError(
            f"diffusion_offload_config asks for the strategy {config.strategy.value!r}, but {chosen[0]} for "
            f"{chosen[1].value!r}; leave the flag out."
        )
    tuned = {
        "dlo_use_allgather": (fields.flag("dlo_use_allgather", True), True, "weight_transfer"),
        "dlo_resident_layers": (fields.count("dlo_resident_layers", 0, 0), 0, "resident_layers"),
    }
    for name, (value, default, option) in tuned.items():
        if value != default:
            raise ValueError(
                f"{name}={value} can't stand beside diffusion_offload_config; write {option!r} in its layer_options "
                "instead."
            )
    if _uses_host_weights(fields):
        raise ValueError(
            f"{_HOST_WEIGHTS}={fields.get(_HOST_WEIGHTS)!r} can't stand beside diffusion_offload_config; use the "
            "flags alone, or leave it out."
        )


def _parallel_facts(fields: _Fields) -> dict[str, Any]:
    """Group facts from `parallel_config` (an object or a mapping) or, where it lacks one, from the fields
    themselves."""
    nested = _Fields(fields.get("parallel_config", {}))

    def count(name: str) -> int:
        return (nested if nested.get(name) is not None else fields).count(name, 1, 1)

    sequence = count("sequence_parallel_size")
    if sequence == 1:
        sequence = count("ulysses_degree") * count("ring_degree")
    uses_hsdp = nested.flag("use_hsdp") or fields.flag("use_hsdp")
    facts: dict[str, Any] = {
        "data_parallel_size": count("data_parallel_size"),
        "sequence_parallel_size": sequence,
        "use_hsdp": uses_hsdp,
    }
    for name in ("hsdp_shard_size", "hsdp_replicate_size"):
        # -1 and 0 mean "to be worked out from the number of ranks", which is known only once the group is there.
        size = (nested if nested.get(name) is not None else fields).count(name, 1, -1)
        facts[name] = max(size, 1)
    return facts


def _uses_host_weights(fields: _Fields) -> bool:
    mode = fields.get(_HOST_WEIGHTS)
    return mode is not None and str(getattr(mode, "value", mode)).lower() not in (
        "",
        "none",
        "off",
        "disabled",
        "false",
    )


def _registration_limit(fields: _Fields) -> float:
    """How many GiB of the page cache may be page-locked. TypeError or ValueError if that can't be."""
    limit = fields.get(_REGISTRATION_LIMIT, 0)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"{_REGISTRATION_LIMIT} is {limit!r} ({a_type(limit)}), but a number of GiB is needed.")
    if not math.isfinite(limit) or limit < 0:
        raise ValueError(f"{_REGISTRATION_LIMIT} is {limit}, but it must be finite and at least 0.")
    return float(limit)


def _check_registration_limit(config: OffloadConfig, fields: _Fields) -> None:
    limit = _registration_limit(fields)
    is_rank_local = config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE and not config.uses_allgather
    if limit and not (is_rank_local and _uses_host_weights(fields)):
        raise ValueError(
            f"{_REGISTRATION_LIMIT}={limit:g} needs the distributed layerwise strategy with rank-local weights "
            f"(dlo_use_allgather=False) and {_HOST_WEIGHTS}; leave it out."
        )


def _check_caches(config: OffloadConfig, fields: _Fields) -> None:
    """All ranks must run the same blocks for a gather, so nothing may let one rank skip them."""
    if config.data_parallel_size <= 1:
        return
    backend = fields.get("cache_backend")
    if config.uses_allgather and backend is not None and str(backend).lower() not in ("", "none"):
        raise ValueError(
            f"cache_backend={backend!r} lets a rank skip blocks, which weight_transfer='allgather' with "
            f"data_parallel_size={config.data_parallel_size} can't survive; switch the cache off or use 'rank-local'."
        )
    gathers_encoder = any(
        options.weight_transfer is WeightTransfer.ALLGATHER
        for component, options in config.layer_options.items()
        if component != "dit"
    )
    if gathers_encoder and (fields.get("enable_prompt_cache", False) or fields.get("enable_prompt_embed_cache", False)):
        raise ValueError(
            "A prompt cache lets a rank skip its encoder, which weight_transfer='allgather' of an encoder with "
            f"data_parallel_size={config.data_parallel_size} can't survive; switch the cache off or use 'rank-local'."
        )


def _check_compilation(config: OffloadConfig, fields: _Fields) -> None:
    if config.strategy is OffloadStrategy.NONE:
        return
    if fields.get("fullgraph", False) or fields.get("compile_full_graph", False):
        raise ValueError(
            f"The strategy {config.strategy.value!r} works between blocks, so the model can't be compiled as one "
            "full graph; compile its blocks instead."
        )
