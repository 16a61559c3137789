"""What is taken for granted until it is measured, and of what is like it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from diffusers_omni_offload.planning.costs import ComponentCost, Problem

#: Until it is measured: the share of the budget that activations take, by the role of what runs.
_ACTIVATIONS = {"dit": 0.2, "resident": 0.05, "vae": 0.2, "encoder": 0.05}
#: Forwards of the DiT in a call, if nobody says.
_FORWARDS = 30


def assumed(
    costs: Sequence[ComponentCost], budget: int, steps: int | None, activation_nbytes: int | None
) -> tuple[ComponentCost, ...]:
    """With what isn't known yet: forwards in a call, and activations.

    Args:
        costs: the sizes.
        budget: device bytes that may be taken.
        steps: forwards of the DiT in a call; None if nobody says.
        activation_nbytes: of any component at the most; None if nobody says.
    """
    dits = Counter(component.class_name for component in costs if component.role == "dit")
    forwards = steps or _FORWARDS
    return tuple(
        replace(
            component,
            # DiTs of one class take turns.
            forwards=max(1, forwards // dits[component.class_name]) if component.role == "dit" else 1,
            activation_nbytes=activation_nbytes or int(_ACTIVATIONS[component.role] * budget),
        )
        for component in costs
    )


def resized(cost: ComponentCost, known: ComponentCost | None) -> ComponentCost:
    """A component's new sizes, with what is known of its times and activations."""
    if known is None or len(known.blocks) != len(cost.blocks):
        return cost
    blocks = tuple(
        replace(block, seconds=before.seconds) for block, before in zip(cost.blocks, known.blocks, strict=True)
    )
    return replace(
        cost,
        blocks=blocks,
        seconds=known.seconds,
        forwards=known.forwards,
        activation_nbytes=known.activation_nbytes,
    )


def alike(problem: Problem) -> Problem:
    """DiTs of the same class and size take the same, whichever of them was measured."""
    known = {
        (component.class_name, component.nbytes): component
        for component in problem.components
        if component.role == "dit" and any(block.seconds for block in component.blocks)
    }
    components = []
    for component in problem.components:
        twin = known.get((component.class_name, component.nbytes))
        if twin is not None and component.role == "dit" and not any(block.seconds for block in component.blocks):
            component = replace(
                component,
                blocks=twin.blocks,
                seconds=twin.seconds,
                activation_nbytes=max(component.activation_nbytes, twin.activation_nbytes),
            )
        components.append(component)
    return replace(problem, components=tuple(components))
