"""What recording costs, in real time: little when it is on, one look at an attribute when it is off."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.recorder import Recorder
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.streamer import Streamer

pytestmark = pytest.mark.timing

BLOCKS = 600


def seconds(work: Callable[[], object]) -> float:
    return timeit.timeit(work, number=1)


def test_a_recorded_block_costs_five_microseconds(sim: ModuleType, device: torch.device) -> None:
    """Its wait, its end and its copy: five events, made before, and what is noted of them."""
    sim.configure(race=0)
    platform = Platform(torch.device("sim", 0))
    stream, slot = platform.current_stream(), Slot(64, platform)
    slot.ready.record(stream)

    def load(slot: Slot, copies: object) -> int:
        return 64

    def recorded() -> None:
        for _ in range(BLOCKS):
            recorder.load("block", stream, slot, load)
            recorder.enter_when("block", stream, slot.ready)
            recorder.leave("block", stream)

    def unrecorded() -> None:
        for _ in range(BLOCKS):
            load(slot, stream)
            stream.wait_event(slot.free)
            stream.wait_event(slot.ready)

    found = []
    for _ in range(9):
        recorder = Recorder(platform)
        found.append((seconds(recorded) - seconds(unrecorded)) / BLOCKS * 1e6)
    assert min(found) <= 5, f"{found} us a block"


def test_off_it_costs_a_look_at_an_attribute(sim: ModuleType, device: torch.device) -> None:
    """A million times that branch of `enter` and `leave`."""
    streamer = Streamer(Platform(torch.device("sim", 0)), 2)
    assert streamer.recorder is None
    branch = min(timeit.repeat("if streamer.recorder is None: pass", globals={"streamer": streamer}, number=1_000_000))
    nothing = min(timeit.repeat("if streamer is None: pass", globals={"streamer": streamer}, number=1_000_000))
    assert branch - nothing < 0.1, f"{branch - nothing:.3f} us a time"
