"""What a choice holds on the device and on the host, by the rules of `streaming` and `backends`.

For good there are: components that are neither streamed nor swapped, what of streamed components is outside of blocks,
resident blocks, and the slots. Swapped components come and go beside that; who leaves for whom `streaming.stages` says.
Activations are those of the component that runs. A VAE that isn't swapped makes nobody leave, unless memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ComponentCost, Problem
from diffusers_omni_offload.streaming.stages import largest_together, rivals_of
from diffusers_omni_offload.topology.residents import resident_indices
from diffusers_omni_offload.weights.leaves import allocated_nbytes


@cache
def kept_blocks(count: int, residents: int) -> frozenset[int]:
    """Indices of the resident blocks among `count`, as "spread" has it."""
    return frozenset(resident_indices(count, residents, "spread"))


@dataclass(frozen=True)
class StackSizes:
    """Bytes of a stack with some blocks resident.

    Attributes:
        kept_nbytes: device bytes of the resident blocks.
        largest_nbytes: packed bytes of the largest streamed block.
        streamed_nbytes: packed bytes of all streamed blocks.
        streamed: number of those.
    """

    kept_nbytes: int
    largest_nbytes: int
    streamed_nbytes: int
    streamed: int

    @classmethod
    def of(cls, component: ComponentCost, residents: int) -> StackSizes:
        """Those of a component with so many resident blocks."""
        kept = kept_blocks(len(component.blocks), residents)
        streamed = [block.nbytes for index, block in enumerate(component.blocks) if index not in kept]
        return cls(
            sum(component.blocks[index].resident_nbytes for index in kept),
            max(streamed, default=0),
            sum(streamed),
            len(streamed),
        )


class Memory:
    """The memory of all choices that have the same kinds.

    Args:
        problem: the pipeline and the machine.
        kinds: path of a component -> "resident", "module" or "layer".
    """

    def __init__(self, problem: Problem, kinds: Mapping[str, str]) -> None:
        self._problem = problem
        self._streamed = [component for component in problem.components if kinds[component.path] == "layer"]
        self._swapped = [component for component in problem.components if kinds[component.path] == "module"]
        resident = [component for component in problem.components if kinds[component.path] == "resident"]
        self._fixed = sum(map(whole_nbytes, resident)) + sum(component.state_nbytes for component in self._streamed)
        self._sizes: dict[tuple[str, int], StackSizes] = {}
        self._states_of: dict[str, list[int]] = {}

    def peak(self, residents: Mapping[str, int], slots: int) -> tuple[int, str]:
        """Device bytes at the most, and the path of the component that runs then.

        Args:
            residents: path of a streamed component -> number of its resident blocks; 0 for others.
            slots: number of slots.
        """
        permanent, in_slots = self._permanent(residents), self.slots_nbytes(residents, slots)
        most, where = permanent + in_slots, ""
        for component in self._running:
            held = self._most_held(component, permanent, in_slots) + component.activation_nbytes
            if held > most or not where:
                most, where = max(held, most), component.path
        return most, where

    def needed(self, residents: Mapping[str, int], slots: int) -> int:
        """Device bytes that have to be there: the peak, and what `backends.preflight` wants to be free at first, which
        counts slots and swapped components together even where they make way for each other."""
        at_first = self.between_calls(residents, slots) + self._all_together
        return max(self.peak(residents, slots)[0], at_first)

    def fits(self, residents: Mapping[str, int], slots: int) -> bool:
        """Whether device and host have room."""
        limit = self._problem.host_nbytes
        if limit is not None and self.host_nbytes(residents) > limit:
            return False
        return self.needed(residents, slots) <= self._problem.device_nbytes

    def floor(self) -> int:
        """Device bytes below which no choice of these kinds stays, without slots and resident blocks."""
        permanent = self._permanent({})
        held = (
            component.activation_nbytes + (0 if self._finds_others(component) else min(self._states(component)))
            for component in self._running
        )
        return permanent + max(held, default=0)

    def between_calls(self, residents: Mapping[str, int], slots: int) -> int:
        """Device bytes that stay between calls, at the most: slots may have been given back."""
        return self._permanent(residents) + self.slots_nbytes(residents, slots)

    def slots_nbytes(self, residents: Mapping[str, int], slots: int) -> int:
        """Device bytes of all slots."""
        largest = max((self.stack(component, residents).largest_nbytes for component in self._streamed), default=0)
        return slots * allocated_nbytes(largest)

    def host_nbytes(self, residents: Mapping[str, int]) -> int:
        """Host bytes of offloaded weights."""
        streamed = sum(self.stack(component, residents).streamed_nbytes for component in self._streamed)
        return streamed + sum(component.nbytes for component in self._swapped)

    def stack(self, component: ComponentCost, residents: Mapping[str, int]) -> StackSizes:
        """Sizes of a streamed component's stack."""
        key = component.path, residents.get(component.path, 0)
        if key not in self._sizes:
            self._sizes[key] = StackSizes.of(component, key[1])
        return self._sizes[key]

    def _permanent(self, residents: Mapping[str, int]) -> int:
        return self._fixed + sum(self.stack(component, residents).kept_nbytes for component in self._streamed)

    @cached_property
    def _running(self) -> list[ComponentCost]:
        return [component for component in self._problem.components if component.forwards]

    def _states(self, runs: ComponentCost) -> list[int]:
        """How many bytes of swapped components may be there while one runs, itself included."""
        if runs.path not in self._states_of:
            found = self._after_others(runs) if self._finds_others(runs) else [self._beside(runs)]
            self._states_of[runs.path] = found
        return self._states_of[runs.path]

    def _finds_others(self, runs: ComponentCost) -> bool:
        """Whether what was swapped in before stays while it runs, unless memory is short."""
        return runs.role == "vae" and runs not in self._swapped

    def _after_others(self, vae: ComponentCost) -> list[int]:
        after_encoders = self._together(lambda component: component.role == "encoder")
        after_dits = self._together(lambda component: component.role in ("dit", "resident"))
        has_dits = any(component.role == "dit" and component.forwards for component in self._problem.components)
        # One that runs once decodes; only one that encodes as well may come before the DiTs.
        return [after_dits] if has_dits and vae.forwards == 1 else [after_dits, after_encoders]

    def _beside(self, runs: ComponentCost) -> int:
        leaving = rivals_of(component.role for component in self._swapped).get(runs.role, ())
        itself = swapped_nbytes(runs) if runs in self._swapped else 0
        return itself + self._together(lambda component: component is not runs and component.role not in leaving)

    def _together(self, may_stay: Callable[[ComponentCost], bool]) -> int:
        return largest_together(
            (component.role, swapped_nbytes(component)) for component in self._swapped if may_stay(component)
        )

    @cached_property
    def _all_together(self) -> int:
        return self._together(lambda component: True)

    def _most_held(self, runs: ComponentCost, permanent: int, in_slots: int) -> int:
        return max(self._held(runs, permanent, in_slots, swapped) for swapped in self._states(runs))

    def _held(self, runs: ComponentCost, permanent: int, in_slots: int, swapped: int) -> int:
        """Device bytes beside activations."""
        held, total = permanent + in_slots + swapped, self._problem.total_nbytes
        if runs.role == "vae" and total is not None and total - held < total // 2:
            # Slots and swapped components leave, but for the VAE itself.
            return permanent + (swapped if runs in self._swapped else 0)
        return held


def fits(problem: Problem, choice: Choice) -> bool:
    """Whether device and host have room for a choice."""
    return Memory(problem, choice.kinds).fits(choice.residents, choice.slots)


def whole_nbytes(component: ComponentCost) -> int:
    """Device bytes of a component that is neither streamed nor swapped: each weight is an allocation."""
    apart = component.state_nbytes + sum(block.resident_nbytes for block in component.blocks)
    return max(component.nbytes, apart)


def swapped_nbytes(component: ComponentCost) -> int:
    """Device bytes of a component that is swapped: one buffer."""
    return allocated_nbytes(component.nbytes)
