"""A cell of the table: one operation on a resident pipeline of a family and on its offloaded twin."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tests import simdevice
from tests.operations.families import FAMILIES, Family
from tests.operations.operation import OPERATIONS, Operation
from tests.operations.placements import PLACEMENTS, misplaced
from tests.operations.subject import Subject

EQUAL = "equal"
REFUSED = "refused, as without offload"
FAILS = "a call fails, as without offload"
ABSENT = "has none"
WRONG = "wrong"
BEFORE, AFTER = "before", "after"
"""When an operation is prepared, or done if it needs no preparation: before offload is enabled, or after that."""


@dataclass(frozen=True)
class Outcome:
    """Of an operation in a placement. `detail` says what is wrong."""

    result: str
    detail: str = ""


Result = np.ndarray | type[Exception]
"""Of a call: its output, or what it raises."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What a resident pipeline gives after an operation's preparation and in two calls after the operation itself, and
    what that raises."""

    prepared: Result
    changed: tuple[Result, Result]
    refusal: type[Exception] | None

    @property
    def outcome(self) -> Outcome:
        """What an offloaded pipeline comes to that does the same."""
        if self.refusal is not None:
            return Outcome(REFUSED)
        return Outcome(EQUAL if isinstance(self.changed[0], np.ndarray) else FAILS)


def when_in(operation: Operation, family: Family, placement: str) -> str:
    """BEFORE or AFTER: the cells of each operation are half one, half the other."""
    numbers = (list(OPERATIONS).index(operation.name), FAMILIES.index(family), list(PLACEMENTS).index(placement))
    return (BEFORE, AFTER)[sum(numbers) % 2]


def call(subject: Subject) -> np.ndarray | Exception:
    """The output of a call, or what it raised."""
    try:
        return subject.run()
    except Exception as error:
        return error


def perform(operation: Operation, subject: Subject) -> Exception | None:
    """Do it; returns what it raised."""
    try:
        operation.change(subject)
    except Exception as error:
        return error
    return None


def reference(operation: Operation, family: Family, when: str, device: torch.device) -> Reference:
    """The resident pipeline's run. `when` is before or after it is moved to the device."""
    # In float32 it comes to the same.
    return _reference(operation, family, AFTER if operation.dtype is None else when, device)


@functools.cache
def _reference(operation: Operation, family: Family, when: str, device: torch.device) -> Reference:
    """The reference.

    Raises:
        AssertionError: the outputs prove nothing.
    """
    subject = Subject(family, operation.dtype)
    if when == AFTER:
        subject.pipe.to(device)
    for step in operation.prepare:
        step(subject)
    error = None if operation.prepare or when == AFTER else perform(operation, subject)
    subject.pipe.to(device)
    results = [call(subject)]
    if operation.prepare or when == AFTER:
        error = perform(operation, subject)
    results += [call(subject), call(subject)]
    where = f"{operation.name} on {family.name}"
    for result in results:
        if isinstance(result, np.ndarray):
            assert np.isfinite(result).all() and np.ptp(result) > 0, f"{where}: the output says nothing"
    if operation.shows is not None and error is None and (operation.prepare or when == AFTER):
        outputs = [result for result in results[:2] if isinstance(result, np.ndarray)]
        assert len(outputs) == 2, f"{where}: {results}"
        assert np.array_equal(*outputs) != operation.shows, f"{where}: whether it shows isn't as declared"
    prepared, first, second = (type(result) if isinstance(result, Exception) else result for result in results)
    return Reference(prepared, (first, second), None if error is None else type(error))


def outcome_of(operation: Operation, family: Family, placement: str, device: torch.device) -> Outcome:
    """Do the operation to an offloaded pipeline and compare."""
    if operation.families and family.name not in operation.families:
        return Outcome(ABSENT)
    when = when_in(operation, family, placement)
    expected = reference(operation, family, when, device)
    simdevice.clear_hazards()
    for wrong in _differences(operation, Subject(family, operation.dtype), placement, when, expected, device):
        return Outcome(WRONG, f"{operation.name} on {family.name}, {placement}, {when} enabling: {wrong}")
    return expected.outcome


def _differences(
    operation: Operation, subject: Subject, placement: str, when: str, expected: Reference, device: torch.device
) -> Iterator[str]:
    """What is wrong, in the order in which it shows."""
    pipe, options = subject.pipe, PLACEMENTS[placement]
    if when == AFTER:
        pipe.enable_omni_offload(**options)
    for step in operation.prepare:
        step(subject)
    if when == BEFORE:
        if not operation.prepare:
            yield from _refusal(operation, subject, expected)
        pipe.enable_omni_offload(**options)
    if operation.prepare:
        yield from _call(subject, expected.prepared, device, "prepared")
    elif when == AFTER:
        subject.run()
    if operation.prepare or when == AFTER:
        yield from _refusal(operation, subject, expected)
    yield from _call(subject, expected.changed[0], device, "first call")
    yield from _call(subject, expected.changed[1], device, "second call")


def _refusal(operation: Operation, subject: Subject, expected: Reference) -> Iterator[str]:
    error = perform(operation, subject)
    if (None if error is None else type(error)) != expected.refusal:
        wanted = "nothing" if expected.refusal is None else expected.refusal.__name__
        yield f"it raises {error!r}, and {wanted} without offload"


def _call(subject: Subject, expected: Result, device: torch.device, what: str) -> Iterator[str]:
    found = call(subject)
    if isinstance(found, Exception):
        if type(found) is not expected:
            yield f"{what} raises {found!r}"
    elif not isinstance(expected, np.ndarray):
        yield f"{what} raises nothing, and {expected.__name__} without offload"
    elif found.dtype != expected.dtype or found.shape != expected.shape:
        yield f"{what}: the output is of another kind"
    elif not np.array_equal(found, expected):
        yield f"{what}: {int((found != expected).sum())} of {found.size} values differ"
    if simdevice.hazards():
        yield f"{what}: {simdevice.hazards()[:2]}"
    wrong = misplaced(subject.pipe, device)
    if wrong:
        yield f"{what}: {len(wrong)} weights aren't where they belong: {wrong[:2]}"
