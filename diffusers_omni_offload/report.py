"""A report: what was measured of an offloaded pipeline, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffusers_omni_offload.backends.base import Counters
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem
from diffusers_omni_offload.planning.measured import Measured, MeasuredComponent
from diffusers_omni_offload.planning.memory import StackSizes
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.times import bound_by, format_seconds
from diffusers_omni_offload.tables import Table

_UNKNOWN = "-"


@dataclass(frozen=True)
class ComponentReport:
    """One component. Times are those of a steady forward in seconds; what isn't known is None.

    Attributes:
        path: its path.
        mode: "resident", "module" or "layer".
        nbytes: bytes of all of it.
        resident_nbytes: bytes of it that stay on the device.
        offloaded_nbytes: bytes of it that are streamed or swapped.
        forwards: how often it ran.
        seconds: a forward, measured.
        predicted_seconds: a forward, predicted.
        is_compute_known: whether its compute is in `predicted_seconds`, which is a lower limit if not.
        wait_seconds: what the compute waited for blocks in a forward.
        loads: copies and gathers of its blocks, or of all of it, that were recorded.
        moved_nbytes: bytes of those.
        bound: what set the time of a forward, "compute" or "transfer".
        predicted_bound: what was predicted to.
    """

    path: str
    mode: str | None = None
    nbytes: int | None = None
    resident_nbytes: int | None = None
    offloaded_nbytes: int | None = None
    forwards: int | None = None
    seconds: float | None = None
    predicted_seconds: float | None = None
    is_compute_known: bool = False
    wait_seconds: float | None = None
    loads: int | None = None
    moved_nbytes: int | None = None
    bound: str | None = None
    predicted_bound: str | None = None


@dataclass(frozen=True, repr=False)
class OffloadReport:
    """What was measured beside what was predicted. `print`, rich and notebooks show it as a table.

    Attributes:
        device: the name of the device.
        figures: what the measured times are, "measured" or "modelled".
        components: one entry a component.
        counters: loads, swaps, bytes moved, device bytes and page-locked bytes held, since offload was enabled.
        peak_nbytes: device bytes at the most; None if unknown.
        predicted_peak_nbytes: the same, predicted.
        are_activations_known: whether activations are in `predicted_peak_nbytes`, which is of weights alone if not.
        predicted_peak_in: path of the component that was predicted to run then.
        predicted_host_nbytes: predicted host bytes of offloaded weights.
        link_bytes_per_s: rate of the copies; None if there were none.
        expected_link_bytes_per_s: the rate that the prediction was made with.
        expected_link_source: where that is from: "measured", "profile", "given" or "assumed".
        call: the line of Python that asks for these modes; None if there was no prediction.
        later_call: the same for the modes that were chosen since; None if they are the same.
    """

    device: str
    figures: str
    components: tuple[ComponentReport, ...]
    counters: Counters
    peak_nbytes: int | None = None
    predicted_peak_nbytes: int | None = None
    are_activations_known: bool = False
    predicted_peak_in: str | None = None
    predicted_host_nbytes: int | None = None
    link_bytes_per_s: float | None = None
    expected_link_bytes_per_s: float | None = None
    expected_link_source: str | None = None
    call: str | None = None
    later_call: str | None = None

    def table(self) -> Table:
        """A row for each component, and what concerns all of them below."""
        times = (f"forward\n{self.figures}", "forward\npredicted", "waits")
        headers = (
            "component",
            "mode",
            "bytes",
            "resident",
            "offloaded",
            "forwards",
            *times,
            "loads",
            "copied",
            "bound",
        )
        rows = [_row(component) for component in self.components]
        return Table(f"Offload on {self.device}", headers, rows, list(self._notes()), left=2, left_end=1)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values: bytes, seconds, bytes a second; None for what isn't known."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return str(self)  # a prompt of Python shows this

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _notes(self) -> Iterator[str]:
        counters = self.counters
        yield (
            f"Loads: {counters.loads} of blocks, {counters.demand_loads} of them on demand; {counters.swaps} of whole "
            f"components; {format_bytes(counters.bytes_moved)} copied since offload was enabled"
        )
        predicted = ""
        if self.predicted_peak_nbytes is not None:
            weights = "" if self.are_activations_known else " of weights"
            predicted = (
                f"predicted {format_bytes(self.predicted_peak_nbytes)}{weights}, while {self.predicted_peak_in} runs; "
            )
        peak = "not measured" if self.peak_nbytes is None else f"{format_bytes(self.peak_nbytes)} at the most"
        held = format_bytes(counters.device_bytes)
        yield f"Device memory: {peak} ({predicted}slots and swapped components take {held} now)"
        host = "" if self.predicted_host_nbytes is None else f" (predicted {format_bytes(self.predicted_host_nbytes)})"
        yield f"Host memory: {format_bytes(counters.pinned_bytes)} page-locked{host}"
        rate = (
            "not measured"
            if self.link_bytes_per_s is None
            else f"{self.link_bytes_per_s / 1e9:.3g} GB/s while it copied"
        )
        expected = ""
        if self.expected_link_bytes_per_s is not None:
            expected = f" (predicted with {self.expected_link_bytes_per_s / 1e9:.3g} GB/s, {self.expected_link_source})"
        yield f"Link: {rate}{expected}"
        if all(component.seconds is None for component in self.components):
            yield "No forward was recorded: run the pipeline inside of `with handle.trace():` to see its times here."
        if any(component.predicted_seconds and not component.is_compute_known for component in self.components):
            yield "Predictions with ≥ have copies only: how long the compute takes isn't known."
        if self.call is not None:
            yield f"By hand: {self.call}"
        if self.later_call is not None:
            yield f"Chosen since then: {self.later_call}"


def make_report(
    measured: Measured,
    counters: Counters,
    *,
    device: str,
    is_modelled: bool = False,
    problem: Problem | None = None,
    prediction: Prediction | None = None,
    others: Mapping[str, Any] | None = None,
    later: Choice | None = None,
) -> OffloadReport:
    """Measured figures beside predicted ones.

    Args:
        measured: what a recording holds; empty if there is none.
        counters: those of the offload.
        device: the name of the device.
        is_modelled: whether the device is simulated.
        problem: bytes of the components, and the link as it was expected to be.
        prediction: what was predicted of the modes that are on, for `problem`.
        others: arguments of `enable_omni_offload` besides those of the prediction's choice.
        later: what was chosen since, if it is something else.

    Returns:
        The report, with the components of the problem first.
    """
    costs: Mapping[str, ComponentCost] = {cost.path: cost for cost in problem.components} if problem is not None else {}
    paths = dict.fromkeys([*costs, *(prediction.steps if prediction is not None else ()), *measured.components])
    return OffloadReport(
        device=device,
        figures="modelled" if is_modelled else "measured",
        components=tuple(
            _component(path, costs.get(path), prediction, measured.components.get(path)) for path in paths
        ),
        counters=counters,
        peak_nbytes=measured.peak_nbytes or None,
        predicted_peak_nbytes=prediction.peak_nbytes if prediction is not None else None,
        are_activations_known=any(cost.activation_nbytes for cost in costs.values()),
        predicted_peak_in=prediction.peak_in if prediction is not None else None,
        predicted_host_nbytes=prediction.host_nbytes if prediction is not None else None,
        link_bytes_per_s=measured.link_bytes_per_s or None,
        expected_link_bytes_per_s=problem.rates.link_bytes_per_s if problem is not None else None,
        expected_link_source=problem.rates.source if problem is not None else None,
        call=prediction.choice.as_call(others) if prediction is not None else None,
        later_call=None if later is None or prediction is None or later == prediction.choice else later.as_call(others),
    )


def _component(
    path: str, cost: ComponentCost | None, prediction: Prediction | None, measured: MeasuredComponent | None
) -> ComponentReport:
    figures: dict[str, Any] = {}
    mode = prediction.choice.kinds.get(path) if prediction is not None else None
    if cost is not None:
        figures["nbytes"] = cost.nbytes
    if cost is not None and mode is not None and prediction is not None:
        offloaded = {"resident": 0, "module": cost.nbytes}.get(mode)
        if offloaded is None:
            offloaded = StackSizes.of(cost, prediction.choice.residents.get(path, 0)).streamed_nbytes
        figures |= {"offloaded_nbytes": offloaded, "resident_nbytes": cost.nbytes - offloaded}
    step = prediction.steps.get(path) if prediction is not None else None
    if step is not None:
        figures |= {
            "predicted_seconds": step.seconds,
            "is_compute_known": step.compute_seconds > 0,
            "predicted_bound": step.bound if step.compute_seconds else None,
        }
    if measured is not None:
        figures |= {
            "forwards": measured.forwards,
            "seconds": measured.seconds,
            "wait_seconds": measured.wait_seconds,
            "loads": measured.loads,
            "moved_nbytes": measured.moved_nbytes,
            "bound": bound_by(measured.wait_seconds, measured.seconds),
        }
    return ComponentReport(path, mode, **figures)


def _row(component: ComponentReport) -> list[str]:
    predicted = _UNKNOWN
    if component.predicted_seconds is not None and (component.is_compute_known or component.predicted_seconds > 0):
        predicted = ("" if component.is_compute_known else "≥ ") + format_seconds(component.predicted_seconds)
    return [
        component.path,
        component.mode or _UNKNOWN,
        *(
            _UNKNOWN if nbytes is None else format_bytes(nbytes)
            for nbytes in (component.nbytes, component.resident_nbytes, component.offloaded_nbytes)
        ),
        _UNKNOWN if component.forwards is None else str(component.forwards),
        _UNKNOWN if component.seconds is None else format_seconds(component.seconds),
        predicted,
        _UNKNOWN if component.wait_seconds is None else format_seconds(component.wait_seconds),
        _UNKNOWN if component.loads is None else str(component.loads),
        _UNKNOWN if component.moved_nbytes is None else format_bytes(component.moved_nbytes),
        _bound(component),
    ]


def _bound(component: ComponentReport) -> str:
    found, predicted = component.bound, component.predicted_bound
    if found and predicted and found != predicted:
        return f"{found}\n(predicted: {predicted})"
    return found or predicted or _UNKNOWN
