"""What to say if no choice fits: how much is missing, where, and what would help."""

from __future__ import annotations

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem
from diffusers_omni_offload.planning.memory import Memory, whole_nbytes


class DoesNotFit(RuntimeError):
    """No choice fits.

    Attributes:
        missing_nbytes: bytes that are missing at the least.
        component: path of the component that they are missing for.
        is_host: whether it is host memory that is missing.
    """

    def __init__(self, message: str, missing_nbytes: int, component: str, *, is_host: bool = False) -> None:
        super().__init__(message)
        self.missing_nbytes, self.component, self.is_host = missing_nbytes, component, is_host


def device_refusal(problem: Problem, choice: Choice) -> DoesNotFit:
    """Device memory is missing.

    Args:
        problem: the pipeline and the machine.
        choice: the one that takes the least device memory.
    """
    memory = Memory(problem, choice.kinds)
    nbytes, path = memory.peak(choice.residents, choice.slots)
    runs, when = problem.component(path), f"while {path} runs"
    activations = runs.activation_nbytes
    at_first = memory.needed(choice.residents, choice.slots)
    if at_first > nbytes:
        nbytes, activations, when = at_first, 0, "before anything runs"
    missing = nbytes - problem.device_nbytes
    slots = min(memory.slots_nbytes(choice.residents, choice.slots), nbytes - activations)
    parts = [f"{format_bytes(nbytes - activations - slots)} of weights"]
    parts += [f"{format_bytes(slots)} of slots"] if slots else []
    parts += [f"{format_bytes(activations)} of activations"] if activations else []
    hints = [
        *_about_activations(runs, missing),
        *_about_what_stays(problem, choice, missing),
        *([f"slots=1, chosen by hand, which saves {format_bytes(slots // choice.slots)}"] if slots else []),
        "quantized weights",
    ]
    message = (
        f"{format_bytes(missing)} of device memory are missing at the least: {format_bytes(nbytes)} are needed "
        f"{when} ({', '.join(parts)}), and {format_bytes(problem.device_nbytes)} may be taken. What would help: "
        f"{'; '.join(hints)}."
    )
    return DoesNotFit(message, missing, path)


def host_refusal(problem: Problem, choice: Choice) -> DoesNotFit:
    """Host memory is missing.

    Args:
        problem: the pipeline and the machine, with a limit for the host.
        choice: the one that takes the least host memory of those that fit on the device.
    """
    limit = problem.host_nbytes
    assert limit is not None
    nbytes = Memory(problem, choice.kinds).host_nbytes(choice.residents)
    offloaded = [component for component in problem.components if choice.kinds[component.path] != "resident"]
    path = max(offloaded, key=lambda component: component.nbytes).path
    message = (
        f"{format_bytes(nbytes - limit)} of host memory are missing at the least: offloaded weights take "
        f"{format_bytes(nbytes)}, most of them {path}'s, and {format_bytes(limit)} may be taken. What would help: "
        "a larger host_memory_budget; weights that stay in their files (load_omni_pipeline); a larger memory_budget, "
        "since what stays on the device takes no host memory; quantized weights."
    )
    return DoesNotFit(message, nbytes - limit, path, is_host=True)


def _about_activations(runs: ComponentCost, missing: int) -> list[str]:
    if runs.activation_nbytes < missing // 4:
        return []
    hints = ["a smaller resolution" if runs.role != "encoder" else "a shorter prompt (max_sequence_length)"]
    if runs.role == "vae":
        hints.insert(0, f"tiles (pipe.{runs.path}.enable_tiling())")
    if runs.role in ("vae", "dit"):
        hints.append("fewer frames or images at a time")
    return hints


def _about_what_stays(problem: Problem, choice: Choice, missing: int) -> list[str]:
    """Components that are there as wholes since there is no other way."""
    hints = []
    for component in problem.components:
        kind, size = choice.kinds[component.path], format_bytes(whole_nbytes(component))
        if component.nbytes < missing // 4 or len(component.blocks) >= 2:
            continue
        if kind == "module":
            hints.append(f"an offload plan that names the blocks of {component.path} ({size}), so that it is streamed")
        elif not component.may_swap:
            hints.append(f"a smaller {component.path} ({size}), which can neither be streamed nor swapped")
    return hints
