"""What goes wrong without each wait of gathering: scenarios for `tests/test_waits.py`.

One rank is enough: its collectives are work of a stream like any other rank's.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch

from tests import simdevice
from tests.gathering import Gathered, one_rank
from tests.waits import Site

_GATHER = "diffusers_omni_offload/streaming/gather.py"
_STREAMER = "diffusers_omni_offload/streaming/streamer.py"

#: Modelled seconds that a collective takes at least, if it is to be slow.
_LATE = 0.01


def _alone(scenario: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(scenario)
    def run() -> None:
        with one_rank():
            scenario()

    return run


@_alone
def a_gather_is_slow() -> None:
    """A block is read before the other ranks' pieces have arrived, if anything lets it be."""
    simdevice.configure(fabric_latency_s=_LATE)
    Gathered().check([0, 1, 2, 3, 0, 1])
    simdevice.check()


@_alone
def a_piece_is_copied_slowly() -> None:
    """A rank's own piece is gathered before it is there, if anything lets it be."""
    simdevice.configure(h2d_bytes_per_s=1e6)
    Gathered().check([0, 1, 2, 3, 0, 1])
    simdevice.check()


@_alone
def blocks_compute_for_long() -> None:
    """A slot is overwritten while it is read, if anything lets it be."""
    simdevice.configure(flops_per_s=1e7)
    Gathered().check([0, 1, 2, 3, 0, 1])
    simdevice.check()


@_alone
def slots_are_given_back_after_a_gather_in_vain() -> None:
    """A call that is longer than the last one prefetches at its end what nobody reads."""
    simdevice.configure(fabric_latency_s=_LATE)
    gathered = Gathered()
    gathered.check([0, 1])
    gathered.check([0, 1, 2])
    gathered.streamer.release_slots()
    gc.collect()
    simdevice.check()


@_alone
def a_block_is_held_between_calls() -> None:
    """Its bytes are read on the current stream, as by `restore`."""
    simdevice.configure(fabric_latency_s=_LATE)
    gathered = Gathered()
    with gathered.streamer.held(1) as buffer:
        read = buffer[: gathered.masters[1].nbytes].clone()
    with gathered.streamer.held(1) as buffer:
        gathered.masters[1].restore(buffer)  # type: ignore[attr-defined]
    views = gathered.masters[1].views_on(read.cpu())
    assert all(torch.equal(tensor, view) for tensor, view in views), "wrong values"
    simdevice.check()


@_alone
def a_slot_is_taken_while_it_is_gathered_in_vain() -> None:
    """Block 1 is expected after block 0, and doesn't run; nobody has waited for it when block 3 takes its slot."""
    simdevice.configure(fabric_latency_s=_LATE)
    Gathered().check([0, 2, 3])
    simdevice.check()


#: What fails without each wait.
SCENARIOS: dict[Site, Callable[[], None]] = {
    Site(_GATHER, "Gather.load", 0, "copies.wait_event(slot.free)"): blocks_compute_for_long,
    Site(_GATHER, "Gather.load", 1, "with copies:"): a_piece_is_copied_slowly,
    Site(_GATHER, "Gather.load", 2, "self._copied.record(copies)"): a_piece_is_copied_slowly,
    Site(_GATHER, "Gather.load", 3, "self._stream.wait_event(self._copied)"): a_piece_is_copied_slowly,
    Site(_GATHER, "Gather.load", 4, "with self._stream:"): a_gather_is_slow,
    Site(_GATHER, "Gather.load", 5, "slot.ready.record(self._stream)"): a_gather_is_slow,
    Site(_GATHER, "Gather.settle", 0, "self._stream.synchronize()"): slots_are_given_back_after_a_gather_in_vain,
    Site(
        _STREAMER, "Streamer.held", 0, "self.platform.current_stream().wait_event(slot.ready)"
    ): a_block_is_held_between_calls,
    Site(
        _STREAMER, "Streamer._load", 0, "self._copies.wait_event(slot.ready)"
    ): a_slot_is_taken_while_it_is_gathered_in_vain,
}
