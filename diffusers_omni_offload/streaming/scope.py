"""The time between the start and the end of one call, the only time in which slots are believed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from diffusers_omni_offload.streaming.streamer import Streamer


class CallScope:
    """One pipeline call, or one forward of a streamed component outside of any; re-entrant.

    The outermost entry takes the lock that keeps other threads out, runs the audit and forgets every slot's tag; its
    exit leaves nothing bound and no copy in flight.

    Args:
        streamer: what is streamed.
        audit: makes masters and residents agree with the modules; may raise, and then the scope isn't entered.
        after_call: called once a call has ended without an error.
    """

    def __init__(self, streamer: Streamer, audit: Callable[[], None], after_call: Callable[[], None]) -> None:
        self._streamer, self._audit, self._after_call = streamer, audit, after_call
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether the calling thread is inside this scope."""
        return self._owner == threading.get_ident()

    def refresh(self) -> None:
        """Make what was edited since the call began count: no slot that was filled before is believed after.

        Raises:
            RuntimeError: a block is running.
        """
        with self._lock:
            if self._streamer.is_running:
                raise RuntimeError("refresh() was called while a block is running; call it between forwards.")
            self._streamer.settle()
            self._audit()
            self._streamer.slots.forget()
            self._streamer.require_slots()

    def __enter__(self) -> CallScope:
        self._lock.acquire()
        try:
            if self._depth == 0:
                if self._streamer.is_running:
                    # The last call's end was interrupted itself.
                    self._streamer.settle()
                self._audit()
                self._streamer.begin()
                self._owner = threading.get_ident()
            self._depth += 1
        except BaseException:
            if self._depth == 0:
                self._owner = None
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_outermost = self._depth == 1
        try:
            if is_outermost:
                self._streamer.end()
                if kind is None:
                    self._after_call()
        finally:
            self._depth -= 1
            if is_outermost:
                self._owner = None
            self._lock.release()
