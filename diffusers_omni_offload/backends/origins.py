"""Which offloaded weights are in a checkpoint's files, and stay there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from diffusers_omni_offload.backends.masters import Unit
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan
from diffusers_omni_offload.weights.checkpoint import CheckpointError
from diffusers_omni_offload.weights.leaves import Leaf, find_leaves, is_plain
from diffusers_omni_offload.weights.mapped import Origin
from diffusers_omni_offload.weights.proof import Sources, find_checkpoint, prove, remembered, stored_weights
from diffusers_omni_offload.weights.sources import LeafSource, same_bytes
from diffusers_omni_offload.weights.withheld import give_back, is_withheld


class Origins:
    """The files' places of the weights that a plan streams, as far as they are proven.

    Making it reads the headers of files, and no weights; nothing is changed.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: ResolvedPlan) -> None:
        self._known: dict[int, LeafSource] = {}
        self._served: set[int] = set()
        self._modules: list[nn.Module] = [component.module for component in plan.components]
        for component in plan.components:
            known = remembered(component.module)
            if known is not None:
                self._add(component.module, known)
        for stack in plan.stacks:
            if stack.options.source != "memory" and stack.streamed:
                self._serve(plan, stack)

    def of(self, unit: Unit) -> dict[int, Origin]:
        """Where the weights of a unit are, by `id`; those that were changed since they were loaded are left out.

        Weights that aren't known to be the files' are compared with them, byte by byte.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        if id(unit.module) not in self._served:
            return {}
        found = {}
        for leaf in unit.leaves():
            source = self._known.get(id(leaf.tensor))
            if source is not None and (is_withheld(leaf.tensor) or _is_unchanged(leaf, source)):
                found[id(leaf.tensor)] = (leaf.tensor, source)
        return found

    def realize(self, served: Mapping[int, object]) -> None:
        """Read what is withheld and isn't among `served`: it goes to memory or to the device.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        for leaf in self._withheld():
            if id(leaf.tensor) not in served:
                give_back(leaf.tensor, self._known[id(leaf.tensor)].read())

    def _withheld(self) -> Iterator[Leaf]:
        for module in self._modules:
            for leaf in find_leaves(module, ""):
                if is_withheld(leaf.tensor) and id(leaf.tensor) in self._known:
                    yield leaf

    def _serve(self, plan: ResolvedPlan, stack: BlockStack) -> None:
        component = plan.component(stack.component)
        sources: Sources | str | None = remembered(component.module)
        if sources is None and stack.options.source == "checkpoint":
            sources = self._prove(component.module, plan, stack.component)
            if isinstance(sources, str):
                logger.warning("%s is streamed from host memory, not from its checkpoint: %s", stack.component, sources)
                return
            self._add(component.module, sources)
        if sources is not None:
            self._served.update(id(stack.blocks[index]) for index in stack.streamed)

    @staticmethod
    def _prove(module: nn.Module, plan: ResolvedPlan, path: str) -> Sources | str:
        layouts = plan.checkpoint_layouts.get(path, {})
        try:
            checkpoint = find_checkpoint(module, layouts=layouts)
            return checkpoint if isinstance(checkpoint, str) else prove(module, checkpoint, layouts=layouts)
        except CheckpointError as error:
            return str(error)

    def _add(self, module: nn.Module, sources: Sources) -> None:
        tensors = stored_weights(module)
        self._known.update((id(tensors[path]), source) for path, source in sources.items() if path in tensors)


def _is_unchanged(leaf: Leaf, source: LeafSource) -> bool:
    if not is_plain(leaf):
        return False
    tensor = leaf.tensor
    return same_bytes(tensor.detach() if tensor.device.type == "cpu" else tensor.detach().to("cpu"), source)
