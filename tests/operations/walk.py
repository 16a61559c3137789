"""A random walk: a resident pipeline and its offloaded twin go through the same operations, with a call after each."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests import simdevice
from tests.operations.cell import call
from tests.operations.families import Family
from tests.operations.moves import MOVES, Move
from tests.operations.placements import misplaced
from tests.operations.subject import Change, Subject


@dataclass(frozen=True)
class Held:
    """What an offloaded pipeline holds at rest, in bytes."""

    masters: int
    pinned: int
    on_device: int

    @classmethod
    def of(cls, pipe: Any) -> Held:
        gc.collect()
        return cls(
            sum(master.nbytes for master in pipe.omni_offload.backend.masters),
            simdevice.stats()["pinned_current"],
            torch.accelerator.memory_allocated(),
        )


class Walk:
    """Two pipelines that stay equal at every step.

    Args:
        family: of both.
        options: arguments of `enable_omni_offload` for the second.
        device: where both run.
        seed: of the choices.

    Attributes:
        held: what the offloaded one held before the first step.
        done: how often each move was made.
        outputs: bytes of the different outputs seen.
        failed: the calls that failed, with and without offload.
    """

    def __init__(self, family: Family, options: dict[str, Any], device: torch.device, seed: int) -> None:
        self._rng = random.Random(seed)
        self._device = device
        self.resident, self.offloaded = Subject(family), Subject(family)
        self.resident.pipe.to(device)
        self.offloaded.pipe.enable_omni_offload(**options)
        self.done: Counter[str] = Counter()
        self.outputs: set[bytes] = set()
        self.failed = 0
        for _ in range(2):
            self.compare("at the start")
        self.held = Held.of(self.offloaded.pipe)

    def step(self) -> None:
        """One operation on both, and a call of both.

        Raises:
            AssertionError: something isn't the same.
        """
        move, change = self._choose()
        self.done[move.__name__] += 1
        what = f"step {self.done.total()}, {move.__name__}"
        raised = [_error_of(change, subject) for subject in (self.resident, self.offloaded)]
        assert type(raised[0]) is type(raised[1]), (
            f"{what}: without offload it raises {raised[0]!r}, with {raised[1]!r}"
        )
        self.compare(what)

    def compare(self, what: str) -> None:
        """Call both."""
        expected, found = call(self.resident), call(self.offloaded)
        if isinstance(expected, Exception):
            assert type(found) is type(expected), f"{what}: {found!r}, without offload {expected!r}"
            self.failed += 1
        else:
            assert np.isfinite(expected).all() and np.ptp(expected) > 0, f"{what}: the output says nothing"
            assert isinstance(found, np.ndarray), f"{what}: {found!r}"
            assert np.array_equal(found, expected), f"{what}: {int((found != expected).sum())} values differ"
            self.outputs.add(expected.tobytes())
        assert simdevice.hazards() == [], what
        assert misplaced(self.offloaded.pipe, self._device) == [], what

    def unload(self) -> None:
        """Take all LoRA layers out of both, and call them."""
        for subject in (self.resident, self.offloaded):
            subject.pipe.unload_lora_weights()
        self.compare("all unloaded")

    def _choose(self) -> tuple[Move, Change]:
        while True:
            move = self._rng.choices(list(MOVES), list(MOVES.values()))[0]
            change = move(self._rng, self.resident)
            if change is not None:
                return move, change


def _error_of(change: Change, subject: Subject) -> Exception | None:
    try:
        change(subject)
    except Exception as error:
        return error
    return None
