"""Whether the compute waits for the weights, measured with events during a first call."""

from __future__ import annotations

from diffusers_omni_offload.platform import Event, Platform, Stream

#: Enough forwards for a verdict; the events of a first call are the only ones made during a call.
_SAMPLES = 400


class StallMeter:
    """Times how long the compute stream stands still before blocks, in milliseconds of device time.

    Attributes:
        is_measuring: whether `before_wait` and `after_wait` are to be called.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._events: list[Event] = []
        self.is_measuring = self._is_wanted = False

    def start(self) -> None:
        """Measure the calls that begin from here on, each afresh, until `stop` has a verdict."""
        self._is_wanted = self._platform.is_asynchronous

    def restart(self) -> None:
        """A call begins."""
        self._events = []
        self.is_measuring = self._is_wanted

    def before_wait(self, stream: Stream) -> None:
        """The compute stream is about to wait for a block's bytes."""
        self._record(stream)

    def after_wait(self, stream: Stream) -> None:
        """The bytes are there."""
        self._record(stream)
        self.is_measuring = len(self._events) < 2 * _SAMPLES

    def stop(self) -> float | None:
        """The share of the measured time that was spent waiting, the first block's wait aside; None if unknown."""
        self.is_measuring = False
        events, self._events = self._events, []
        if len(events) < 6:
            return None
        self._is_wanted = False
        self._platform.synchronize()
        total = events[1].elapsed_time(events[-1])
        waited = sum(events[i].elapsed_time(events[i + 1]) for i in range(2, len(events) - 1, 2))
        return waited / total if total > 0 else None

    def _record(self, stream: Stream) -> None:
        event = self._platform.event(enable_timing=True)
        event.record(stream)
        self._events.append(event)
