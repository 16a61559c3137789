"""The time between the start and the end of one call, the only time in which slots are believed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.streaming.stages import Stages
from diffusers_omni_offload.streaming.streamer import Streamer

#: How long a thread waits for another one's call before it says so, and how often it looks, in seconds.
_PATIENCE, _GLANCE = 60.0, 1.0


class CallScope:
    """One pipeline call, or one forward of an offloaded component outside of any; re-entrant in its thread.

    The outermost `opened` keeps other threads out, runs the audit and forgets every slot's tag; its end leaves nothing
    bound, no copy in flight and no swapped component on the device. Another thread waits for it, unless the thread that
    opened the scope has ended. An interrupt (Ctrl-C) at any point leaves a scope that can be opened again.

    Args:
        streamer: what is streamed.
        stages: what is swapped.
        audit: makes masters and residents agree with the modules, and returns whether they didn't; may raise, and then
            the scope isn't opened.
        after_call: called once a call has ended without an error.
        call_failed: called once one has ended with an error.
    """

    def __init__(
        self,
        streamer: Streamer,
        stages: Stages,
        audit: Callable[[], bool],
        after_call: Callable[[], None],
        call_failed: Callable[[], None],
    ) -> None:
        self._streamer, self._stages = streamer, stages
        self._audit, self._after_call, self._call_failed = audit, after_call, call_failed
        # Not an RLock: a generator may leave the scope on another thread than the one that it entered it on.
        self._lock, self._takeover_lock = threading.Lock(), threading.Lock()
        self._owner: threading.Thread | None = None
        self._token: object = None
        self._is_changing = False
        self._is_settled = True

    @property
    def call(self) -> object:
        """Something that stands for the call that is running: another one for each; None between calls."""
        return self._token

    @property
    def is_open(self) -> bool:
        """Whether the calling thread is inside this scope."""
        return self._owner is threading.current_thread()

    def refresh(self) -> None:
        """Make what was edited since the call began count: no slot that was filled before is believed after.

        Raises:
            RuntimeError: a block or a swapped component is running.
        """
        if not self.is_open:
            return  # The next call looks at the weights when it begins.
        if self._streamer.is_running or self._stages.is_running:
            raise RuntimeError(
                "refresh() was called while a block or a swapped component is running; call it between forwards."
            )
        self._streamer.settle()
        self._audit()
        self._distrust_slots()

    @contextmanager
    def edits(self) -> Iterator[None]:
        """Between forwards of a call, the body may edit weights: no copy is in flight meanwhile.

        What it replaces counts from then on; what it edits in place does after `refresh()`.
        """
        self._streamer.settle()
        yield
        if self._audit():
            self._distrust_slots()

    def _distrust_slots(self) -> None:
        """Believe nothing that was loaded before; a block that grew may need larger slots."""
        self._stages.give_up_all()
        self._streamer.slots.forget()
        self._streamer.require_slots()

    def require_closed(self, what: str) -> None:
        """`exclusive` for an instant: refuse if a call is running."""
        with self.exclusive(what):
            pass

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Keep every call out for a change of the whole setup.

        Args:
            what: what is about to be done, for the message.

        Raises:
            RuntimeError: a call is running, in this thread or another.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"Offload can't be {what} while a call is running: it is still using the slots.")
        try:
            self._is_changing = True
            yield
        finally:
            self._is_changing = False
            self._lock.release()

    @contextmanager
    def opened(self, prepare: Callable[[], None] | None = None) -> Iterator[None]:
        """Be inside the scope for the body.

        Args:
            prepare: run first if this opens the scope, with other threads kept out already.
        """
        if self.is_open:
            yield
            return
        token, has_failed = object(), True
        # Two of them, since an interrupt may cut the first short, at its first line even.
        try:
            try:
                self._begin(token, prepare)
                yield
                has_failed = False
            finally:
                if self._token is token:
                    self._end(has_failed)
        finally:
            if self._token is token:
                self._close()

    def _begin(self, token: object, prepare: Callable[[], None] | None) -> None:
        self._acquire()
        self._token = token
        if not self._is_settled:
            self._streamer.settle()
            self._stages.give_up_all()
        if prepare is not None:
            prepare()
        self._audit()
        self._is_settled = False
        self._streamer.begin()
        self._owner = threading.current_thread()

    def _end(self, has_failed: bool) -> None:
        self._streamer.end()
        self._stages.give_up_all()
        self._is_settled = True
        if has_failed:
            self._call_failed()
        else:
            self._after_call()
        self._close()

    def _close(self) -> None:
        self._owner = self._token = None
        self._lock.release()

    def _acquire(self) -> None:
        waited, before = 0.0, None
        while not self._lock.acquire(timeout=_GLANCE):
            # One thread at a time may take over, and only what it has seen abandoned for as long as a glance: a thread
            # that waits is told late that its time is up, and another one may have come and gone meanwhile.
            with self._takeover_lock:
                if self._lock.acquire(blocking=False):
                    return
                owner, seen = self._owner, (self._token, self._owner)
                if seen == before and self._is_abandoned():
                    if owner is not None:
                        logger.warning("The thread %r ended inside a call; its call is given up.", owner.name)
                    self._token, self._owner = object(), None
                    return
                before = seen
            waited += _GLANCE
            if waited >= _PATIENCE:
                waited = 0.0
                logger.warning(
                    "Waiting for the thread %r, which is inside a call of a pipeline that shares these weights.",
                    owner.name if owner is not None else "(unknown)",
                )

    def _is_abandoned(self) -> bool:
        """Whether the lock is nobody's: its thread has ended, or was interrupted before it could say that it has it."""
        if self._token is None:
            return not self._is_changing
        return self._owner is not None and not self._owner.is_alive()
