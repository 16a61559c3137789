"""What becomes of a transformer class in layer mode: one run of it on the simulated device, beside the resident run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests import simdevice
from tests.equality import scale
from tests.zoo.alone import AlonePipeline, are_equal, are_meaningful, build_alone
from tests.zoo.registry import TRANSFORMERS, Arguments

EQUAL = "equal"
REFUSED = "refused"
NOT_CONSTRUCTIBLE = "not constructible"
WRONG = "wrong"
CALLS = 3


@dataclass(frozen=True)
class Outcome:
    """Of one class.

    Attributes:
        result: EQUAL, REFUSED, NOT_CONSTRUCTIBLE or WRONG.
        detail: the sentence of a refusal or an exception, or what is wrong.
        containers: path of each container -> the number of its blocks that are streamed.
        notes: blocks that stay on the device, and why.
        inert: paths of streamed blocks whose scaling the output doesn't show.
        demand_loads: loads of one more call that nothing had asked for before they were needed.
    """

    result: str
    detail: str = ""
    containers: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    demand_loads: int = 0


def outcome_of(class_name: str, device: torch.device) -> Outcome:
    """Offload a tiny transformer of this class in layer mode and compare.

    Raises:
        KeyError: nobody builds this class.
    """
    build = TRANSFORMERS[class_name]
    try:
        resident, arguments = build_alone(build)
    except Exception as error:
        return Outcome(NOT_CONSTRUCTIBLE, _sentence(error))
    resident.to(device)
    expected = [resident(arguments()) for _ in range(CALLS)]
    if not all(map(are_meaningful, expected)) or not are_equal(expected[0], expected[-1]):
        return Outcome(WRONG, "the resident run is constant, not finite, or not the same from call to call")
    del resident
    pipe, arguments = build_alone(build)
    try:
        handle = pipe.enable_omni_offload("layer")  # type: ignore[attr-defined]
    except (ValueError, TypeError, RuntimeError) as error:
        return Outcome(REFUSED, str(error))
    containers = Counter(path.rpartition(".")[0] for path, _ in handle.plan.streamed_blocks())
    found = Outcome(
        EQUAL,
        containers=tuple((path.removeprefix("transformer."), count) for path, count in containers.items()),
        notes=tuple(note for note in handle.plan.notes if "stays on the device" in note),
    )
    wrong = _difference(pipe, arguments, expected)
    if wrong:
        return dataclasses.replace(found, result=WRONG, detail=wrong)
    before = handle.demand_loads
    pipe(arguments())
    found = dataclasses.replace(found, demand_loads=handle.demand_loads - before)
    inert = _inert_blocks(pipe, arguments, expected[0])
    if not are_equal(pipe(arguments()), expected[0]):
        return dataclasses.replace(found, result=WRONG, detail="edits that were undone are still there")
    pipe.disable_omni_offload()  # type: ignore[attr-defined]
    return dataclasses.replace(found, inert=inert)


def _difference(pipe: AlonePipeline, arguments: Arguments, expected: Sequence[list[torch.Tensor]]) -> str:
    """What is wrong with the offloaded calls; "" if nothing is."""
    for number, reference in enumerate(expected, start=1):
        try:
            output = pipe(arguments())
        except Exception as error:
            return f"call {number} raises {_sentence(error)}"
        if not are_equal(output, reference):
            return f"call {number} differs from the resident run"
    hazards = simdevice.hazards()
    return f"{len(hazards)} hazards: {hazards[0]}" if hazards else ""


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _inert_blocks(pipe: AlonePipeline, arguments: Arguments, expected: list[torch.Tensor]) -> tuple[str, ...]:
    """Blocks that may be scaled, one after the other, without that the output changes."""
    inert = []
    for path, block in pipe.omni_offload.plan.streamed_blocks():  # type: ignore[attr-defined]
        restore = scale(block)
        if are_equal(pipe(arguments()), expected):
            inert.append(path)
        restore()
    return tuple(inert)
