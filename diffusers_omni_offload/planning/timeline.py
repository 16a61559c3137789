"""How long forwards of a stack take, by the arithmetic of `streaming.streamer`.

Streamed blocks take turns in the slots. With `s` slots the copy of a streamed block waits for two things: that the copy
before it is over, and that the block `s` streamed blocks earlier, whose slot it gets, has been computed. A block's
forward waits for the block before it and for its own bytes. The host gives out work early enough not to matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diffusers_omni_offload.planning.costs import BlockCost, Rates
from diffusers_omni_offload.planning.prediction import StepPrediction

#: Forwards take turns in what they take if slots and blocks don't divide each other; so many rounds are followed.
_ROUNDS = 8
#: Two rounds that differ by less than this share are alike.
_ALIKE = 1e-7


class Timeline:
    """The forwards of a stack in a call, from its first one on, when no slot holds anything.

    Args:
        blocks: the stack's, in order.
        resident: indices of those that stay on the device.
        slots: number of slots.
        rates: the link.
        other_seconds: compute outside of blocks, once a forward, after the last block.

    Attributes:
        step: a forward in the steady state.
    """

    def __init__(
        self,
        blocks: Sequence[BlockCost],
        resident: Collection[int],
        slots: int,
        rates: Rates,
        other_seconds: float = 0.0,
    ) -> None:
        kept = frozenset(resident)
        self._other = other_seconds
        self._slots = slots
        # Seconds of a block's compute, and of its copy; None for a resident block.
        self._work = [
            (block.seconds, None if index in kept else rates.copy_latency_s + block.nbytes / rates.link_bytes_per_s)
            for index, block in enumerate(blocks)
        ]
        copies = [copy for _, copy in self._work if copy is not None]
        compute = sum(seconds for seconds, _ in self._work) + other_seconds
        # What fits into the slots all together is loaded once a call.
        self._is_loaded_once = len(copies) <= slots
        self._ends: list[float] = []
        self._follow()
        steady = compute if self._is_loaded_once else self._mean(len(self._ends) - 1)
        self.step = StepPrediction(steady, compute, 0.0 if self._is_loaded_once else sum(copies))

    def seconds(self, forwards: int) -> float:
        """From the begin of a call's first forward to the end of its forward number `forwards`."""
        if forwards <= 0:
            return 0.0
        known = min(forwards, len(self._ends))
        return self._ends[known - 1] + (forwards - known) * self.step.seconds

    def _follow(self) -> None:
        """Note when forwards end, until they have become alike."""
        if self._is_loaded_once:
            self._ends = self._run(1)
            return
        wanted = 2 * self._slots + 2
        self._ends = self._run(wanted)
        while not self._are_alike() and wanted < 2 * self._slots * _ROUNDS:
            wanted *= 2
            self._ends = self._run(wanted)

    def _are_alike(self) -> bool:
        last = len(self._ends) - 1
        now, before = self._mean(last), self._mean(last - self._slots)
        return abs(now - before) <= _ALIKE * now

    def _mean(self, last: int) -> float:
        """Mean seconds of the forwards up to number `last` that make a round."""
        return (self._ends[last] - self._ends[last - self._slots]) / self._slots

    def _run(self, forwards: int) -> list[float]:
        ends = []
        slots, other = self._slots, self._other
        # When each slot's last reader is done, in the order in which the slots are taken.
        free = [0.0] * slots
        copied = now = 0.0
        turn = 0
        for _ in range(forwards):
            for seconds, copy in self._work:
                if copy is not None:
                    # The copy before is over, and so is the last reader of the slot.
                    reader = free[turn]
                    copied = (copied if copied > reader else reader) + copy
                    now = (now if now > copied else copied) + seconds
                    free[turn] = now
                    turn = turn + 1 if turn + 1 < slots else 0
                else:
                    now += seconds
            now += other
            ends.append(now)
        return ends
