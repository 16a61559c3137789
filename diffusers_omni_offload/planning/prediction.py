"""What a choice takes: time of a step and of a call, and device and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diffusers_omni_offload.planning.choice import Choice


@dataclass(frozen=True)
class StepPrediction:
    """One forward of a component in the steady state of a call, in seconds."""

    seconds: float
    compute_seconds: float
    copy_seconds: float

    @property
    def bound(self) -> str:
        """What sets the time: "compute" or "transfer"."""
        return "transfer" if self.copy_seconds > self.compute_seconds else "compute"


@dataclass(frozen=True)
class Prediction:
    """What a choice takes.

    Attributes:
        choice: the choice.
        steps: path of a component -> one of its forwards.
        call_seconds: a call, with all swaps and forwards; compute that isn't known counts as 0.
        peak_nbytes: device bytes at the most.
        peak_in: path of the component that runs then.
        resident_nbytes: device bytes that stay between calls.
        host_nbytes: host bytes of offloaded weights, page-locked if they may be.
        moved_nbytes: bytes that a call copies to the device.
    """

    choice: Choice
    steps: Mapping[str, StepPrediction]
    call_seconds: float
    peak_nbytes: int
    peak_in: str
    resident_nbytes: int
    host_nbytes: int
    moved_nbytes: int
