"""The blocks of an offloaded pipeline, and our hooks on them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import NamedTuple

from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends.compiling import block_rules
from diffusers_omni_offload.backends.components import foreign_message
from diffusers_omni_offload.backends.masters import Masters
from diffusers_omni_offload.regions import CompileRules
from diffusers_omni_offload.streaming.runner import BlockRunner
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.topology.plan import ResolvedPlan


class _HookedBlock(NamedTuple):
    module: nn.Module
    path: str
    rules: CompileRules


class HookedBlocks:
    """Blocks by their numbers in the streamer, which gets the stacks in the same order.

    Args:
        streamer: what binds them.
        masters: of the streamed ones; resident blocks have none.
    """

    def __init__(self, streamer: Streamer, masters: Masters) -> None:
        self._streamer, self._masters = streamer, masters
        self._runner: BlockRunner | None = None
        self._blocks: list[_HookedBlock] = []

    def install(self, plan: ResolvedPlan, runner: BlockRunner, undo: ExitStack) -> None:
        """Number the blocks of a plan, and put a hook on each; `undo` gets the way back first."""
        self._runner = runner
        for stack in plan.stacks:
            for index, block in enumerate(stack.blocks):
                undo.callback(hooks.remove_owned, block, hooks.BLOCK_HOOK)
                self._blocks.append(_HookedBlock(block, stack.path(index), block_rules(stack, index)))
                self._hook(len(self._blocks) - 1)

    def remove(self, steps: ExitStack) -> None:
        """Put the removal of every hook on `steps`."""
        for block, *_ in self._blocks:
            steps.callback(hooks.remove_owned, block, hooks.BLOCK_HOOK)

    def retire(self, modules: Collection[nn.Module]) -> None:
        """Let go of the streamed blocks among `modules`."""
        for number, (block, *_) in enumerate(self._blocks):
            if block in modules and self._masters.of(block) is not None:
                hooks.remove_owned(block, hooks.BLOCK_HOOK)
                self._streamer.retire(number)
                self._masters.remove(block)

    def require_ours(self) -> None:
        """See that nobody else moves a block's weights, nor uses them outside of our hook.

        Raises:
            RuntimeError: somebody moves them.
        """
        for number, (block, path, _) in enumerate(self._blocks):
            owner = hooks.foreign_offload([block])
            if owner is not None:
                raise RuntimeError(foreign_message(path, owner))
            if hooks.is_misplaced(block, hooks.BLOCK_HOOK):
                hooks.remove_owned(block, hooks.BLOCK_HOOK)
                self._hook(number)

    def inspect_again(self) -> None:
        """Look once more, in each block's next forward, at what it does to its leaves and keeps of them."""
        if self._runner is not None:
            self._runner.inspect_again()

    def _hook(self, number: int) -> None:
        assert self._runner is not None
        block, path, rules = self._blocks[number]
        hook = hooks.BlockHook(path, number, self._runner.run)
        hooks.install_innermost(block, hook, hooks.BLOCK_HOOK, rules)
