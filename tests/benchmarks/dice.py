"""Random pipelines, machines and budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.benchmarks.problems import Case, Machine, Part, Work, round_up


@dataclass
class Dice:
    """Draws random cases.

    Args:
        seed: the same cases for the same seed.
    """

    seed: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def uniform(self, low: float, high: float) -> float:
        """A number between these."""
        return self._random.uniform(low, high)

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def chance(self, share: float) -> bool:
        """True in this share of the draws."""
        return self._random.random() < share

    def work(self, nbytes: float, seconds: float) -> Work:
        """Weights of about so many bytes in a few leaves of any size."""
        count = self.integer(2, 6)
        shares = [self.uniform(0.2, 1) for _ in range(count)]
        leaves = tuple(max(64, round_up(int(nbytes * share / sum(shares)), 4)) for share in shares)
        return Work(leaves, seconds)

    def stack(self, spread: float = 3.0) -> Part:
        """8 to 14 blocks whose sizes differ by up to `spread` times, and so do their times."""
        nbytes, seconds = self.uniform(100e3, 250e3), self.uniform(1e-3, 6e-3)
        blocks = tuple(
            self.work(nbytes * self.uniform(1, spread), seconds * self.uniform(1, spread))
            for _ in range(self.integer(8, 14))
        )
        return Part(blocks, self.work(100e3, seconds), self.integer(200_000, 800_000))

    def whole(self) -> Part:
        """A component without blocks."""
        return Part((), self.work(self.uniform(200e3, 600e3), 5e-3), self.integer(100_000, 900_000))

    def machine(self, part: Part, **options: float) -> Machine:
        """A link that takes a quarter to four times as long for all blocks as their compute does."""
        compute = sum(work.seconds for work in part.blocks)
        nbytes = sum(work.packed_nbytes for work in part.blocks)
        return Machine(nbytes / (compute * self.uniform(0.25, 2) * self.uniform(1, 2)), **options)

    def case(self, *, is_single: bool = False, **options: float) -> Case:
        """A pipeline on a machine, without a limit.

        Args:
            is_single: a DiT, and nothing else.
            options: of the machine.
        """
        dit = self.stack()
        parts = {"transformer": dit}
        if not is_single:
            if self.chance(0.4):
                # As Wan's two experts: the same sizes.
                parts["transformer_2"] = dit
            if self.chance(0.7):
                parts["text_encoder"] = self.stack()
            if self.chance(0.7):
                parts["vae"] = self.whole()
        return Case(parts, self.machine(dit, **options), seed=self.seed)


def with_budget(case: Case, nbytes: int) -> Case:
    """`case` with another budget."""
    return replace(case, budget_nbytes=nbytes)
