"""What is asked of the mode "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diffusers_omni_offload.checks import integer, parse_bytes
from diffusers_omni_offload.planning.workload import Call


@dataclass(frozen=True)
class Request:
    """What is asked of the mode "auto".

    Attributes:
        memory_budget: device bytes that weights and activations may take together; None for what is free, less 5 %.
        host_memory_budget: host bytes that offloaded weights may take; None for no limit.
        activation_memory: device bytes of activations at the most, if the caller knows them.
        workload: what a call is said to be: "height", "width", "num_frames", "num_inference_steps".
        keeps_profile: whether what was measured on this machine before counts, and is kept.
        pin_memory: see `OffloadConfig`.
    """

    memory_budget: int | None = None
    host_memory_budget: int | None = None
    activation_memory: int | None = None
    workload: Mapping[str, int] = field(default_factory=dict)
    keeps_profile: bool = True
    pin_memory: bool | int = True

    @property
    def call(self) -> Call:
        """What a call is said to be."""
        get = self.workload.get
        return Call(get("height"), get("width"), get("num_frames"), get("num_inference_steps"))

    @classmethod
    def parse(
        cls,
        budgets: Mapping[str, int | str | None],
        workload: Mapping[str, int | None],
        *,
        profile: bool,
        pin_memory: bool | int,
    ) -> Request:
        """From the arguments of `enable_omni_offload`, by their names. TypeError or ValueError names the argument."""
        given = {name: value for name, value in workload.items() if value is not None}
        for name, value in given.items():
            integer(name, value, minimum=1)
        sizes = {name: None if value is None else parse_bytes(name, value) for name, value in budgets.items()}
        return cls(**sizes, workload=given, keeps_profile=profile, pin_memory=pin_memory)
