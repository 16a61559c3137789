"""How fast this machine's link is, measured."""

from __future__ import annotations

import torch

from diffusers_omni_offload.planning.costs import Rates
from diffusers_omni_offload.platform import Platform, on_device
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget

#: A large copy shows the rate, a small one what each copy takes besides.
_LARGE, _SMALL = 64 << 20, 256
_ROUNDS = 4


def measure_link(platform: Platform, nbytes: int = _LARGE) -> Rates:
    """Copies from page-locked host memory to the device, timed on the device's clock. Takes some milliseconds, and
    `nbytes` of both memories meanwhile.

    Args:
        platform: the device.
        nbytes: bytes of a large copy; fewer, if the device's memory is short.
    """
    nbytes = min(nbytes, max(platform.free_bytes() // 4, _SMALL))
    with on_device(platform.device), torch.inference_mode(False):
        host = HostBuffer(nbytes, platform, PinnedBudget(True))
        host.bytes.zero_()
        target = torch.empty(nbytes, dtype=torch.uint8, device=platform.device)
        large, small = (_seconds(platform, host.bytes[:size], target[:size]) for size in (nbytes, _SMALL))
        host.unpin()
    latency = min(max(small, 0.0), 1e-3)
    # A clock that is too coarse for the difference shows the rate of the whole copy.
    seconds = large - latency if large > 2 * latency else large
    return Rates(nbytes / max(seconds, 1e-9), latency, "measured")


def _seconds(platform: Platform, source: torch.Tensor, target: torch.Tensor) -> float:
    """The shortest of some copies."""
    stream, times = platform.current_stream(), []
    for _ in range(_ROUNDS):
        begin, end = platform.event(enable_timing=True), platform.event(enable_timing=True)
        begin.record(stream)
        target.copy_(source, non_blocking=True)
        end.record(stream)
        platform.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)
