"""The flags that choose how a pipeline is offloaded, their priorities and conflicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers_omni_offload.checks import parse_bytes
from diffusers_omni_offload.cli.errors import BadInput, input_is_to_blame
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.legacy_flags import STRATEGY_FLAGS
from diffusers_omni_offload.pipeline import enable_from_config

AUTO, RESIDENT = "auto", "resident"
MODES = (AUTO, "layer", "module", RESIDENT)
"""What `--mode` may be."""


@dataclass(frozen=True)
class StrategyFlags:
    """The flags as they were given. `dlo` is the distributed layerwise strategy.

    Attributes:
        mode: one of `MODES`; None if it wasn't given.
        memory_budget, host_memory_budget: sizes as text, for "auto".
        profile: whether "auto" uses and keeps what was measured on this machine.
        enable_cpu_offload, enable_layerwise_offload, enable_distributed_layerwise_offload: a strategy; the last one
            that is on counts.
        data_parallel_size: ranks with requests of their own; None if it wasn't given.
        usp: ranks that share the tokens of a request.
        dlo_use_allgather: whether ranks share the weights.
        dlo_resident_layers: blocks that stay on the device.
        diffusion_offload_config: the compact form, as JSON.
    """

    mode: str | None = None
    memory_budget: str | None = None
    host_memory_budget: str | None = None
    profile: bool = True
    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    enable_distributed_layerwise_offload: bool = False
    data_parallel_size: int | None = None
    usp: int = 1
    dlo_use_allgather: bool = True
    dlo_resident_layers: int = 0
    diffusion_offload_config: str | None = None


@dataclass(frozen=True)
class Strategy:
    """What the flags come to.

    Attributes:
        mode: one of `MODES`, or None where `config` has everything.
        config: the configuration; None for "auto" and "resident".
        options: keyword arguments of "auto".
    """

    mode: str | None
    config: OffloadConfig | None
    options: Mapping[str, Any]

    @property
    def is_resident(self) -> bool:
        """Whether nothing is offloaded."""
        return self.mode == RESIDENT

    def enable(self, pipe: Any, device: Any, size: Mapping[str, int]) -> Any:
        """Offload `pipe`, or move it to the device as it is. The handle; None if nothing is offloaded.

        Args:
            pipe: the pipeline.
            device: where it runs.
            size: height, width, frames and steps of the calls, as far as they are given.

        Raises:
            BadInput: it can't be done.
        """
        with input_is_to_blame():
            if self.is_resident:
                pipe.to(device)
                return None
            if self.config is not None:
                return enable_from_config(pipe, self.config, device=device)
            return pipe.enable_omni_offload(AUTO, device=device, **self.options, **size)


def strategy_of(flags: StrategyFlags) -> Strategy:
    """What the flags ask for. A mode, or a strategy by its older flags or as JSON; nothing of it is "auto".

    Raises:
        BadInput: they contradict each other, or one of them has a wrong value.
    """
    if flags.mode is not None and flags.mode not in MODES:
        raise BadInput(f"--mode is {flags.mode!r}, which is unknown; choose from {', '.join(MODES)}.")
    asked = [f"--{name.replace('_', '-')}" for name, _ in STRATEGY_FLAGS if getattr(flags, name)]
    if flags.diffusion_offload_config is not None:
        asked.append("--diffusion-offload-config")
    if flags.mode is not None and asked:
        raise BadInput(f"--mode {flags.mode} and {asked[0]} both say what is offloaded; leave one of them out.")
    if asked:
        return Strategy(None, _config_of(flags), _of_auto(flags, asked[0]))
    if flags.dlo_resident_layers or not flags.dlo_use_allgather:
        flag = "--dlo-resident-layers" if flags.dlo_resident_layers else "--dlo-no-use-allgather"
        raise BadInput(f"{flag} belongs to --enable-distributed-layerwise-offload; add that, or leave it out.")
    mode = flags.mode or AUTO
    of_mode = OffloadConfig.from_options(mode) if mode in ("layer", "module") else None
    return Strategy(mode, of_mode, _of_auto(flags, f"--mode {mode}"))


def _config_of(flags: StrategyFlags) -> OffloadConfig:
    """The configuration of the flags that choose a strategy, and of those beside them."""
    fields: dict[str, Any] = {name: getattr(flags, name) for name, _ in STRATEGY_FLAGS}
    fields |= {
        "data_parallel_size": flags.data_parallel_size,
        "ulysses_degree": flags.usp,
        "dlo_use_allgather": flags.dlo_use_allgather,
        "dlo_resident_layers": flags.dlo_resident_layers,
    }
    if flags.diffusion_offload_config is not None:
        try:
            fields["diffusion_offload_config"] = json.loads(flags.diffusion_offload_config)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"--diffusion-offload-config is no JSON ({error}); write it in single quotes, such as "
                '\'{"mode": "layer", "components": ["dit"]}\'.'
            ) from error
        if fields["diffusion_offload_config"] is None:
            raise BadInput("--diffusion-offload-config is null; leave it out, or give a mapping.")
    with input_is_to_blame():
        return OffloadConfig.from_od_config(fields)


def _of_auto(flags: StrategyFlags, chosen: str) -> dict[str, Any]:
    """The options of "auto". BadInput if one is given with something else."""
    budgets = {
        name: value for name in ("memory_budget", "host_memory_budget") if (value := getattr(flags, name)) is not None
    }
    given = [f"--{name.replace('_', '-')}" for name in budgets] + ([] if flags.profile else ["--no-profile"])
    if chosen != f"--mode {AUTO}":
        if given:
            raise BadInput(f"{given[0]} is for --mode auto, which chooses what is offloaded; leave it or {chosen} out.")
        return {}
    with input_is_to_blame():
        sizes = {name: parse_bytes(f"--{name.replace('_', '-')}", value) for name, value in budgets.items()}
    return {**sizes, "profile": flags.profile}
