"""Choices while not everything is known."""

from __future__ import annotations

from dataclasses import replace

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import Problem
from diffusers_omni_offload.planning.predicting import predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.refusal import DoesNotFit
from diffusers_omni_offload.planning.search import choose

#: Of the free memory, what is left alone if there is no budget: allocators lose some between allocations.
_MARGIN = 0.05


def device_budget(free_nbytes: int, asked_nbytes: int | None) -> int:
    """Device bytes that may be taken.

    Args:
        free_nbytes: what is free.
        asked_nbytes: the budget that was given; None if there is none.
    """
    return int(free_nbytes * (1 - _MARGIN)) if asked_nbytes is None else min(asked_nbytes, free_nbytes)


def choose_something(problem: Problem, is_assumed: bool) -> Prediction:
    """`choose`, with something that is swapped at the least, for an offload has to hold something.

    Args:
        problem: the pipeline, the machine and the budget.
        is_assumed: whether activations are only assumed. Then they are no reason to refuse.

    Raises:
        DoesNotFit: there is none.
    """
    try:
        found = choose(problem).choice
    except DoesNotFit:
        if not is_assumed:
            raise
        bare = tuple(replace(component, activation_nbytes=0) for component in problem.components)
        found = choose(replace(problem, components=bare)).choice
    if not found.arguments():
        least = min((part for part in problem.components if part.may_swap), key=lambda part: part.nbytes)
        found = replace(found, kinds={**found.kinds, least.path: "module"})
    return predict(problem, found)


def with_the_fewest(problem: Problem, choice: Choice) -> Prediction:
    """`choice` with as few resident blocks as the host's limit allows, and two slots."""
    choice = replace(choice, slots=2)
    for count in range(max(choice.residents.values(), default=0) + 1):
        residents = {path: min(count, kept) for path, kept in choice.residents.items() if count}
        found = predict(problem, replace(choice, residents=residents))
        if problem.host_nbytes is None or found.host_nbytes <= problem.host_nbytes:
            return found
    return predict(problem, choice)
