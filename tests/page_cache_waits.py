"""What goes wrong without each wait of copies from the page cache: scenarios for `tests/test_waits.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests import simdevice
from tests.page_cached import Cached, check
from tests.waits import Site

_FILE = "diffusers_omni_offload/streaming/page_cache.py"


def _cached(**options: int) -> Cached:
    return Cached(torch.device("sim", 0), **options)


def a_slot_is_read_for_long() -> None:
    """The device computes with a slot when the next block is to be copied into it."""
    simdevice.configure(mem_bytes_per_s=1e6)
    cached = _cached(slots=1)
    first, second = cached.masters[:2]
    outputs = [cached.run(first), cached.run(second)]
    check(first, outputs[0])
    check(second, outputs[1])
    simdevice.check()


def a_copy_takes_long() -> None:
    """The device computes with a slot before the bytes are there."""
    simdevice.configure(h2d_bytes_per_s=1e6)
    cached = _cached()
    check(cached.masters[0], cached.run(cached.masters[0]))
    simdevice.check()


def copies_have_a_stream_of_their_own() -> None:
    """Without it, nothing goes wrong but the speed: a copy waits for compute that it has nothing to do with."""
    simdevice.configure(trace=1, flops_per_s=1e8)
    cached = _cached()
    matrix = torch.ones(64, 64, device="sim")
    torch.accelerator.synchronize()
    cached.transport.is_ready(cached.masters[0])  # pages are locked
    simdevice.reset_clock()
    torch.mm(matrix, matrix)
    cached.load(cached.masters[0])
    torch.accelerator.synchronize()
    rows = simdevice.trace()
    compute = next(end for name, _, _, end in rows if name == "aten::mm")
    copy = next(begin for name, _, begin, _ in rows if name == "copy_h2d")
    assert copy < compute, f"modelled: a copy begins at {copy} ns, after compute that ends at {compute} ns"


def pages_are_unlocked_after_a_copy() -> None:
    """When weights are given back, the last copy from their pages has to be over."""
    simdevice.configure(h2d_bytes_per_s=1e6)
    cached = _cached()
    cached.load(cached.masters[0])
    cached.transport.release()
    simdevice.check()


#: What fails without each wait.
SCENARIOS: dict[Site, Callable[[], None]] = {
    Site(_FILE, "FromPageCache.load", 0, "copies.wait_event(slot.free)"): a_slot_is_read_for_long,
    Site(_FILE, "FromPageCache.load", 1, "with copies:"): copies_have_a_stream_of_their_own,
    Site(_FILE, "FromPageCache.load", 2, "slot.ready.record(copies)"): a_copy_takes_long,
    Site(_FILE, "FromPageCache.settle", 0, "self._copies.synchronize()"): pages_are_unlocked_after_a_copy,
}
