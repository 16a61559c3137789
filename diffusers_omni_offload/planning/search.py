"""The fastest choice that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem
from diffusers_omni_offload.planning.memory import Memory
from diffusers_omni_offload.planning.predicting import Part, predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.refusal import DoesNotFit, device_refusal, host_refusal

#: Numbers of slots that are tried where something is streamed.
SLOTS = (2, 3, 4)
#: Calls that differ by less than this share are as fast as each other.
AS_FAST = 1e-3


@dataclass(frozen=True)
class Option:
    """What may be chosen for a component: its kind, and its resident blocks if it is streamed."""

    kind: str
    residents: int = 0


def choices(problem: Problem, kinds: Mapping[str, str] | None = None) -> Iterator[Choice]:
    """Every choice that makes sense, whether it fits or not.

    DiTs of the same class and number of blocks get the same. A DiT that may keep blocks is never "resident": "layer"
    with all of its blocks resident is the same, and can give some up later.

    Args:
        problem: the pipeline and the machine.
        kinds: path of a component -> its kind, if that isn't to be chosen any more.
    """
    groups = _groups(problem, kinds)
    for options in product(*(_options(group[0], kinds) for group in groups)):
        for slots in _slots(options):
            yield _choice(groups, options, slots)


def choose(problem: Problem, kinds: Mapping[str, str] | None = None) -> Prediction:
    """The choice with the fastest call of those that fit on the device and in host memory; of those that are as fast,
    the one that takes the least device memory.

    Args:
        problem: the pipeline and the machine.
        kinds: path of a component -> its kind, if that isn't to be chosen any more: then only residents and slots are.

    Raises:
        DoesNotFit: there is none. It says how much is missing, where, and what would help.
    """
    return predict(problem, _Search(problem, kinds or {}).run())


def _groups(problem: Problem, kinds: Mapping[str, str] | None) -> list[list[ComponentCost]]:
    """Components that get the same."""
    groups: dict[object, list[ComponentCost]] = {}
    for component in problem.components:
        is_twin = component.role == "dit" and component.class_name
        given = (kinds or {}).get(component.path)
        key = (component.class_name, len(component.blocks), given) if is_twin else component.path
        groups.setdefault(key, []).append(component)
    return list(groups.values())


def _options(component: ComponentCost, kinds: Mapping[str, str] | None = None) -> list[Option]:
    """What may be chosen for a component; of one kind, if that is given."""
    kind = (kinds or {}).get(component.path)
    if kind is not None:
        return [option for option in _every_option(component) if option.kind == kind] or [Option(kind)]
    return _every_option(component)


def _every_option(component: ComponentCost) -> list[Option]:
    count = len(component.blocks)
    options = [Option("module")] if component.may_swap else []
    # A single block would never leave its slot.
    streamed = [Option("layer")] if count >= 2 else []
    if streamed and component.may_keep_blocks:
        streamed = [Option("layer", residents) for residents in (*range(count - 1), count)]
        return [*options, *streamed]
    return [Option("resident"), *options, *streamed]


def _slots(options: Sequence[Option]) -> Sequence[int]:
    return SLOTS if any(option.kind == "layer" for option in options) else SLOTS[:1]


def _choice(groups: Sequence[Sequence[ComponentCost]], options: Sequence[Option], slots: int) -> Choice:
    by_path = {component.path: option for group, option in zip(groups, options, strict=True) for component in group}
    residents = {path: option.residents for path, option in by_path.items() if option.residents}
    return Choice({path: option.kind for path, option in by_path.items()}, residents, slots)


class _Search:
    """Looks at choices in the order of their times, and only at those that may be the fastest.

    A call's time is the sum over the components, so each is timed for itself, once an option and number of slots.
    Memory isn't a sum: it is looked at for each set of kinds.
    """

    def __init__(self, problem: Problem, kinds: Mapping[str, str]) -> None:
        self._problem, self._kinds = problem, kinds
        self._groups = _groups(problem, kinds)
        self._times: dict[tuple[str, str, int, int], float] = {}
        # Those whose times are the same have one name.
        names: dict[object, str] = {}
        self._twins = {
            part.path: names.setdefault((part.blocks, part.nbytes, part.seconds, part.forwards), part.path)
            for part in problem.components
        }
        self._best: float | None = None
        # Of the choices that fit and are as fast as the best: seconds, device bytes, choice.
        self._found: list[tuple[float, int, Choice]] = []

    def run(self) -> Choice:
        """The best one. DoesNotFit if there is none."""
        for slots in SLOTS:
            for kinds in self._all_kinds():
                if slots == SLOTS[0] or "layer" in kinds:
                    self._look_at(kinds, slots)
        if self._best is None:
            raise self._refusal()
        limit = self._best * (1 + AS_FAST)
        return min((found for found in self._found if found[0] <= limit), key=lambda found: (found[1], found[0]))[2]

    def _look_at(self, kinds: Sequence[str], slots: int) -> None:
        """All choices of these kinds."""
        memory = self._memory(kinds)
        if memory.floor() > self._problem.device_nbytes:
            return
        ranked = [self._ranked(group, kind, slots) for group, kind in zip(self._groups, kinds, strict=True)]
        self._descend(memory, ranked, slots, [], 0.0)

    def _all_kinds(self) -> Iterator[tuple[str, ...]]:
        """A kind for each group."""
        options = [_options(group[0], self._kinds) for group in self._groups]
        return product(*(dict.fromkeys(option.kind for option in found) for found in options))

    def _memory(self, kinds: Sequence[str]) -> Memory:
        pairs = zip(self._groups, kinds, strict=True)
        return Memory(self._problem, {component.path: kind for group, kind in pairs for component in group})

    def _ranked(self, group: Sequence[ComponentCost], kind: str, slots: int) -> list[tuple[float, Option]]:
        """The options of a kind with the seconds of the group's part of a call, the fastest first."""
        options = _options(group[0], {group[0].path: kind})
        return sorted(
            ((sum(self._seconds(component, option, slots) for component in group), option) for option in options),
            key=lambda ranked: ranked[0],
        )

    def _seconds(self, component: ComponentCost, option: Option, slots: int) -> float:
        key = self._twins[component.path], option.kind, option.residents, slots
        if key not in self._times:
            part = Part(component, option.kind, option.residents, slots, self._problem.rates)
            self._times[key] = part.call_seconds
        return self._times[key]

    def _descend(
        self,
        memory: Memory,
        ranked: Sequence[Sequence[tuple[float, Option]]],
        slots: int,
        chosen: list[Option],
        seconds: float,
    ) -> None:
        if len(chosen) == len(ranked):
            self._try(memory, chosen, slots, seconds)
            return
        rest = sum(options[0][0] for options in ranked[len(chosen) + 1 :])
        for taken, option in ranked[len(chosen)]:
            if self._best is not None and seconds + taken + rest > self._best * (1 + AS_FAST):
                return
            self._descend(memory, ranked, slots, [*chosen, option], seconds + taken)

    def _try(self, memory: Memory, options: Sequence[Option], slots: int, seconds: float) -> None:
        choice = _choice(self._groups, options, slots)
        nbytes, _ = memory.peak(choice.residents, slots)
        if nbytes > self._problem.device_nbytes or not memory.fits(choice.residents, slots):
            return
        if self._best is None or seconds < self._best:
            self._best = seconds
        self._found.append((seconds, nbytes, choice))

    def _missing_on_host(self, memory: Memory, choice: Choice) -> int:
        limit = self._problem.host_nbytes
        return 0 if limit is None else memory.host_nbytes(choice.residents) - limit

    def _refusal(self) -> DoesNotFit:
        """No choice fits: which one is the nearest to it?"""
        least: tuple[int, int, Choice] | None = None
        for kinds in self._all_kinds():
            memory = self._memory(kinds)
            at_least = memory.floor() - self._problem.device_nbytes
            if least is not None and at_least > least[0]:
                continue
            pairs = zip(self._groups, kinds, strict=True)
            options = [_options(group[0], {group[0].path: kind}) for group, kind in pairs]
            for chosen in product(*options):
                choice = _choice(self._groups, chosen, SLOTS[0])
                missing = max(memory.needed(choice.residents, choice.slots) - self._problem.device_nbytes, 0)
                both = missing, self._missing_on_host(memory, choice)
                if least is None or both < least[:2]:
                    least = *both, choice
        assert least is not None
        return device_refusal(self._problem, least[2]) if least[0] else host_refusal(self._problem, least[2])
