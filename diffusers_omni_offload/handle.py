"""The handle: what `enable_omni_offload` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from diffusers_omni_offload.backends import Counters, PlanBackend
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.expectations import expectation, other_arguments
from diffusers_omni_offload.hooks import COMPONENT_HOOK, owned_hook
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.costs import Problem
from diffusers_omni_offload.planning.measured import Measured, measure
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.report import OffloadReport, make_report
from diffusers_omni_offload.topology.discovery import iterate_modules
from diffusers_omni_offload.topology.paths import MissingPathError, lookup
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.tracing import Trace

#: Where a pipeline keeps its handle.
HANDLE_ATTRIBUTE = "_omni_offload_handle"


def omni_offload(pipe: Any) -> OffloadHandle | None:
    """The handle of an offloaded pipeline, or None."""
    return vars(pipe).get(HANDLE_ATTRIBUTE)


def require_handle(pipe: Any) -> OffloadHandle:
    """The handle of a pipeline that is offloaded."""
    handle = omni_offload(pipe)
    assert handle is not None
    return handle


class Automatic(Protocol):
    """Looks after an offload that it has chosen.

    Attributes:
        renew: offloads anew before the next call, if something else was found to be faster.
    """

    renew: Callable[[], None]

    def attach(self, handle: OffloadHandle) -> None:
        """Look after the offload of this handle."""

    def detach(self) -> None:
        """Leave the offload as it is."""

    @property
    def request(self) -> Any:
        """What was asked for."""

    @property
    def problem(self) -> Problem:
        """What is known of the pipeline and the machine."""

    @property
    def prediction(self) -> Prediction:
        """What was chosen, and what it takes."""

    @property
    def recorded(self) -> Prediction:
        """The same of what was on when the last forward was recorded."""


class OffloadHandle:
    """A pipeline's offload: its configuration, plan and counters, and the way to turn it off.

    Pipelines that share their components share one backend, and so its counters; each has a handle of its own. A
    handle keeps no pipeline alive: when that is gone, the plan is empty and the counters stay as they were.

    Attributes:
        config: the configuration.
        plan: the resolved plan.
        automatic: what chose it, in the mode "auto"; None in others.
    """

    def __init__(
        self,
        pipeline: Any,
        config: OffloadConfig,
        plan: ResolvedPlan,
        backend: PlanBackend,
        disable: Callable[[Any], None],
    ) -> None:
        self.automatic: Automatic | None = None
        self._disable = disable
        self.bind(pipeline, config, plan, backend)

    def bind(self, pipeline: Any, config: OffloadConfig, plan: ResolvedPlan, backend: PlanBackend) -> None:
        """Stand for this offload from now on. Its counters begin with it.

        Args:
            pipeline: the pipeline.
            config: its configuration.
            plan: its plan.
            backend: what carries the plan out.
        """
        self.config = config
        self.plan = plan
        self._backend: PlanBackend | None = backend
        self._last_counters = Counters()
        self._remains: Callable[[], PlanBackend | None] = lambda: None
        self._pipeline = weakref.ref(pipeline, self._let_go)
        self._modules = dict(iterate_modules(pipeline))
        self._offloaded = set(plan.offloaded_paths)

    def is_enabled(self) -> bool:
        """Whether the pipeline is offloaded through this handle."""
        pipeline = self._pipeline()
        return pipeline is not None and omni_offload(pipeline) is self

    def pipeline(self) -> Any:
        """The pipeline; None if it is gone."""
        return self._pipeline()

    def disable(self) -> None:
        """Turn offload off for this pipeline; see `disable_omni_offload`."""
        pipeline = self._pipeline()
        if pipeline is not None and self.is_enabled():
            self._disable(pipeline)

    def refresh(self) -> None:
        """Make weights count that were edited while a call runs, from a step callback for example.

        Between calls this isn't needed: every call looks at the weights when it starts.
        """
        self._require_enabled()
        self.backend.refresh()

    @contextmanager
    def call(self, prepare: Callable[[], None] | None = None) -> Iterator[None]:
        """The call scope: `with handle.call():` around a hand-written loop keeps prefetched blocks between forwards.

        Weights that are edited inside count after `refresh()` only. A pipeline's own call opens the scope by itself.

        Args:
            prepare: called first, with other threads' calls kept out, unless this is inside of a call already.

        Raises:
            RuntimeError: offload was disabled, an offloaded component was replaced, or another offload took over.
        """
        self._require_enabled()

        def begin() -> None:
            self._follow_pipeline()
            if prepare is not None:
                prepare()

        with self.backend.opened(begin):
            yield

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Around methods of LoRA layers: those that merge into offloaded weights, or leave them, do it on the device.

        The pipeline's own methods and those of its components are in it already.
        """
        self._require_enabled()
        with self.call(), self.backend.merging():
            yield

    @contextmanager
    def gather(self) -> Iterator[None]:
        """In the body every offloaded weight is an ordinary CPU tensor, to be read, saved, cast or changed.

        With all-gather each rank holds a share of the blocks otherwise. Then this is for all ranks at once: each
        enters, changes the weights in the same way, if at all, and they are divided anew at the end. Components can't
        run in the body.

        Raises:
            AgreementError: a rank doesn't come, or has changed its weights in another way.
            RuntimeError: a call is running, or offload was disabled.
        """
        self._require_enabled()
        with self.backend.gather():
            yield

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what the device does in the body: `with handle.trace() as trace:`, then `trace.plot()`.

        It costs a few microseconds a block, and takes over torch's count of the peak of allocated memory.

        Raises:
            RuntimeError: another trace is being recorded, or offload was disabled.
        """
        self._require_enabled()
        trace = Trace(self.backend.platform.name, is_modelled=self.backend.platform.is_modelled)
        with self.backend.records.recorded() as recorder:
            try:
                yield trace
            finally:
                trace.finish(recorder.spans(), recorder.memory())

    def report(self) -> OffloadReport:
        """What a call took, beside what was predicted: print it, or let a notebook show it.

        It is the first call, or the first one since mode "auto" has measured anew; or one that was traced before that.

        Raises:
            RuntimeError: offload was disabled.
        """
        self._require_enabled()
        backend, platform = self.backend, self.backend.platform
        measured = Measured()
        recorder = backend.records.latest
        if recorder is not None:
            blocks = {stack.component: stack.paths for stack in self.plan.stacks}
            peak = max(0, recorder.peak_nbytes - recorder.others)
            measured = measure(recorder.spans(), blocks, peak_nbytes=peak, since=recorder.steady_from)
        if self.automatic is not None:
            problem, prediction = self.automatic.problem, self.automatic.recorded
        else:
            problem, prediction = expectation(self._pipeline(), self.plan, self.config, platform)
        return make_report(
            measured,
            backend.counters(),
            device=platform.name,
            is_modelled=platform.is_modelled,
            problem=problem,
            prediction=prediction,
            others=other_arguments(self.config, backend.device),
            later=None if self.automatic is None else self.automatic.prediction.choice,
        )

    @property
    def backend(self) -> PlanBackend:
        """The strategy at work.

        Raises:
            RuntimeError: the pipeline is gone.
        """
        if self._backend is None:
            raise RuntimeError("The pipeline of this handle is gone, and its offload with it.")
        return self._backend

    @property
    def loads(self) -> int:
        """Copies of blocks to the device so far."""
        return self._counters.loads

    @property
    def demand_loads(self) -> int:
        """Those of `loads` that weren't prefetched, so that the compute had to wait for all of the copy."""
        return self._counters.demand_loads

    @property
    def swaps(self) -> int:
        """Copies of whole components to the device so far."""
        return self._counters.swaps

    @property
    def bytes_moved(self) -> int:
        """Bytes of `loads` and `swaps`."""
        return self._counters.bytes_moved

    @property
    def device_bytes(self) -> int:
        """Device bytes that slots and swapped components take now."""
        return self._counters.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Host bytes that are page-locked now."""
        return self._counters.pinned_bytes

    @property
    def _counters(self) -> Counters:
        backend = self._backend if self._backend is not None else self._remains()
        return self._last_counters if backend is None else backend.counters()

    def _let_go(self, _: object) -> None:
        """The pipeline is gone: keep nothing of it."""
        self._last_counters = replace(self._counters, device_bytes=0, pinned_bytes=0)
        # A component that somebody keeps keeps the offload with it.
        if self._backend is not None:
            self._remains = weakref.ref(self._backend)
        self._backend, self._modules = None, {}
        self.plan = replace(self.plan, components=(), stacks=(), swapped=(), on_demand=())

    def __repr__(self) -> str:
        state = "enabled" if self.is_enabled() else "disabled"
        return (
            f"<OffloadHandle {state}: {self.loads} loads, "
            f"{self.demand_loads} of them on demand, {self.swaps} swaps, {format_bytes(self.bytes_moved)} moved, "
            f"{format_bytes(self.device_bytes)} held on the device, "
            f"{format_bytes(self.pinned_bytes)} pinned\n{self.plan}>"
        )

    def follow(self, plan: ResolvedPlan, config: OffloadConfig) -> None:
        """The backend keeps other blocks on the device now.

        Args:
            plan: what it does now.
            config: the configuration that asks for it.
        """
        stacks = {stack.blocks: stack for stack in plan.stacks}
        self.plan = replace(self.plan, stacks=tuple(stacks.get(stack.blocks, stack) for stack in self.plan.stacks))
        self.config = config

    def modules(self) -> dict[str, nn.Module]:
        """The components of the pipeline that this handle looks after, by path."""
        return dict(self._modules)

    def _require_enabled(self) -> None:
        if not self.is_enabled():
            raise RuntimeError("This offload was disabled; enable_omni_offload(pipe) gives a new handle.")

    def _follow_pipeline(self) -> None:
        """Take in components that came or were replaced since; an offloaded one can't be."""
        pipeline = self._pipeline()
        current = dict(iterate_modules(pipeline))
        for path in {**self._modules, **current}:
            before, now = self._modules.get(path), current.get(path)
            is_offloaded = any(path == name or name.startswith(f"{path}.") for name in self._offloaded)
            if before is now and now is not None and owned_hook(now, COMPONENT_HOOK) is not None:
                continue
            stand_in = None if now is not None else _at(pipeline, path)
            if is_offloaded:
                what = "removed" if now is None and stand_in is None else "replaced"
                raise RuntimeError(
                    f"{path} is offloaded and was {what} since offload was enabled. Call disable_omni_offload() and "
                    "enable_omni_offload() again, so that the offload is that of the components that are there now."
                )
            if stand_in is not None:
                continue  # No module: who knows what it holds of the one that was there, which stays where it is.
            if now is not None and owned_hook(now, COMPONENT_HOOK) is None:
                with ExitStack() as undo:
                    self.backend.add_resident(path, now, undo)
                    undo.pop_all()
            if before is not None and before is not now and before in self.backend.components:
                self.backend.remove_component(before)
            if now is not None:
                self._modules[path] = now
            else:
                del self._modules[path]


def _at(pipeline: Any, path: str) -> Any:
    """What a pipeline has at a path; None if that is nothing."""
    try:
        return lookup(pipeline, path)
    except MissingPathError:
        return None
