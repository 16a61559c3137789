"""What ranks tell each other on the host, before they do something that all of them have to do alike.

Through the store of the process group and not by collectives: a rank that doesn't come is an error then and not a hang,
a rank that failed says so, and the device isn't kept waiting.
"""

from __future__ import annotations

import json
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

_POLL_SECONDS = 0.01
"""The longest pause between two looks into the store. It is looked into again and again because the store's own waits
log each timeout, and hold up everybody else who uses the connection."""
_LOOKING_SECONDS = 0.1
"""How long one call looks."""
_GRACE_SECONDS = 2.0
"""What a call of the store may take when the time is over."""
_LATE_SECONDS = 1.0
"""A rank whose collective runs into the group's timeout comes only after that, and says what happened."""
_MISSING = object()

#: Default process group -> what an agreement is called -> the number of its next exchange. Numbers go on from one
#: agreement to the next of that name, so that none finds what an earlier one has left.
_numbers: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


class Ranks(Protocol):
    """Who agrees; see `WeightGroup`."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def process_group(self) -> Any: ...


class AgreementError(RuntimeError):
    """The ranks of a group can't go on together."""


class RanksDisagree(AgreementError):
    """Ranks differ in what has to be equal, or they are at different points."""


class RankMissing(AgreementError):
    """`ranks` (global) didn't come in time; none are named if the store itself is gone."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankFailed(AgreementError):
    """`rank` (global) failed and said so."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Agreement:
    """Exchanges of facts between the ranks of a group, each of which makes the same ones in the same order.

    An exchange takes 0.4 ms for 2 ranks and 0.9 ms for 4 (measured: medians, processes of one host with two shared
    cores, the store on TCP), beside the time until the last rank is there.

    Args:
        group: the ranks. A group of one agrees with itself, without a store.
        name: what it is about. Agreements of the same name and ranks go on from one to the next.
        timeout: seconds that ranks wait for each other; None takes the process group's timeout.
    """

    def __init__(self, group: Ranks, name: str, timeout: float | None = None) -> None:
        self.group = group
        self.timeout = self._lateness = 0.0
        self._has_failed = False
        if len(group.ranks) == 1:
            return
        self.timeout = _timeout_of(group.process_group) if timeout is None else timeout
        self._lateness = _LATE_SECONDS if timeout is None else 0.0
        self._key = f"omni offload/{name}/{'-'.join(map(str, group.ranks))}"
        self._store = _own_store()
        self._calls = _Calls()
        self._own_keys: list[str] = []

    def exchange(self, facts: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
        """The facts of all ranks, in the order of the group. They are as JSON has them: tuples become lists.

        Args:
            facts: of this rank.
            what: what the ranks are about to do, the same on each: "the call of WanPipeline".

        Raises:
            RankMissing: some didn't come within the timeout, or the store is gone.
            RankFailed: one of them failed; this doesn't wait for the others.
            RanksDisagree: they are about to do different things.
        """
        if len(self.group.ranks) == 1:
            own: dict[str, Any] = json.loads(json.dumps(dict(facts)))
            return [own]
        self._has_failed = False
        number = self._next_number()
        try:
            answers = self._answers(number, {"what": what, "facts": dict(facts)}, what)
        except BaseException as error:
            if not self._has_failed:
                self._leave_note(number, error)
            raise
        points = {rank: answer["what"] for rank, answer in zip(self.group.ranks, answers, strict=True)}
        if len(set(points.values())) > 1:
            raise RanksDisagree(
                f"The ranks are at different points: {_by_value(points)}. Each rank has to make the same calls, in the "
                "same order."
            )
        return [answer["facts"] for answer in answers]

    def require_equal(self, facts: Mapping[str, Any], what: str) -> None:
        """Exchange facts that have to be equal; see `exchange`.

        Raises:
            RanksDisagree: they aren't, with the values and the ranks that have them, on each rank at once.
        """
        of_ranks = dict(zip(self.group.ranks, self.exchange(facts, what), strict=True))
        differences = []
        for fact in dict.fromkeys(fact for its_facts in of_ranks.values() for fact in its_facts):
            values = {rank: its_facts.get(fact, _MISSING) for rank, its_facts in of_ranks.items()}
            first, *others = values.values()
            if any(value != first for value in others):
                differences.append(f"{fact} is {_by_value(values)}")
        if differences:
            raise RanksDisagree(
                f"The ranks differ in {what}: {'; '.join(differences)}. Make them the same on each rank."
            )

    def fail(self, error: BaseException, *, again: bool = False) -> None:
        """Say that this rank failed, so that the others' next exchange raises at once. Never raises.

        Nothing needs to be said after an exchange that raised: the others know. `again` says it in place of one more
        exchange, for a rank that won't make any.
        """
        if len(self.group.ranks) > 1 and (again or not self._has_failed):
            self._leave_note(self._next_number(), error)

    def _answers(self, number: int, answer: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
        keys = self._keys(number)
        content = json.dumps(answer)
        deadline = time.monotonic() + self.timeout + self._lateness
        self._own_keys.append(keys[self.group.rank])
        try:
            answers = self._calls.make(partial(self._give, keys, content), deadline)
            while answers is None:
                if time.monotonic() > deadline and (missing := self._missing(keys)):
                    raise RankMissing(
                        f"{_ranks(missing)} didn't come to {what} within {self.timeout:g} s. Look for an error of "
                        "theirs, and see that each rank makes the same calls.",
                        missing,
                    )
                answers = self._calls.make(partial(self._take, keys), deadline)
            self._raise_notes(answers)
        except AgreementError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise RankMissing(
                f"The ranks' store doesn't answer any more, at {what} ({error}). The process that holds it is gone: "
                "that of rank 0, or the launcher. The others can't go on: start all of them anew."
            ) from error
        return answers

    def _give(self, keys: Sequence[str], content: str) -> list[dict[str, Any]] | None:
        """Put this rank's answer into the store; and see `_take`."""
        self._store.set(keys[self.group.rank], content)
        return self._take(keys)

    def _take(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """All ranks' answers, or None if they aren't there soon."""
        start = time.monotonic()
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited > _LOOKING_SECONDS:
                return None
            # An eighth of what it took so far is lost at most.
            time.sleep(min(waited / 8, _POLL_SECONDS))
        answers = [json.loads(value) for value in self._store.multi_get(keys)]
        if not any("failed" in answer for answer in answers):
            # All have come here, so all are done with what was before.
            while self._own_keys[0] != keys[self.group.rank]:
                self._store.delete_key(self._own_keys.pop(0))
        return answers

    def _missing(self, keys: Sequence[str]) -> list[int]:
        there = self._calls.make(lambda: [self._store.check([key]) for key in keys], time.monotonic())
        return [rank for rank, is_there in zip(self.group.ranks, there, strict=True) if not is_there]

    def _raise_notes(self, answers: Sequence[Mapping[str, Any]]) -> None:
        for answer in answers:
            if "failed" not in answer:
                continue
            self._has_failed = True
            if answer["missing"] is not None:
                raise RankMissing(answer["text"], answer["missing"])
            raise RankFailed(f"Rank {answer['failed']} failed: {answer['text']}", answer["failed"])

    def _leave_note(self, number: int, error: BaseException) -> None:
        """In place of all ranks' answers, so that nobody waits for those who haven't come yet."""
        self._has_failed = True
        missing = list(error.ranks) if isinstance(error, RankMissing) else None
        text = str(error) if missing is not None else f"{type(error).__name__}: {error}"
        own = self.group.ranks[self.group.rank]
        note = json.dumps({"failed": own, "text": text, "missing": missing})
        keys = self._keys(number)
        self._own_keys.append(keys[self.group.rank])

        def leave() -> None:
            # Its own goes first: it is the one that no other rank overwrites.
            for key in sorted(keys, key=lambda key: key != keys[self.group.rank]):
                self._store.set(key, note)

        with suppress(RuntimeError, TimeoutError):
            self._calls.make(leave, time.monotonic())

    def _next_number(self) -> int:
        numbers = _numbers.setdefault(dist.group.WORLD, {})
        number = numbers.get(self._key, 0)
        numbers[self._key] = number + 1
        return number

    def _keys(self, number: int) -> list[str]:
        return [f"{self._key}/{number}/{rank}" for rank in self.group.ranks]


class _Calls:
    """Calls of the store, made by a thread of its own: one of a store whose machine has gone never comes back."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._is_stuck = False
        threading.Thread(target=_work, args=(self._jobs,), name="omni offload agreement", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def make(self, call: Callable[[], T], deadline: float) -> T:
        """What a call returns or raises. TimeoutError if it does neither until `deadline`, but `_GRACE_SECONDS` at
        least, and at once for all later calls then."""
        done: SimpleQueue[Any] = SimpleQueue()
        if not self._is_stuck:
            self._jobs.put((call, done))
            try:
                result, error = done.get(timeout=max(deadline - time.monotonic(), _GRACE_SECONDS))
            except Empty:
                self._is_stuck = True
            else:
                if error is not None:
                    raise error
                return result
        raise TimeoutError("no answer")


def _work(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        call, done = job
        try:
            done.put((call(), None))
        except Exception as error:
            done.put((None, error))
        # The thread keeps nothing alive between two calls.
        del job, call, done


def _own_store() -> Any:
    """The store that all ranks share, by a connection of our own: others' waits block theirs."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _timeout_of(process_group: Any) -> float:
    """The seconds that a process group's collectives have."""
    for device in getattr(process_group, "_device_types", ()):
        with suppress(AttributeError, RuntimeError):
            seconds: float = process_group._get_backend(device).options._timeout.total_seconds()
            return seconds
    default: float = _own_store().timeout.total_seconds()
    return default


def _by_value(values: Mapping[int, Any]) -> str:
    """ "4 on ranks 0 and 2, 5 on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault("not given" if value is _MISSING else _repr(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(its).lower()}" for value, its in ranks.items())


def _repr(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    short.maxlist = short.maxdict = 12
    return short.repr(value)


def _ranks(ranks: Collection[int]) -> str:
    """ "Rank 1", "Ranks 0, 1 and 3"."""
    *most, last = [str(rank) for rank in ranks]
    return f"Ranks {', '.join(most)} and {last}" if most else f"Rank {last}"
