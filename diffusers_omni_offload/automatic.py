"""Mode "auto": chooses how to offload a pipeline, and once more when it was measured."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from diffusers_omni_offload.backends import PlanBackend
from diffusers_omni_offload.backends.keeping import Keeping
from diffusers_omni_offload.composition import stock_class
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.expectations import other_arguments
from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.parallel import cache_of
from diffusers_omni_offload.planning.assumptions import alike, resized
from diffusers_omni_offload.planning.cautious import choose_something, with_the_fewest
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.explaining import explain
from diffusers_omni_offload.planning.measured import Measured, measure, with_measured
from diffusers_omni_offload.planning.memory import fits
from diffusers_omni_offload.planning.predicting import predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.refusal import DoesNotFit
from diffusers_omni_offload.planning.request import Request
from diffusers_omni_offload.planning.search import choose
from diffusers_omni_offload.planning.survey import survey_blocks
from diffusers_omni_offload.prospect import Prospect
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.siblings import users

#: A choice that is faster by less than this isn't worth a change of residents; nor, by less than that, one of kinds.
_WORTH_IT, _WORTH_ENABLING = 0.01, 0.03
#: The forward of a DiT that is measured: in the first one libraries are loaded and kernels chosen.
_MEASURED_FORWARD = 2


class Automatic:
    """The choice for one pipeline.

    It is made from sizes, the link's rate and assumed activations at first; in the second forward of a streamed DiT the
    blocks were measured, and residents and slots are chosen anew, within the call. After the first call, whose
    activations are all known then, they are chosen for good. If the device's memory is too short for a component,
    residents leave, and it is run once more.

    Args:
        request: what was asked for.
        prospect: what is known of the pipeline and the machine.

    Attributes:
        request: what was asked for.
        problem: what is known by now.
        is_assumed: whether activations are only assumed.
        prediction: the choice that was made last, and what it takes.
        better: a choice of other kinds that was found to be faster, or to fit where this one doesn't; None if there is
            none.
        renew: called before each call of the pipeline; see `handle.Automatic`.
    """

    def __init__(self, request: Request, prospect: Prospect) -> None:
        self.request, self.problem = request, prospect.problem
        self._prospect, self._platform = prospect, prospect.platform
        self.is_assumed = not (prospect.is_measured or request.activation_memory)
        self.prediction = choose_something(self.problem, self.is_assumed)
        if self.is_assumed and not self._has_plenty():
            self.prediction = with_the_fewest(self.problem, self.prediction.choice)
        # The backend has this, and mustn't be kept by a handle that has it, too.
        self._backend: Callable[[], PlanBackend | None] = lambda: None
        self._pipe: Callable[[], Any] = lambda: None
        self.better: Prediction | None = None
        self._impossible: list[Mapping[str, object]] = []
        # Number of a forward -> the choice that was on since.
        self._choices: list[tuple[int, Choice]] = []
        self.renew: Callable[[], None] = lambda: None
        self._most_allocated = 0
        self._forwards: Counter[str] = Counter()
        self._is_settled = False

    @property
    def config(self) -> OffloadConfig:
        """The configuration of the choice."""
        arguments = self.prediction.choice.arguments()
        return OffloadConfig.from_options(None, **arguments, pin_memory=self.request.pin_memory)

    def attach(self, handle: OffloadHandle) -> None:
        """Look after the offload that was enabled with `config`."""
        backend = handle.backend
        self._backend, self._pipe = weakref.ref(backend), handle.pipeline
        handle.automatic = self
        self._choices = [(0, self.prediction.choice)]
        if self._platform.is_asynchronous:  # On the CPU nothing overlaps, and memory isn't counted.
            backend.watch(self)

    @property
    def recorded(self) -> Prediction:
        """What was on in the last forward that was recorded, and what it takes."""
        recorder = self._enabled().records.latest
        last = -1 if recorder is None else recorder.forward
        choices = [choice for since, choice in self._choices if since <= last]
        return predict(self.problem, choices[-1] if choices else self.prediction.choice)

    def announce(self) -> None:
        """Say what was chosen, and why."""
        self._say("chosen from sizes and the link" if not self._is_known() else "chosen from what was measured before")

    def give_up(self, path: str) -> None:
        """See `Relief`. The next call is tried with a choice that leaves more room."""
        with suppress(KeyError):
            failed = self.problem.component(path)
            free = self._platform.free_bytes()
            grown = replace(failed, activation_nbytes=max(2 * failed.activation_nbytes, free))
            parts = (grown if part is failed else part for part in self.problem.components)
            self.problem = replace(self.problem, components=tuple(parts))
            self._look_for_better_kinds()
            if self.better is not None:
                logger.warning("The device's memory is too short for %s; the next call gets other kinds.", path)

    def detach(self) -> None:
        """Leave the offload as it is."""
        backend = self._enabled()
        backend.watch(None)
        for handle in users(backend):
            handle.automatic = None

    def take_better(self) -> OffloadConfig:
        """The configuration of `better`, which is the choice from now on."""
        assert self.better is not None
        self.prediction, self.better = self.better, None
        self._is_settled = False
        return self.config

    def return_to(self, former: Prediction) -> None:
        """What `take_better` gave couldn't be enabled: this is the choice again, and that isn't tried once more."""
        self._impossible.append(self.prediction.choice.kinds)
        self.prediction, self._is_settled = former, True

    # ------------------------------------------------------------------ while the pipeline runs

    def component_has_run(self, path: str) -> None:
        """See `Watcher`. The forward that is measured has each block's time."""
        self._forwards[path] += 1
        if self._is_settled or self._forwards[path] != _MEASURED_FORWARD or path not in self._counts():
            return
        recorder = self._enabled().streamer.recorder
        if recorder is not None and not self._is_known():
            measured = measure(recorder.spans(), self._blocks(), activations=recorder.activations())
            self._learn(measured, calls=0)
            self._choose_anew()
            recorder.steady_from = recorder.forward + 1

    def call_has_ended(self) -> None:
        """See `Watcher`. The first call has all activations and numbers of forwards."""
        records = self._enabled().records
        if self._is_settled:
            self._watch_the_budget()
        if self._is_settled or records.is_waiting or records.latest is None:
            return
        recorder = records.latest
        measured = measure(
            recorder.spans(),
            self._blocks(),
            activations=recorder.activations(),
            peak_nbytes=recorder.peak_nbytes,
            since=recorder.steady_from,
        )
        if not recorder.calls:
            # The rest of a call: the next one is measured as a whole.
            self._learn(measured, calls=0)
            self._choose_anew()
            self._record_anew()
            return
        # A forward by itself, in a loop of the caller's, doesn't say how many there are.
        is_whole = any(component.forwards > 1 for component in measured.components.values())
        self._is_settled = True
        if is_whole:
            self._prospect.keep(measured)
        self._learn(measured, calls=int(is_whole))
        self._choose_anew()
        self._most_allocated = self._platform.peak_bytes()
        if is_whole:
            self._look_for_better_kinds()

    def _look_for_better_kinds(self) -> None:
        """The kinds were chosen when nobody knew how long the compute takes."""
        with suppress(DoesNotFit):  # Which was said already.
            best = choose_something(self.problem, self.is_assumed)
            now = predict(self.problem, self.prediction.choice)
            worth_it = best.call_seconds < now.call_seconds * (1 - _WORTH_ENABLING)
            is_new = best.choice.kinds not in (now.choice.kinds, *self._impossible)
            if is_new and (worth_it or not fits(self.problem, now.choice)):
                self.better = best

    def _watch_the_budget(self) -> None:
        """A call took more than those before it, as larger images do: the next is to take less, and is measured."""
        backend, most = self._enabled(), self._platform.peak_bytes()
        others = self._platform.allocated_bytes() - backend.device_weights_nbytes()
        excess = most - max(others, 0) - self.problem.device_nbytes
        is_new, self._most_allocated = most > self._most_allocated, most
        if not is_new or excess <= 0:
            return
        logger.warning(
            "This call took %s more on the device than its budget of %s; the next one is measured.",
            format_bytes(excess),
            format_bytes(self.problem.device_nbytes),
        )
        runs = self.prediction.peak_in
        components = tuple(
            replace(part, activation_nbytes=part.activation_nbytes + excess) if part.path == runs else part
            for part in self.problem.components
        )
        self.problem = replace(self.problem, components=components)
        self._choose_anew("chosen anew, since a call took more than the budget")
        self._is_settled = False
        self._record_anew()

    def weights_have_changed(self) -> None:
        """See `Watcher`. They may have come, gone or grown, as a LoRA's do."""
        pipe = self._pipe()
        if pipe is None:
            return
        known = {component.path: component for component in self.problem.components}
        costs, _ = survey_blocks(pipe, declarations=adapter_for(stock_class(type(pipe))))
        self.problem = replace(self.problem, components=tuple(resized(cost, known.get(cost.path)) for cost in costs))
        if set(known) == {cost.path for cost in costs}:
            self._choose_anew("chosen anew, since weights have changed")

    def can_make_room(self, path: str) -> bool:
        """See `Relief`. What a cache has noted of a forward that failed would count in the next one."""
        backend = self._enabled()
        module = next((module for at, module in backend.components if at == path), None)
        if module is not None and cache_of(module) is not None:
            return False
        return bool(backend.streamer.slots.nbytes + backend.stages.nbytes or any(self._counts().values()))

    def make_room(self, path: str) -> None:
        """See `Relief`: blocks that were to stay leave, as far as the host's limit allows."""
        backend = self._enabled()
        logger.warning(
            "The device's memory is too short for %s: resident blocks leave, and it is run once more.",
            path or "weights that came since",
        )
        backend.stages.give_up_all()
        fewest = with_the_fewest(self.problem, self.prediction.choice).choice.residents
        self._keep({path: fewest.get(path, 0) for path in self._counts()}, 2)
        backend.streamer.release_slots()
        self._platform.return_freed_memory()
        # What there was is a measurement, too.
        available = backend.device_weights_nbytes() + self._platform.free_bytes()
        self.problem = replace(self.problem, device_nbytes=min(self.problem.device_nbytes, available))
        # What it takes is measured, and the call chosen anew at its end.
        self._is_settled = False
        self._record_anew()

    def _learn(self, measured: Measured, calls: int) -> None:
        """What was measured is known now."""
        self.problem = with_measured(self.problem, measured, calls=calls)
        self.is_assumed = self.is_assumed and not measured.components

    def _choose_anew(self, how: str = "chosen anew from what was measured") -> None:
        """Residents and slots for what is known now; kinds stay."""
        self.problem = alike(self.problem)
        try:
            found = choose(self.problem, self.prediction.choice.kinds)
        except DoesNotFit as error:
            logger.warning("As it is offloaded now: %s Nothing is kept on the device meanwhile.", str(error))
            found = with_the_fewest(self.problem, self.prediction.choice)
        before = predict(self.problem, self.prediction.choice)
        is_as_fast = before.call_seconds <= found.call_seconds * (1 + _WORTH_IT)
        if is_as_fast and before.peak_nbytes <= self.problem.device_nbytes:
            self.prediction = before
            return
        self.prediction = found
        counts = {path: found.choice.residents.get(path, 0) for path in self._counts()}
        try:
            self._keep(counts, found.choice.slots)
        except torch.OutOfMemoryError:
            self.make_room("the blocks that were to stay")
        recorder = self._enabled().records.latest
        if recorder is not None:
            self._choices.append((recorder.forward + 1, self.prediction.choice))
        self._say(how)

    def _keep(self, counts: Mapping[str, int], slots: int) -> None:
        backend = self._enabled()
        keeping = Keeping(backend)
        if not keeping.can_change:
            return
        try:
            keeping.keep(counts, slots)
        finally:
            assert backend.plan is not None
            kept = {stack.component: len(stack.resident) for stack in backend.plan.stacks if stack.resident}
            choice = replace(self.prediction.choice, residents=kept, slots=backend.streamer.slots.count)
            self.prediction = predict(self.problem, choice)
            backend.config = self.config
            for handle in users(backend):
                handle.follow(backend.plan, backend.config)

    # ------------------------------------------------------------------ what it says

    def _say(self, how: str) -> None:
        others = other_arguments(self.config, self._platform.device)
        for line in explain(self.problem, self.prediction, how, others, is_assumed=self.is_assumed):
            logger.info("%s", line)

    # ------------------------------------------------------------------ what there is

    def _enabled(self) -> PlanBackend:
        backend = self._backend()
        assert backend is not None
        return backend

    def _record_anew(self) -> None:
        self._enabled().records.start()
        self._choices = [(0, self.prediction.choice)]

    def _counts(self) -> dict[str, int]:
        """Path of a component with a stack that may keep blocks -> how many it keeps now."""
        plan = self._enabled().plan
        stacks = () if plan is None else plan.stacks
        may_keep = {component.path for component in self.problem.components if component.may_keep_blocks}
        return {stack.component: len(stack.resident) for stack in stacks if stack.component in may_keep}

    def _blocks(self) -> dict[str, list[str]]:
        """Path of a component with a stack -> paths of its blocks."""
        plan = self._enabled().plan
        stacks = () if plan is None else plan.stacks
        return {stack.component: stack.paths for stack in stacks}

    def _is_known(self) -> bool:
        """Whether the compute of some block is."""
        return any(block.seconds for component in self.problem.components for block in component.blocks)

    def _has_plenty(self) -> bool:
        """Whether all weights fit into half of the budget, so that activations hardly can be too large."""
        return sum(component.nbytes for component in self.problem.components) <= self.problem.device_nbytes // 2
