"""What goes wrong without each wait of staging: scenarios for `tests/test_waits.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tests import simdevice
from tests.staged import FileMaster, Gate, Stage, eventually
from tests.waits import Site

_READER = "diffusers_omni_offload/streaming/reader.py"
_STAGING = "diffusers_omni_offload/streaming/staging.py"


def _stage(**options: int) -> Stage:
    return Stage(torch.device("sim", 0), **options)


def _check(*outputs: tuple[FileMaster, torch.Tensor]) -> None:
    for master, output in outputs:
        assert torch.equal(output.cpu(), master.expected), "wrong values"
    simdevice.check()


def _copies_are_late(rate: float = 1e6) -> None:
    simdevice.configure(h2d_bytes_per_s=rate)


def a_buffer_is_read_into_again() -> None:
    """The copy from there is in flight, and hasn't begun, when the next master is to be read."""
    a, b, stage = FileMaster(0), FileMaster(1), _stage(count=1)
    slot = stage.load(a)
    stage.staging.expect([b])
    eventually(lambda: stage.staging.is_ready(b))
    _check((a, stage.compute(slot, a)), (b, stage.run(b)))


def a_buffer_is_replaced_by_a_larger_one() -> None:
    """Its pages are unlocked while it is being copied."""
    a, b, stage = FileMaster(0, 1000), FileMaster(1, 4096), _stage(count=1)
    slot = stage.load(a)
    stage.staging.expect([b])
    _check((a, stage.compute(slot, a)), (b, stage.run(b)))


def a_read_is_slow() -> None:
    """Its bytes are copied before they are there."""
    a, stage = FileMaster(0, seconds=0.05), _stage()
    stage.staging.expect([a])
    _check((a, stage.run(a)))


def a_slot_is_read_for_long() -> None:
    """The device computes with a slot when the next master is ready to be copied into it."""
    simdevice.configure(mem_bytes_per_s=1e6)
    a, b, stage = FileMaster(0), FileMaster(1), _stage(slots=1)
    _check((a, stage.run(a)), (b, stage.run(b)))


def a_copy_takes_long() -> None:
    """The device computes with a slot before the bytes are there."""
    _copies_are_late()
    a, stage = FileMaster(0), _stage()
    _check((a, stage.run(a)))


def copies_have_a_stream_of_their_own() -> None:
    """Without it, nothing goes wrong but the speed: a copy waits for compute that it has nothing to do with."""
    simdevice.configure(trace=1, flops_per_s=1e8)
    a, stage = FileMaster(0), _stage()
    matrix = torch.ones(64, 64, device="sim")
    torch.accelerator.synchronize()
    simdevice.reset_clock()
    torch.mm(matrix, matrix)
    stage.load(a)
    torch.accelerator.synchronize()
    rows = simdevice.trace()
    compute = next(end for name, _, _, end in rows if name == "aten::mm")
    copy = next(begin for name, _, begin, _ in rows if name == "copy_h2d")
    assert copy < compute, f"modelled: a copy begins at {copy} ns, after compute that ends at {compute} ns"


def a_call_ends_with_a_read_under_way() -> None:
    """What was expected isn't needed any more, and its file may be replaced."""
    a, gate, stage = FileMaster(0), Gate(), _stage()
    a.during = gate
    stage.staging.expect([a])
    assert gate.reached.wait(10)
    threading.Timer(0.05, gate.opened.set).start()
    stage.staging.settle()
    assert gate.opened.is_set(), "wrong values may be read: the file is being read still"


def buffers_are_given_back_after_a_copy() -> None:
    """Their pages are unlocked when the call is over; its last copy has to be over, too."""
    _copies_are_late()
    a, stage = FileMaster(0), _stage()
    stage.load(a)
    stage.staging.release()
    simdevice.check()


#: What fails without each wait.
SCENARIOS: dict[Site, Callable[[], None]] = {
    Site(_READER, "Reader.run", 0, "read.copied.synchronize()"): a_buffer_is_read_into_again,
    Site(_READER, "Reader.drain", 0, "turn.wait()"): a_call_ends_with_a_read_under_way,
    Site(_STAGING, "_Buffer.require", 0, "self.copied.synchronize()"): a_buffer_is_replaced_by_a_larger_one,
    Site(_STAGING, "Staging.load", 0, "read.done.wait()"): a_read_is_slow,
    Site(_STAGING, "Staging.load", 1, "copies.wait_event(slot.free)"): a_slot_is_read_for_long,
    Site(_STAGING, "Staging.load", 2, "with copies:"): copies_have_a_stream_of_their_own,
    Site(_STAGING, "Staging.load", 3, "buffer.copied.record(copies)"): a_buffer_is_read_into_again,
    Site(_STAGING, "Staging.load", 4, "slot.ready.record(copies)"): a_copy_takes_long,
    Site(_STAGING, "Staging.settle", 0, "self._copies.synchronize()"): buffers_are_given_back_after_a_copy,
}
