"""What components take: bytes, times and rates. The question that a plan answers, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diffusers_omni_offload.topology.plan import ComponentRole

RatesSource = Literal["measured", "profile", "given", "assumed"]


@dataclass(frozen=True)
class BlockCost:
    """One block.

    Attributes:
        nbytes: packed bytes, which a load moves and a slot has to hold.
        seconds: compute in one forward; 0 if unknown.
        kept_nbytes: device bytes while it is resident, each of its leaves an allocation; 0 if that is `nbytes`.
    """

    nbytes: int
    seconds: float = 0.0
    kept_nbytes: int = 0

    @property
    def resident_nbytes(self) -> int:
        """Device bytes while it is resident."""
        return self.kept_nbytes or self.nbytes


@dataclass(frozen=True)
class ComponentCost:
    """One component of a pipeline.

    Attributes:
        path: its path.
        role: its part.
        selector: the name that stands for it in `components`: "dit", "text_encoder", "image_encoder", "vae", or its
            path.
        nbytes: bytes of all of it, packed.
        blocks: those that could be streamed, in order; empty if it can't be streamed.
        state_nbytes: bytes outside of `blocks`.
        may_keep_blocks: whether some of its blocks may stay on the device while others are streamed.
        may_swap: whether it can be moved as a whole.
        seconds: compute of one forward outside of `blocks`; 0 if unknown.
        forwards: how often it runs in a call; 1 for a VAE that only decodes.
        activation_nbytes: device bytes beside weights at the most, while it runs.
        dtypes: bytes by dtype, such as `{"bfloat16": 1024}`.
        parameters: number of parameters.
        class_name: its class.
    """

    path: str
    role: ComponentRole
    selector: str
    nbytes: int
    blocks: tuple[BlockCost, ...] = ()
    state_nbytes: int = 0
    may_keep_blocks: bool = False
    may_swap: bool = True
    seconds: float = 0.0
    forwards: int = 1
    activation_nbytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    parameters: int = 0
    class_name: str = ""


@dataclass(frozen=True)
class Rates:
    """How fast the link is.

    Attributes:
        link_bytes_per_s: copies from page-locked host memory.
        copy_latency_s: what a copy takes besides.
        source: where the figures come from.
    """

    link_bytes_per_s: float
    copy_latency_s: float = 1e-5
    source: RatesSource = "assumed"


@dataclass(frozen=True)
class Problem:
    """A pipeline, a machine and a budget.

    Attributes:
        components: all of the pipeline's, each once.
        rates: the link.
        device_nbytes: device bytes that weights and activations may take together.
        host_nbytes: host bytes that offloaded weights may take; None for no limit.
        total_nbytes: the device's memory. Where more than half of it is taken, slots and swapped components are given
            back before a VAE runs; None if unknown: then nobody counts on that.
    """

    components: tuple[ComponentCost, ...]
    rates: Rates
    device_nbytes: int
    host_nbytes: int | None = None
    total_nbytes: int | None = None

    def component(self, path: str) -> ComponentCost:
        """The component at `path`. KeyError if there is none."""
        for component in self.components:
            if component.path == path:
                return component
        raise KeyError(f"No component {path!r}; there are {', '.join(c.path for c in self.components)}.")


ASSUMED_RATES = Rates(16e9)
"""Where nobody has given or measured the link. PCIe 3.0 with 16 lanes gives up to 13 GB/s, PCIe 4.0 up to 26."""
