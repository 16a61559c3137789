"""Bad input, in one sentence, and which errors of libraries are that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diffusers_omni_offload.agreement import AgreementError
from diffusers_omni_offload.planning.refusal import DoesNotFit
from diffusers_omni_offload.weights.checkpoint import CheckpointError


class BadInput(Exception):
    """What the user gave can't be done: the sentence that says what was found, what is allowed and what to do."""


class Failed(Exception):
    """What was asked for was right, but went wrong on the way: the sentence that says what and why."""


def one_line(error: BaseException | str) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def input_is_to_blame(what: str = "") -> Iterator[None]:
    """Errors of the body about values, files and what can't be offloaded are bad input. `what` goes before them."""
    before = f"{what}: " if what else ""
    try:
        yield
    except (torch.OutOfMemoryError, AgreementError):
        raise
    except (ValueError, TypeError, OSError, ImportError, CheckpointError, DoesNotFit) as error:
        raise BadInput(f"{before}{one_line(error)}") from error
    except RuntimeError as error:
        # Enabling raises it for what can't be offloaded; its subclasses are something else.
        if type(error) is not RuntimeError:
            raise
        raise BadInput(f"{before}{one_line(error)}") from error


@contextmanager
def arguments_are_to_blame() -> Iterator[None]:
    """In a pipeline's call wrong arguments are bad input; anything else is a bug, whose traceback is needed."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadInput(one_line(error)) from error


@contextmanager
def failures_are_sentences() -> Iterator[None]:
    """What may go wrong through no fault of the code: too little device memory, and ranks that are gone."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Failed(
            f"The device's memory didn't suffice: {one_line(error)} Take a smaller --memory-budget, another --mode "
            "(omni-offload plan has them all), or a smaller size."
        ) from error
    except AgreementError as error:
        raise Failed(one_line(error)) from error
