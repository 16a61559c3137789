"""The components of an offloaded pipeline: what is put on their roots, and taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends.entry_points import EntryPoints
from diffusers_omni_offload.backends.mediation import Mediation
from diffusers_omni_offload.regions import UNMOVED, CompileRules


@dataclass(frozen=True)
class _Component:
    path: str
    module: nn.Module
    mediation: Mediation
    entries: EntryPoints | None


class ManagedComponents:
    """Hooks, execution device and mediation of each component's root module.

    Args:
        device: the execution device.
        owner: what `hooks.ComponentHook.owner` names, so that a sibling pipeline finds it.
        run: runs a component's forward, `run(path, forward, args, kwargs)`.
    """

    def __init__(self, device: torch.device, owner: object, run: Callable[..., Any]) -> None:
        self._device, self._owner, self._run = device, owner, run
        self._components: dict[int, _Component] = {}

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._components

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return ((component.path, component.module) for component in self._components.values())

    def attach(
        self,
        path: str,
        module: nn.Module,
        undo: ExitStack,
        before: Callable[[], None] | None = None,
        entries: EntryPoints | None = None,
        rules: CompileRules = UNMOVED,
        *,
        moves_itself: bool = False,
    ) -> None:
        """Take a component in; `undo` gets the way back first.

        Args:
            path: its path.
            module: its root module.
            undo: where the undoing goes.
            before: called when an entry point other than `forward` announces itself, as `vae.decode` does.
            entries: the ways into the component besides its forward, if it has to know of them.
            rules: how it may be compiled.
            moves_itself: whether the component has a lifecycle of its own.
        """
        mediation = Mediation(module, path, self._device, moves_itself=moves_itself)
        component = _Component(path, module, mediation, entries)
        undo.callback(self._components.pop, id(module), None)
        undo.callback(_take_apart, component)
        hook = hooks.ComponentHook(path, self._device, self._run)
        hook.owner = self._owner
        hooks.install_innermost(module, hook, hooks.COMPONENT_HOOK, rules)
        if entries is not None:
            entries.install()
        hooks.ExecutionDeviceHook.attach(module, path, self._device, before or _nothing)
        component.mediation.install()
        self._components[id(module)] = component

    def detach(self, module: nn.Module) -> None:
        """Let a component go."""
        _take_apart(self._components.pop(id(module)))

    def detach_all(self) -> None:
        """Let every component go; each is tried, whatever fails."""
        with ExitStack() as steps:
            for component in self._components.values():
                steps.callback(_take_apart, component)
        self._components.clear()

    def require_ours(self) -> None:
        """Refuse to go on if somebody took our place on a component.

        Raises:
            RuntimeError: it names the component and the other owner.
        """
        for component in self._components.values():
            other = None
            if not isinstance(vars(component.module).get("_hf_hook"), hooks.ExecutionDeviceHook):
                other = hooks.foreign_offload([component.module]) or "something that removed our hook"
            elif component.entries is not None:
                other = hooks.foreign_offload(component.entries.parts)
            if other is not None:
                raise RuntimeError(foreign_message(component.path, other))

    def require_ours_throughout(self) -> None:
        """`require_ours` for every module below the components, too."""
        self.require_ours()
        for component in self._components.values():
            other = hooks.foreign_offload([child for child in component.module.modules()][1:])
            if other is not None:
                raise RuntimeError(foreign_message(component.path, other))


def foreign_message(path: str, owner: str) -> str:
    """What to say when somebody else moves the weights of an offloaded component."""
    return (
        f"{path} is offloaded by omni offload, and {owner} was put on it since: two owners would move the same "
        "weights. Remove the other one, or call disable_omni_offload() on the pipeline."
    )


def _take_apart(component: _Component) -> None:
    with ExitStack() as steps:
        steps.callback(hooks.remove_owned, component.module, hooks.COMPONENT_HOOK)
        steps.callback(hooks.ExecutionDeviceHook.detach, component.module)
        if component.entries is not None:
            steps.callback(component.entries.remove)
        steps.callback(component.mediation.remove)


def _nothing() -> None: ...
