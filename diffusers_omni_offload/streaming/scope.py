"""The time between the start and the end of one call, the only time in which slots are believed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.streaming.streamer import Streamer

#: How long a thread waits for another one's call before it says so, in seconds.
_PATIENCE = 60.0


class CallScope:
    """One pipeline call, or one forward of a streamed component outside of any; re-entrant in its thread.

    The outermost entry keeps other threads out, runs the audit and forgets every slot's tag; its exit leaves nothing
    bound and no copy in flight. Another thread waits for it, unless the thread that opened the scope has ended.

    Args:
        streamer: what is streamed.
        audit: makes masters and residents agree with the modules, and returns whether they didn't; may raise, and then
            the scope isn't entered.
        after_call: called once a call has ended without an error.
    """

    def __init__(self, streamer: Streamer, audit: Callable[[], bool], after_call: Callable[[], None]) -> None:
        self._streamer, self._audit, self._after_call = streamer, audit, after_call
        # Not an RLock: a generator may leave the scope on another thread than the one that it entered it on.
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether the calling thread is inside this scope."""
        return self._owner is threading.current_thread()

    def refresh(self) -> None:
        """Make what was edited since the call began count: no slot that was filled before is believed after.

        Raises:
            RuntimeError: a block is running.
        """
        if not self.is_open:
            return  # The next call looks at the weights when it begins.
        if self._streamer.is_running:
            raise RuntimeError("refresh() was called while a block is running; call it between forwards.")
        self._streamer.settle()
        self._audit()
        self._streamer.slots.forget()
        self._streamer.require_slots()

    @contextmanager
    def edits(self) -> Iterator[None]:
        """Between forwards of a call, the body may edit weights: no copy is in flight meanwhile.

        What it replaces counts from then on; what it edits in place does after `refresh()`.
        """
        self._streamer.settle()
        yield
        if self._audit():
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
            yield
        finally:
            self._lock.release()

    @contextmanager
    def preparing(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Enter the scope; if that opens it, run `prepare` first, with other threads kept out already."""
        with ExitStack() as stack:
            self._enter(prepare)
            stack.push(self.__exit__)
            yield

    def __enter__(self) -> CallScope:
        self._enter(None)
        return self

    def _enter(self, prepare: Callable[[], None] | None) -> None:
        if self.is_open:
            self._depth += 1
            return
        self._acquire()
        try:
            if prepare is not None:
                prepare()
            if self._streamer.is_running:
                # The last call's end was interrupted itself.
                self._streamer.settle()
            self._audit()
            self._streamer.begin()
        except BaseException:
            self._lock.release()
            raise
        self._depth = 1
        self._owner = threading.current_thread()

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

    def _acquire(self) -> None:
        while not self._lock.acquire(timeout=_PATIENCE):
            owner = self._owner
            if owner is not None and not owner.is_alive():
                logger.warning("The thread %r ended inside a call; its call is given up.", owner.name)
                self._depth, self._owner = 0, None
                self._streamer.end()
                return
            logger.warning(
                "Waiting for the thread %r, which is inside a call of a pipeline that shares these weights.",
                owner.name if owner is not None else "(unknown)",
            )
