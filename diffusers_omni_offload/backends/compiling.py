"""How what a plan offloads may be compiled."""

from __future__ import annotations

from diffusers_omni_offload.regions import MOVED, UNMOVED, CompileRules, require_compilable
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedComponent, ResolvedPlan


def component_rules(plan: ResolvedPlan, component: ResolvedComponent) -> CompileRules:
    """What is moved in between cuts a component, and what moves has no fixed address."""
    inside = set(component.module.modules())
    streamed = [stack.blocks[index] for stack in plan.stacks for index in stack.moving]
    moving = [part for path in (*plan.swapped, *plan.on_demand) for part in plan.module(path).modules()]
    return CompileRules(
        blocks=tuple(block for stack in plan.stacks for block in stack.blocks if block in inside),
        captured=inside.isdisjoint(streamed) and inside.isdisjoint(moving),
    )


def block_rules(stack: BlockStack, index: int) -> CompileRules:
    """A resident block stays where it is."""
    return MOVED if index in stack.moving else UNMOVED


def require_continuable(plan: ResolvedPlan) -> None:
    """Refuse components and blocks that were compiled in a way that offload can't continue.

    Raises:
        TypeError: see `require_compilable`.
    """
    for component in plan.components:
        require_compilable(component.module, component.path, component_rules(plan, component))
    for stack in plan.stacks:
        for index in set(stack.resident) - set(stack.moving):
            require_compilable(stack.blocks[index], stack.path(index), UNMOVED)
    moving = [(stack.path(index), stack.blocks[index]) for stack in plan.stacks for index in stack.moving]
    for path, whole in (*moving, *((path, plan.module(path)) for path in plan.swapped)):
        for name, part in whole.named_modules(prefix=path):
            require_compilable(part, name, MOVED)
