"""Who records what a pipeline's calls do: its first one for a verdict, and any that the user wants to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers_omni_offload.streaming.recorder import Recorder
from diffusers_omni_offload.streaming.streamer import Streamer

#: Enough forwards of blocks for a verdict.
_ENOUGH = 400


class Records:
    """The recorder that a streamer has at a time.

    Args:
        streamer: what is recorded.

    Attributes:
        first_call: what the first call was recorded by; None before it began to be.
        is_waiting: whether the first call is still to be recorded.
    """

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self.first_call: Recorder | None = None
        self.is_waiting = False

    def start(self) -> None:
        """Record the call that comes next."""
        self.is_waiting = True
        self.first_call = self._streamer.recorder = Recorder(self._streamer.platform, _ENOUGH)

    def stop(self) -> None:
        """The first call was recorded, and is kept; nothing is from now on."""
        self.is_waiting = False
        if self._streamer.recorder is self.first_call:
            self._streamer.recorder = None

    @contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """All that is done in the body is recorded.

        Raises:
            RuntimeError: it is inside of such a body already.
        """
        before = self._streamer.recorder
        if before is not None and before is not self.first_call:
            raise RuntimeError("This pipeline's calls are being recorded already; end the other trace first.")
        recorder = self._streamer.recorder = Recorder(self._streamer.platform)
        try:
            yield recorder
        finally:
            self._streamer.recorder = None
            if self.is_waiting:
                self.start()
