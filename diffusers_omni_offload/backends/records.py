"""Who records what a pipeline's calls do: its first one for a verdict, and any that the user wants to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusers_omni_offload.streaming.recorder import Recorder
from diffusers_omni_offload.streaming.streamer import Streamer

#: Enough forwards of blocks for a verdict.
_ENOUGH = 400


class Records:
    """The recorder that a streamer has at a time.

    Args:
        streamer: what is recorded.
        held: tells how many device bytes are weights.

    Attributes:
        latest: what the latest call that was recorded was recorded by: the first one, or the first since something
            was changed; None before there was one.
        is_waiting: whether a call is still to be recorded.
        counts_peaks: whether the first call is asked for the peaks of device memory, which takes over torch's count.
    """

    def __init__(self, streamer: Streamer, held: Callable[[], int]) -> None:
        self._streamer, self._held = streamer, held
        self.counts_peaks = False
        self.latest: Recorder | None = None
        self._trace: Recorder | None = None
        self.is_waiting = False

    def start(self) -> None:
        """Record the call that comes next."""
        self.is_waiting = True
        if self._trace is None:
            recorder = Recorder(self._streamer.platform, _ENOUGH, self._held, counts_peaks=self.counts_peaks)
            if self.latest is not None:
                recorder.others = self.latest.others  # It may begin in the middle of a call.
            self._record(recorder)
        self.latest = self._streamer.recorder

    def stop(self) -> None:
        """The first call was recorded, and is kept; nothing is from now on."""
        self.is_waiting = False
        if self._trace is None and self._streamer.component_recorder is self.latest:
            self._record(None)

    @contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """All that is done in the body is recorded.

        Raises:
            RuntimeError: it is inside of such a body already.
        """
        if self._trace is not None:
            raise RuntimeError("This pipeline's calls are being recorded already; end the other trace first.")
        self._trace = recorder = Recorder(self._streamer.platform, held=self._held)
        if self.latest is not None:
            recorder.others = self.latest.others
        self._record(recorder)
        if self.is_waiting:
            self.latest = recorder  # It sees all that is needed for a verdict, and more.
        try:
            yield recorder
        finally:
            self._trace = None
            self._record(None)
            if self.is_waiting:
                self.start()

    def _record(self, recorder: Recorder | None) -> None:
        self._streamer.recorder = self._streamer.component_recorder = recorder
