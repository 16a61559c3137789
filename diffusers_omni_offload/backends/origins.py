"""Which offloaded weights are in a checkpoint's files, and stay there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from diffusers_omni_offload.backends.masters import Unit
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan
from diffusers_omni_offload.weights.checkpoint import CheckpointError, CheckpointFile
from diffusers_omni_offload.weights.leaves import Leaf, copy_with_strides, find_leaves, is_plain, rebind
from diffusers_omni_offload.weights.mapped import Origin
from diffusers_omni_offload.weights.proof import Sources, find_checkpoint, forget, prove, remembered, stored_weights
from diffusers_omni_offload.weights.sources import LeafSource, same_bytes
from diffusers_omni_offload.weights.withheld import give_back, is_withheld


class Origins:
    """The files' places of the weights that a plan streams, as far as they are proven.

    Making it reads the headers of files, and no weights; nothing is changed.

    Args:
        plan: the plan; None has no weights.

    Raises:
        CheckpointError: a file that weights are views of, or are to be read from, was changed.
    """

    def __init__(self, plan: ResolvedPlan | None = None) -> None:
        self._known: dict[int, LeafSource] = {}
        self._served: set[int] = set()
        self._in_use: set[CheckpointFile] = set()
        if plan is None:
            return
        for component in plan.components:
            known = remembered(component.module)
            if known is not None:
                self._add(component.module, known)
        for stack in plan.stacks:
            if stack.options.source != "memory" and stack.streamed:
                self._serve(plan, stack)
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """CheckpointError if a file that weights were views of, or had to be read from, was changed since it was
        opened."""
        for file in self._in_use:
            file.require_unchanged()

    def of(self, unit: Unit) -> dict[int, Origin]:
        """Where the weights of a unit are, by `id`; those that were changed since they were loaded are left out.

        Weights that aren't known to be the files' are compared with them, byte by byte.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        if not self.serves(unit):
            return {}
        found = {}
        for leaf in unit.leaves():
            source = self._known.get(id(leaf.tensor))
            if source is None:
                continue
            if is_withheld(leaf.tensor) or _is_unchanged(leaf, source):
                found[id(leaf.tensor)] = (leaf.tensor, source)
            elif _is_view(leaf.tensor, source):
                # It was edited, and some of its pages may be the file's still.
                rebind(leaf.tensor, lambda tensor=leaf.tensor: copy_with_strides(tensor.data, tensor.device))  # type: ignore[misc]
        return found

    def realize(self, leaves: Iterable[Leaf]) -> None:
        """Read those that are withheld, to have them in memory.

        Raises:
            CheckpointError: a file can't be read or was changed.
        """
        for leaf in leaves:
            if is_withheld(leaf.tensor):
                give_back(leaf.tensor, self._known[id(leaf.tensor)].read())

    def serves(self, unit: Unit) -> bool:
        """Whether a unit's weights stay in files."""
        return id(unit.module) in self._served

    def release(self, plan: ResolvedPlan, gone: Iterable[nn.Module]) -> None:
        """Keep nothing open for the components that have one of the modules `gone`, whose weights are in no file."""
        self._known, self._served, self._in_use = {}, set(), set()
        gone = set(gone)
        for component in plan.components:
            if not gone.isdisjoint(component.module.modules()):
                forget(component.module)

    @property
    def are_used(self) -> bool:
        """Whether any weights stay in files."""
        return bool(self._served)

    def _serve(self, plan: ResolvedPlan, stack: BlockStack) -> None:
        blocks = [stack.blocks[index] for index in stack.streamed]
        component = plan.component(stack.component).module
        if stack.options.source == "checkpoint" and not self._knows(blocks):
            sources = self._prove(component, plan, stack.component)
            if isinstance(sources, str):
                logger.warning("%s is streamed from host memory, not from its checkpoint: %s", stack.component, sources)
                return
            self._add(component, sources)
        if self._knows(blocks):
            self._served.update(map(id, blocks))

    def _knows(self, blocks: Iterable[nn.Module]) -> bool:
        return any(id(leaf.tensor) in self._known for block in blocks for leaf in find_leaves(block, ""))

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
        for path, source in sources.items():
            if path in tensors:
                self._known[id(tensors[path])] = source
                if is_withheld(tensors[path]) or _is_view(tensors[path], source):
                    self._in_use.update(source.files)


def _is_view(tensor: torch.Tensor, source: LeafSource) -> bool:
    return any(segment.file.is_viewed_by(tensor, segment.start) for segment in source.segments)


def _is_unchanged(leaf: Leaf, source: LeafSource) -> bool:
    if not is_plain(leaf):
        return False
    # It may be a view of the file, and reading one of a file that was cut short ends the process.
    source.require_unchanged()
    tensor = leaf.tensor
    return same_bytes(tensor.detach() if tensor.device.type == "cpu" else tensor.detach().to("cpu"), source)


def readable(module: nn.Module) -> set[int]:
    """`id` of the weights of a component that can be read from the files that it was loaded from."""
    sources, tensors = remembered(module) or {}, stored_weights(module)
    return {id(tensors[path]) for path in sources if path in tensors}
