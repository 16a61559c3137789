"""What a choice takes, of time and of memory."""

from __future__ import annotations

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem, Rates
from diffusers_omni_offload.planning.memory import Memory, StackSizes, kept_blocks
from diffusers_omni_offload.planning.prediction import Prediction, StepPrediction
from diffusers_omni_offload.planning.timeline import Timeline

#: Components run in this order.
_TURNS = {"encoder": 0, "dit": 1, "resident": 1, "vae": 2}


def predict(problem: Problem, choice: Choice) -> Prediction:
    """What `choice` takes.

    Args:
        problem: the pipeline and the machine. Compute that isn't known counts as 0.
        choice: a kind for each of the problem's components.

    Raises:
        KeyError: the choice has no kind for a component.
    """
    memory = Memory(problem, choice.kinds)
    steps, seconds, moved = {}, 0.0, _prefetched_for_nothing(problem, choice)
    for component in problem.components:
        kind, residents = choice.kinds[component.path], choice.residents.get(component.path, 0)
        part = Part(component, kind, residents, choice.slots, problem.rates)
        steps[component.path] = part.step
        seconds += part.call_seconds
        moved += part.moved_nbytes
    peak_nbytes, peak_in = memory.peak(choice.residents, choice.slots)
    return Prediction(
        choice=choice,
        steps=steps,
        call_seconds=seconds,
        peak_nbytes=peak_nbytes,
        peak_in=peak_in,
        resident_nbytes=memory.between_calls(choice.residents, choice.slots),
        host_nbytes=memory.host_nbytes(choice.residents),
        moved_nbytes=moved,
    )


def _prefetched_for_nothing(problem: Problem, choice: Choice) -> int:
    """Bytes of the blocks that are prefetched for one more forward of a component when another one is next."""
    streamed = [component for component in problem.components if choice.kinds[component.path] == "layer"]
    streamed = sorted((component for component in streamed if component.forwards), key=lambda c: _TURNS[c.role])
    wasted = 0
    # The call is known to end after the last one.
    for component in streamed[:-1]:
        kept = kept_blocks(len(component.blocks), choice.residents.get(component.path, 0))
        sizes = [block.nbytes for index, block in enumerate(component.blocks) if index not in kept]
        if len(sizes) > choice.slots:
            is_last_streamed = len(component.blocks) - 1 not in kept
            wasted += sum(sizes[: choice.slots - is_last_streamed])
    return wasted


class Part:
    """One component's part of a call.

    Args:
        component: the component.
        kind: "resident", "module" or "layer".
        residents: how many of its blocks stay, if it is streamed.
        slots: number of slots.
        rates: the link.

    Attributes:
        step: one of its forwards.
        call_seconds: all of them, and what it waits for before.
        moved_nbytes: bytes that are copied to the device for it in a call.
    """

    def __init__(self, component: ComponentCost, kind: str, residents: int, slots: int, rates: Rates) -> None:
        forwards = component.forwards
        if kind == "layer":
            kept = kept_blocks(len(component.blocks), residents)
            timeline = Timeline(component.blocks, kept, slots, rates, component.seconds)
            sizes = StackSizes.of(component, residents)
            self.step = timeline.step
            self.call_seconds = timeline.seconds(forwards)
            # What fits into the slots all together is loaded once.
            self.moved_nbytes = sizes.streamed_nbytes * (min(forwards, 1) if sizes.streamed <= slots else forwards)
            return
        compute = component.seconds + sum(block.seconds for block in component.blocks)
        self.step = StepPrediction(compute, compute, 0.0)
        self.call_seconds = forwards * compute
        self.moved_nbytes = 0
        if kind == "module" and forwards:
            # It comes once, and nothing runs meanwhile.
            self.moved_nbytes = component.nbytes
            self.call_seconds += rates.copy_latency_s + component.nbytes / rates.link_bytes_per_s
