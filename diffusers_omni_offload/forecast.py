"""What each mode would take of device and host memory and of time, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from diffusers_omni_offload.config import SELECTORS
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.cautious import choose_something
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem
from diffusers_omni_offload.planning.memory import StackSizes, fits
from diffusers_omni_offload.planning.predicting import predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.refusal import DoesNotFit
from diffusers_omni_offload.planning.times import format_seconds
from diffusers_omni_offload.planning.workload import Workload
from diffusers_omni_offload.tables import Table

if TYPE_CHECKING:
    import rich.console


@dataclass(frozen=True)
class ComponentShare:
    """Where a component's bytes are in a mode.

    Attributes:
        kind: "resident", "module" or "layer".
        resident_nbytes: bytes that stay on the device.
        streamed_nbytes: bytes of blocks that are streamed.
        swapped_nbytes: bytes that come and go as a whole.
        residents: how many of its blocks stay.
        blocks: how many it has.
    """

    kind: str
    resident_nbytes: int = 0
    streamed_nbytes: int = 0
    swapped_nbytes: int = 0
    residents: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        if self.swapped_nbytes:
            return "swapped"
        if not self.streamed_nbytes:
            return "resident"
        streamed = f"{format_bytes(self.streamed_nbytes)} streamed"
        return f"{streamed},\n{self.residents} of {self.blocks} blocks stay" if self.residents else streamed


@dataclass(frozen=True)
class ModeForecast:
    """One mode.

    Attributes:
        name: "resident", "module", "layer", "layer, rest swapped" or "auto".
        call: the line of Python that asks for it.
        prediction: what it takes; None if nothing fits.
        components: path of a component -> where its bytes are.
        fits: whether it does, in the budgets; None without one.
        problem: why nothing fits, in a sentence; None if something does.
    """

    name: str
    call: str
    prediction: Prediction | None = None
    components: Mapping[str, ComponentShare] = field(default_factory=dict)
    fits: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, repr=False)
class OffloadForecast:
    """What `plan_omni_offload` found. `print`, rich and notebooks show it as tables.

    Attributes:
        pipeline: the class of the pipeline.
        problem: its sizes and times, and the link.
        modes: one entry a mode.
        memory_budget: device bytes that may be taken; None if that isn't known.
        host_memory_budget: host bytes that offloaded weights may take; None for no limit.
        workload: what a call does; None for a family whose operations aren't known.
        operations_per_s: the device's rate that times of computing follow from; None if it isn't known: then they were
            measured, or times are those of the copies alone.
        notes: what else the reader should know.
    """

    pipeline: str
    problem: Problem
    modes: tuple[ModeForecast, ...]
    memory_budget: int | None = None
    host_memory_budget: int | None = None
    workload: Workload | None = None
    operations_per_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def knows_compute(self) -> bool:
        """Whether times include what the DiTs compute."""
        return any(block.seconds for component in self.problem.components for block in component.blocks)

    @property
    def best(self) -> ModeForecast | None:
        """The mode with the fastest call of those that fit; None without a budget, or if none does."""
        fitting = [(mode.prediction.call_seconds, mode) for mode in self.modes if mode.fits and mode.prediction]
        return min(fitting, key=lambda found: found[0])[1] if fitting else None

    def mode(self, name: str) -> ModeForecast:
        """The mode of this name. KeyError with the names that there are."""
        for mode in self.modes:
            if mode.name == name:
                return mode
        raise KeyError(f"No mode {name!r}; there are {', '.join(mode.name for mode in self.modes)}.")

    def tables(self) -> tuple[Table, Table, Table]:
        """The components; what each mode does with them; what each mode takes."""
        return self._component_table(), self._placement_table(), self._mode_table()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, in bytes, seconds, bytes or operations a second; None for what isn't known."""
        problem = self.problem
        return {
            "pipeline": self.pipeline,
            "memory_budget": self.memory_budget,
            "host_memory_budget": self.host_memory_budget,
            "link_bytes_per_s": problem.rates.link_bytes_per_s,
            "link_source": problem.rates.source,
            "operations_per_s": self.operations_per_s,
            "compute_is_known": self.knows_compute,
            "call": None if self.workload is None else asdict(self.workload.call),
            "components": [_component_dict(component) for component in problem.components],
            "modes": [self._mode_dict(mode) for mode in self.modes],
            "notes": list(self._notes()),
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def __repr__(self) -> str:
        return str(self)  # a prompt of Python shows this

    def __rich__(self) -> rich.console.RenderableType:
        from rich.console import Group

        return Group(*self.tables())

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())

    def _component_table(self) -> Table:
        rows = [
            (
                component.path,
                component.class_name,
                f"{component.parameters:,}",
                format_bytes(component.nbytes),
                _dtypes(component),
                f"{len(component.blocks)} of {_sizes(component)}" if component.blocks else "none",
            )
            for component in self._shown
        ]
        headers = ("component", "class", "parameters", "bytes", "dtype", "blocks that can be streamed")
        return Table(self.pipeline, headers, rows, left=2, left_end=2)

    def _placement_table(self) -> Table:
        rows = [
            (component.path, *(str(mode.components.get(component.path, "")) for mode in self.modes))
            for component in self._shown
        ]
        headers = ("component", *(mode.name for mode in self.modes))
        return Table("Weights, by mode", headers, rows, left_end=len(self.modes))

    def _mode_table(self) -> Table:
        columns = ["mode", "device,\nat most", "device,\nalways", "host,\npinned", "copied\nin a call"]
        columns += ["forward", "call", "bound by"] if self.knows_compute else ["copies,\nforward", "copies,\ncall"]
        rows = [[*self._memory_cells(mode), *self._time_cells(mode)] for mode in self.modes]
        if self.memory_budget is not None:
            columns.append("fits")
            rows = [[*row, "yes" if mode.fits else "no"] for row, mode in zip(rows, self.modes, strict=True)]
        return Table("Predicted, by mode", columns, rows, tuple(self._notes()))

    def _memory_cells(self, mode: ModeForecast) -> list[str]:
        found = mode.prediction
        if found is None:
            return [mode.name, "", "", "", ""]
        peak = f"{format_bytes(found.peak_nbytes)}\n{found.peak_in}"
        sizes = (found.resident_nbytes, found.host_nbytes, found.moved_nbytes)
        return [mode.name, peak, *map(format_bytes, sizes)]

    def _time_cells(self, mode: ModeForecast) -> list[str]:
        found, dit = mode.prediction, self._dit
        step = None if found is None or dit is None else found.steps[dit.path]
        cells = [
            "" if step is None else format_seconds(step.seconds),
            "" if found is None else format_seconds(found.call_seconds),
        ]
        return [*cells, "" if step is None else step.bound] if self.knows_compute else cells

    @property
    def _shown(self) -> list[ComponentCost]:
        """Those that hold something."""
        return [component for component in self.problem.components if component.nbytes]

    @property
    def _dit(self) -> ComponentCost | None:
        """The one whose forwards are shown: the largest."""
        dits = [component for component in self.problem.components if component.role == "dit"]
        return max(dits, key=lambda component: component.nbytes, default=None)

    def _notes(self) -> Iterator[str]:
        for mode in self.modes:
            yield f"{mode.name}: {mode.call}" if mode.problem is None else f"{mode.name}: {mode.problem}"
        if self.best is not None:
            yield f"The fastest that fits: {self.best.name}"
        yield "Below what the device holds at the most: the component that runs then"
        if self._dit is not None:
            yield f"Forwards are those of {self._dit.path}"
        rates = self.problem.rates
        yield f"Link: {rates.link_bytes_per_s / 1e9:.3g} GB/s, {rates.source}"
        if self.workload is not None:
            yield f"A call: {self.workload}"
        if self.knows_compute and not self.operations_per_s:
            yield "Compute and activations: measured on this machine in an earlier call"
        else:
            yield from self._assumptions()
        if self.memory_budget is not None:
            yield f"Device memory: {format_bytes(self.memory_budget)} may be taken"
        yield from self.notes

    def _assumptions(self) -> Iterator[str]:
        if self.knows_compute:
            assert self.operations_per_s is not None
            yield f"Compute: {self.operations_per_s / 1e12:.0f} TFLOPS, given; what VAEs compute isn't counted"
        else:
            yield "Compute isn't known, so the times are those of the copies alone"
        if any(component.activation_nbytes for component in self.problem.components):
            yield "Activations are estimated from the resolution"
        else:
            yield "Activations come on top: how many bytes they take isn't known"

    def _mode_dict(self, mode: ModeForecast) -> dict[str, Any]:
        found, dit = mode.prediction, self._dit
        figures: dict[str, Any] = {}
        if found is not None:
            step = None if dit is None else found.steps[dit.path]
            figures = {
                "peak_nbytes": found.peak_nbytes,
                "peak_in": found.peak_in,
                "resident_nbytes": found.resident_nbytes,
                "host_nbytes": found.host_nbytes,
                "moved_nbytes": found.moved_nbytes,
                "forward_of": None if dit is None else dit.path,
                "forward_seconds": None if step is None else step.seconds,
                "compute_seconds": step.compute_seconds if step is not None and self.knows_compute else None,
                "copy_seconds": None if step is None else step.copy_seconds,
                "bound": step.bound if step is not None and self.knows_compute else None,
                "call_seconds": found.call_seconds,
                "slots": found.choice.slots if "layer" in found.choice.kinds.values() else 0,
            }
        components = {path: asdict(share) for path, share in mode.components.items()}
        known = {"name": mode.name, "call": mode.call, "fits": mode.fits, "problem": mode.problem}
        return {**known, **figures, "components": components}


def forecast(
    pipeline: str,
    problem: Problem,
    *,
    memory_budget: int | None = None,
    workload: Workload | None = None,
    operations_per_s: float | None = None,
    notes: tuple[str, ...] = (),
) -> OffloadForecast:
    """What every mode takes.

    Args:
        pipeline: the pipeline's class.
        problem: sizes, times and rates. Its `device_nbytes` counts for "auto" only if there is a budget.
        memory_budget: device bytes that may be taken; None if that isn't known: then nothing is said to fit, and there
            is no "auto".
        workload: what a call does, if known.
        operations_per_s: what times of computing were made with, if known.
        notes: what else to say.
    """
    modes = [_mode(problem, name, call, choice, memory_budget) for name, call, choice in _fixed(problem)]
    if memory_budget is not None:
        modes.append(_automatic(problem, memory_budget))
    return OffloadForecast(
        pipeline, problem, tuple(modes), memory_budget, problem.host_nbytes, workload, operations_per_s, notes
    )


def _fixed(problem: Problem) -> Iterator[tuple[str, str, Choice]]:
    """Name, call and choice of each mode that isn't made for a budget."""
    components = problem.components
    resident = dict.fromkeys((component.path for component in components), "resident")
    yield "resident", "pipe.to(device)", Choice(resident)
    movable = [component for component in components if component.may_swap and component.role in ("dit", "encoder")]
    if any(component.role == "encoder" for component in movable):
        kinds = {**resident, **{component.path: "module" for component in movable}}
        yield "module", 'pipe.enable_omni_offload("module")', Choice(kinds)
    streamed = {component.path: "layer" for component in components if component.role == "dit" and component.blocks}
    if streamed:
        yield "layer", 'pipe.enable_omni_offload("layer")', Choice({**resident, **streamed})
        swapped = [component for component in components if component.may_swap and component.role in ("encoder", "vae")]
        if swapped:
            chosen = {"dit": "layer", **{component.selector: "module" for component in swapped}}
            ordered = {name: chosen[name] for name in (*SELECTORS, *chosen) if name in chosen}
            kinds = {**resident, **{component.path: "module" for component in swapped}, **streamed}
            yield "layer, rest swapped", f"pipe.enable_omni_offload(components={ordered!r})", Choice(kinds)


def _mode(problem: Problem, name: str, call: str, choice: Choice, memory_budget: int | None) -> ModeForecast:
    does_fit = None if memory_budget is None else fits(problem, choice)
    return ModeForecast(name, call, predict(problem, choice), _shares(problem, choice), does_fit)


def _automatic(problem: Problem, memory_budget: int) -> ModeForecast:
    try:
        choice = choose_something(problem, is_assumed=False).choice
    except DoesNotFit as error:
        return ModeForecast("auto", "", fits=False, problem=str(error))
    return _mode(problem, "auto", choice.as_call(), choice, memory_budget)


def _shares(problem: Problem, choice: Choice) -> dict[str, ComponentShare]:
    return {component.path: _share(component, choice) for component in problem.components}


def _share(component: ComponentCost, choice: Choice) -> ComponentShare:
    kind, count = choice.kinds[component.path], len(component.blocks)
    if kind == "module":
        return ComponentShare(kind, swapped_nbytes=component.nbytes, blocks=count)
    if kind == "resident":
        return ComponentShare(kind, resident_nbytes=component.nbytes, residents=count, blocks=count)
    residents = choice.residents.get(component.path, 0)
    streamed = StackSizes.of(component, residents).streamed_nbytes
    return ComponentShare(kind, component.nbytes - streamed, streamed, residents=min(residents, count), blocks=count)


def _component_dict(component: ComponentCost) -> dict[str, Any]:
    figures = asdict(component)
    figures["dtypes"] = dict(component.dtypes)
    figures["blocks"] = [{"nbytes": block.nbytes, "seconds": block.seconds or None} for block in component.blocks]
    return figures


def _dtypes(component: ComponentCost) -> str:
    """The dtypes that matter."""
    total = sum(component.dtypes.values())
    return ", ".join(name for name, nbytes in component.dtypes.items() if nbytes * 1000 >= total)


def _sizes(component: ComponentCost) -> str:
    """The smallest block and the largest one."""
    sizes = [block.nbytes for block in component.blocks]
    return " to ".join(dict.fromkeys((format_bytes(min(sizes)), format_bytes(max(sizes)))))
