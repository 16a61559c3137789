"""Three lines: what was chosen, why, and the call that asks for it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.costs import Problem
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.times import format_seconds

_WORDS = {"resident": "on the device", "module": "swapped", "layer": "streamed"}


def explain(
    problem: Problem, prediction: Prediction, how: str, others: Mapping[str, Any], *, is_assumed: bool
) -> tuple[str, str, str]:
    """The lines.

    Args:
        problem: what was known.
        prediction: what was chosen.
        how: what led to it.
        others: arguments of `enable_omni_offload` besides those of the choice.
        is_assumed: whether activations are only assumed.
    """
    choice = prediction.choice
    parts = []
    for component in problem.components:
        what = _WORDS[choice.kinds[component.path]]
        if component.blocks and choice.residents.get(component.path) == len(component.blocks):
            what = "on the device"
        elif choice.kinds[component.path] == "layer":
            what += f", {choice.residents.get(component.path, 0)} of {len(component.blocks)} blocks stay"
        parts.append(f"{component.path} {what}")
    return (
        f"auto, {how}: {'; '.join(parts)}.",
        f"why: {'; '.join(_reasons(problem, prediction, is_assumed))}.",
        f"by hand: {choice.as_call(others)}",
    )


def _reasons(problem: Problem, prediction: Prediction, is_assumed: bool) -> list[str]:
    rates = problem.rates
    budget, where = format_bytes(problem.device_nbytes), f" (in {prediction.peak_in})" if prediction.peak_in else ""
    if is_assumed and prediction.peak_in:
        assumed = problem.component(prediction.peak_in).activation_nbytes
        most = f"{format_bytes(prediction.peak_nbytes - assumed)} of weights at the most{where}"
        most += f"; activations aren't known yet, {format_bytes(assumed)} of {budget} are kept for them"
    else:
        most = f"{format_bytes(prediction.peak_nbytes)} of {budget} at the most{where}"
    reasons = [
        most,
        f"the link gives {rates.link_bytes_per_s / 1e9:.3g} GB/s ({rates.source})",
    ]
    for path, kind in prediction.choice.kinds.items():
        step = prediction.steps[path]
        if kind == "layer" and step.compute_seconds:
            reasons.append(f"a forward of {path} takes {format_seconds(step.seconds)}, {step.bound}-bound")
        elif kind == "layer" and step.copy_seconds:
            reasons.append(f"the copies of a forward of {path} take {format_seconds(step.copy_seconds)}")
    return reasons
