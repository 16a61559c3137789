"""For models that run in phases: exactly one phase's modules are on the device at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from diffusers_omni_offload.backends.plan_backend import PlanBackend
from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.platform import resolve_device
from diffusers_omni_offload.topology.plan import ResolvedComponent, ResolvedPlan


class PhaseOffload:
    """Swaps the phases of one model, for a pipeline that implements `SupportsModelCpuOffload`.

    Each module of a phase is loaded by one copy from its packed, pinned host copy and bound in its own forward only;
    nothing is copied back. What belongs to no phase lives on the device.

    >>> self._phases = PhaseOffload(self, {"reasoner": self.layers, "generator": self.gen_layers}, device=device)
    >>> self._phases.enable()
    >>> with self._phases.context("reasoner"):
    ...     ...

    A phase stays on the device when its context is left, until another one is entered or the model's forward (or the
    pipeline's call) is over. An error inside of a context gives its phase up.

    Args:
        root: the model.
        phases: name -> its modules (a ModuleList does), each somewhere below `root`.
        device: the execution device; None takes the current accelerator.
        pin_memory: as in `enable_omni_offload`.

    Raises:
        ValueError: a module isn't below `root`, or is in two phases.
    """

    def __init__(
        self,
        root: nn.Module,
        phases: Mapping[str, Iterable[nn.Module]],
        *,
        device: torch.device | str | int | None = None,
        pin_memory: bool | int = True,
    ) -> None:
        config = OffloadConfig(OffloadStrategy.MODEL_LEVEL, pin_memory=pin_memory)
        names = {module: name for name, module in root.named_modules()}
        components = [ResolvedComponent("", root, "dit")]
        self._phases: dict[str, list[str]] = {}
        for phase, modules in phases.items():
            self._phases[phase] = []
            for module in modules:
                path = names.pop(module, None)
                if not path:
                    raise ValueError(
                        f"The phase {phase!r} has a {type(module).__name__} that is no part of the "
                        f"{type(root).__name__}, or is in another phase as well; each module belongs to one phase."
                    )
                self._phases[phase].append(path)
                components.append(ResolvedComponent(path, module, "dit"))
        paths = tuple(path for found in self._phases.values() for path in found)
        groups = {path: _group(phase) for phase, found in self._phases.items() for path in found}
        self._plan = ResolvedPlan(config.strategy, tuple(components), (), swapped=paths, groups=groups)
        self.backend = _PhaseBackend(config, resolve_device(device))

    def enable(self) -> None:
        """Pack the phases' weights and place the rest on the device. All or nothing."""
        self.backend.enable(None, self._plan)

    def disable(self) -> None:
        """Leave ordinary tensors on the CPU."""
        self.backend.disable()

    def is_enabled(self) -> bool:
        """Whether the phases are swapped."""
        return self.backend.is_enabled()

    @contextmanager
    def context(self, phase: str) -> Iterator[None]:
        """Have this phase's modules on the device, and no other's.

        Raises:
            ValueError: there is no such phase.
        """
        if phase not in self._phases:
            raise ValueError(f"There is no phase {phase!r}; choose from {', '.join(self._phases)}.")
        if not self.backend.is_enabled():
            yield
            return
        stages = self.backend.stages
        members = [stage for stage in stages if stage.group == _group(phase)]
        with self.backend.opened():
            try:
                for stage in members:
                    stages.announce(stage)
                yield
            except BaseException:
                stages.leave(members)
                raise


def _group(phase: str) -> str:
    """Phases are no roles, whatever they are called."""
    return f"phase {phase}"


class _PhaseBackend(PlanBackend):
    """Belongs to its model alone, whichever pipelines have that."""

    is_shared = False
