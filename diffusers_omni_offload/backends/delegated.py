"""Model-level offload of a pipeline that moves its own phases."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from typing import Any, TypeGuard

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends.base import Counters
from diffusers_omni_offload.backends.plan_backend import PlanBackend
from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.declarations import SupportsModelCpuOffload
from diffusers_omni_offload.topology.discovery import iterate_modules
from diffusers_omni_offload.topology.plan import ResolvedPlan


def is_delegated(pipeline: object, config: OffloadConfig) -> TypeGuard[SupportsModelCpuOffload]:
    """Whether the pipeline does itself what the configuration asks for."""
    return config.strategy is OffloadStrategy.MODEL_LEVEL and isinstance(pipeline, SupportsModelCpuOffload)


class DelegatedBackend(PlanBackend):
    """Turns the pipeline's own offload on and off. It places and hooks nothing itself.

    Args:
        config: what the user asked for.
        device: the execution device.
        pipeline: has `enable_omni_model_cpu_offload` and `disable_omni_model_cpu_offload`.
    """

    is_shared = False

    def __init__(self, config: OffloadConfig, device: torch.device, pipeline: SupportsModelCpuOffload) -> None:
        super().__init__(config, device)
        self._pipeline = weakref.ref(pipeline)

    @staticmethod
    def plan_for(config: OffloadConfig, pipeline: SupportsModelCpuOffload) -> ResolvedPlan:
        """A plan without components: which those are is the pipeline's affair.

        Raises:
            ValueError: components were selected, and the pipeline can't be told which.
        """
        name = type(pipeline).__name__
        if config.has_selection and not _takes(pipeline, "offload_components"):
            raise ValueError(
                f"{name} moves its own phases, and its enable_omni_model_cpu_offload takes no offload_components; "
                "leave components out, or use the mode 'layer'."
            )
        return ResolvedPlan(config.strategy, (), (), notes=(f"{name} moves its own phases.",))

    def resolve(self, pipeline: Any) -> ResolvedPlan:
        """See `plan_for`."""
        return self.plan_for(self.config, pipeline)

    def _build(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        pipeline = self._pipeline()
        assert pipeline is not None
        arguments: dict[str, Any] = {"device": self.device, "pin_memory": self.config.pin_memory}
        if self.config.has_selection:
            chosen = [name for name, choice in self.config.choices.items() if choice == "module"]
            arguments["offload_components"] = list(self.config.components or chosen)
        undo.callback(pipeline.disable_omni_model_cpu_offload)
        pipeline.enable_omni_model_cpu_offload(
            **{name: value for name, value in arguments.items() if _takes(pipeline, name)}
        )

    def tear_down(self) -> None:
        """See `PlanBackend.tear_down`; the pipeline does it."""
        pipeline = self._pipeline()
        with ExitStack() as steps:
            steps.callback(self._forget)
            if pipeline is not None:
                steps.callback(pipeline.disable_omni_model_cpu_offload)

    def add_resident(self, path: str, module: nn.Module, undo: ExitStack) -> None:
        """Nothing: the pipeline places its components itself."""

    def opened(self, prepare: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Be inside a call, of the pipeline and of each of its models that swaps phases."""
        return _all_of([self.scope.opened(prepare), *(backend.opened() for backend in self._phases())])

    def refresh(self) -> None:
        """See `PlanBackend.refresh`; for each of the models."""
        for backend in self._phases():
            backend.refresh()

    def edits(self) -> AbstractContextManager[None]:
        """See `PlanBackend.edits`; for each of the models."""
        return _all_of([backend.edits() for backend in self._phases()])

    def merging(self) -> AbstractContextManager[None]:
        """See `PlanBackend.merging`; for each of the models."""
        return _all_of([super().merging(), *(backend.merging() for backend in self._phases())])

    def counters(self) -> Counters:
        """The sums over the models that swap phases."""
        counted = [backend.counters() for backend in self._phases()]
        return Counters(*(sum(getattr(one, field.name) for one in counted) for field in fields(Counters)))

    def _phases(self) -> list[PlanBackend]:
        """The backends of every `PhaseOffload` below the pipeline, found by the hooks that they put there."""
        found: dict[int, PlanBackend] = {}
        for _, component in iterate_modules(self._pipeline()):
            for module in component.modules():
                hook = hooks.owned_hook(module, hooks.COMPONENT_HOOK)
                if hook is not None and hook.owner is not self:
                    found[id(hook.owner)] = hook.owner
        return list(found.values())


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


def _takes(pipeline: SupportsModelCpuOffload, name: str) -> bool:
    """Whether it can be given this argument. A selection needs a parameter of its own: what takes any keyword may
    ignore it."""
    parameters = inspect.signature(pipeline.enable_omni_model_cpu_offload).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (takes_any and name != "offload_components")
