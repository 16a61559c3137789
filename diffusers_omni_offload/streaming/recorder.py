"""Records with events what the device does and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from diffusers_omni_offload.platform import Event, Platform, Stream
from diffusers_omni_offload.streaming.recording import Lane, MemorySample, Span
from diffusers_omni_offload.streaming.slots import Slot

#: So many events are made at once, between forwards: making one takes longer than recording it.
_CHUNK = 4096
_Mark = tuple[Lane, str, Event, Event, int, int]


class _Memory(NamedTuple):
    """Device bytes before, at the most in and after an outermost forward of a component, and how many of the most are
    neither weights nor somebody else's."""

    path: str
    begin: Event
    end: Event
    before: int
    peak: int
    after: int
    activation: int


class Recorder:
    """The blocks' and components' spans on the device's clock, from when it is made on.

    Nothing is waited for until `spans` is asked for.

    Args:
        platform: the device.
        most_blocks: so many forwards of blocks are enough; None records on and on.
        held: tells how many device bytes are weights.
        counts_peaks: whether the peak of allocated memory is wanted of each component: then torch's own count begins
            anew with each.

    Attributes:
        forward: number of the outermost component's forward that runs, or ran last; -1 before the first.
        calls: how many calls have begun; none if it was made inside of one.
        others: device bytes that weren't the pipeline's when the call began.
        steady_from: number of the first forward since residents or slots were last changed.
    """

    def __init__(
        self,
        platform: Platform,
        most_blocks: int | None = None,
        held: Callable[[], int] = lambda: 0,
        *,
        counts_peaks: bool = True,
    ) -> None:
        self._platform, self._held, self._counts_peaks = platform, held, counts_peaks
        self.others = self.calls = 0
        self._most_blocks = most_blocks
        self.forward = -1
        self.steady_from = 0
        self._depth = 0
        self._blocks = 0
        self._events: deque[Event] = deque()
        self._marks: list[_Mark] = []
        self._entered: dict[str, tuple[Event, Event | None]] = {}
        self._memory: list[_Memory] = []
        self._make_events()
        self._origin = self._mark(platform.current_stream())

    @property
    def is_full(self) -> bool:
        """Whether enough blocks were recorded."""
        return self._most_blocks is not None and self._blocks >= self._most_blocks

    # ------------------------------------------------------------------ blocks; called at every one of them

    def enter_when(self, path: str, stream: Stream, ready: Event) -> None:
        """Let `stream` wait for a block's bytes, and record for how long it does: the block is entered."""
        before = self._mark(stream)
        stream.wait_event(ready)
        self._entered[path] = before, self._mark(stream)

    def enter(self, path: str, stream: Stream) -> None:
        """A block that has nothing to wait for is entered."""
        self._entered[path] = self._mark(stream), None

    def leave(self, path: str, stream: Stream) -> None:
        """A block's forward is over."""
        entered = self._entered.pop(path, None)
        if entered is None:
            return  # It was entered before the recording began.
        before, ready = entered
        begin = before
        if ready is not None:
            self._marks.append(("wait", path, before, ready, 0, self.forward))
            begin = ready
        self._marks.append(("compute", path, begin, self._mark(stream), 0, self.forward))
        self._blocks += 1

    def load(self, path: str, copies: Stream, slot: Slot, load: Callable[[Slot, Stream], int]) -> int:
        """Issue what brings a master's bytes into a slot, and record it.

        Args:
            path: what is copied.
            copies: the stream for copies from the host.
            slot: where to.
            load: issues it; returns the bytes that come from this host.

        Returns:
            These bytes.
        """
        # The copy waits for its slot in any case. Done here, that isn't taken for a part of the copy.
        copies.wait_event(slot.free)
        begin = self._mark(copies)
        nbytes = load(slot, copies)
        self._marks.append(("copy", path, begin, self._mark(copies), nbytes, self.forward))
        if slot.writer is not None and slot.writer is not copies:
            self._marks.append(("gather", path, begin, self._mark(slot.writer), slot.buffer.numel(), self.forward))
        return nbytes

    # ------------------------------------------------------------------ calls and components

    def begin_call(self) -> None:
        """A call begins: what is allocated beside weights isn't the pipeline's."""
        self.calls += 1
        self.others = max(0, self._platform.allocated_bytes() - self._held())

    def run_component(
        self, path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """`function(*args, **kwargs)`, an entry point of a component whose weights are where it needs them."""
        if self._depth == 0:
            self.forward += 1
            if len(self._events) < _CHUNK // 2:
                self._make_events()
            if self._counts_peaks:
                self._platform.restart_peak()
        before, known = self._platform.allocated_bytes(), self._platform.peak_bytes()
        begin = self._mark(self._platform.current_stream())
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1
            end = self._mark(self._platform.current_stream())
            self._marks.append(("component", path, begin, end, 0, self.forward))
            if self._depth == 0:
                after, peak = self._platform.allocated_bytes(), self._platform.peak_bytes()
                if not self._counts_peaks and peak <= known:
                    peak = max(before, after)  # What there was before is higher, and hides it.
                self._memory.append(_Memory(path, begin, end, before, peak, after, peak - self._held() - self.others))

    # ------------------------------------------------------------------ results

    def spans(self) -> list[Span]:
        """What was recorded so far, in the order in which it ended; waits for the device."""
        self._platform.synchronize()
        found = []
        for lane, name, begin, end, nbytes, forward in self._marks:
            start = self._seconds(begin)
            found.append(Span(lane, name, start, start + begin.elapsed_time(end) / 1e3, nbytes, forward))
        return sorted(found, key=lambda span: span.end)

    def memory(self) -> list[MemorySample]:
        """Allocated bytes before, at the most in and after each outermost forward of a component; waits for the
        device."""
        self._platform.synchronize()
        samples = []
        for entry in self._memory:
            first, last = self._seconds(entry.begin), self._seconds(entry.end)
            samples += [
                MemorySample(first, entry.before),
                MemorySample((first + last) / 2, entry.peak),
                MemorySample(last, entry.after),
            ]
        return samples

    def components(self) -> set[str]:
        """Paths of the components that ran."""
        return {name for lane, name, *_ in self._marks if lane == "component"}

    def activations(self) -> dict[str, int]:
        """By component: the most device bytes that the pipeline took in its forwards, beside weights."""
        found: dict[str, int] = {}
        for entry in self._memory:
            found[entry.path] = max(found.get(entry.path, 0), entry.activation)
        return found

    @property
    def peak_nbytes(self) -> int:
        """The most bytes allocated in any component's forward, as far as that is known."""
        return max((entry.peak for entry in self._memory), default=0)

    def _seconds(self, event: Event) -> float:
        return self._origin.elapsed_time(event) / 1e3

    def _make_events(self) -> None:
        self._events.extend(self._platform.event(enable_timing=True) for _ in range(_CHUNK))

    def _mark(self, stream: Stream) -> Event:
        event = self._events.popleft() if self._events else self._platform.event(enable_timing=True)
        event.record(stream)
        return event


def waited_share(spans: Sequence[Span]) -> float | None:
    """The share of the time between the first and the last block that the compute stood still, waiting for blocks;
    None if fewer than three were streamed. What the first one waited for doesn't count: nothing ran before it."""
    waits = sorted((span for span in spans if span.lane == "wait"), key=lambda span: span.begin)
    if len(waits) < 3:
        return None
    total = waits[-1].end - waits[0].end
    return sum(span.seconds for span in waits[1:]) / total if total > 0 else None
