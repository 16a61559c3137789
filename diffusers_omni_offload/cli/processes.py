"""The processes that torchrun has started: which of them work on one request, and which requests are this one's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from diffusers_omni_offload.cli.errors import BadInput, input_is_to_blame
from diffusers_omni_offload.parallel import WeightGroup
from diffusers_omni_offload.waves import spread_prompts

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
        world: how many there are.
        rank: this one.
        together: how many work on one request, sharing its tokens.
    """

    world: int = 1
    rank: int = 0
    together: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process writes the outputs of its requests: the first one of those that work on them."""
        return self.rank % self.together == 0

    @property
    def is_first(self) -> bool:
        """Whether this process reports."""
        return self.rank == 0

    def share_of(self, prompts: Sequence[str]) -> Iterator[tuple[int | None, str]]:
        """This process's prompts, as `spread_prompts` gives them."""
        data = self.world // self.together
        # Only the sizes count: which ranks share weights is found when offload is enabled.
        group = WeightGroup("data" if data > 1 else "none", tuple(range(data)), self.rank // self.together)
        return spread_prompts(prompts, group)

    def share_tokens(self, pipe: Any, device_type: str) -> None:
        """Let the ranks of a request share its tokens (Ulysses).

        Raises:
            BadInput: no model of the pipeline can, or there are no accelerators.
        """
        if self.together == 1:
            return
        if device_type == "cpu":
            raise BadInput(f"--usp {self.together} shares tokens between accelerators; on the CPU leave it out.")
        dits = [model for model in pipe.components.values() if getattr(model, "_cp_plan", None)]
        if not dits:
            raise BadInput(f"No model of this {type(pipe).__name__} can share its tokens; leave --usp out.")
        shape = (self.world // self.together, 1, self.together)
        mesh = dist.device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=("data", "ring", "ulysses"))
        with input_is_to_blame(f"--usp {self.together}"):
            for dit in dits:
                dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=self.together, mesh=mesh))


@contextmanager
def started(data_parallel_size: int | None, usp: int) -> Iterator[Processes]:
    """In the body the process group is there, if there are several processes, and each has its device.

    Args:
        data_parallel_size: groups of ranks with requests of their own; None is what `usp` leaves of the processes.
        usp: ranks that share the tokens of a request.

    Raises:
        BadInput: there are more or fewer processes than these need.
    """
    is_ours = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1
    world = int(os.environ["WORLD_SIZE"]) if is_ours else dist.get_world_size() if dist.is_initialized() else 1
    needed = usp * (data_parallel_size or max(1, world // usp))
    if needed != world:
        asked = " and ".join(
            words
            for words, is_given in (
                (f"--data-parallel-size {data_parallel_size}", data_parallel_size is not None),
                (f"--usp {usp}", usp != 1),
            )
            if is_given
        )
        raise BadInput(
            f"{asked or 'The default'} needs {needed} processes, but there {'is' if world == 1 else 'are'} {world}; "
            f"start them with torchrun --nproc-per-node {needed} -m diffusers_omni_offload.cli run ..."
        )
    if is_ours:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(timeout=_TIMEOUT)
    try:
        yield Processes(world, dist.get_rank() if world > 1 else 0, usp)
    finally:
        if is_ours:
            dist.destroy_process_group()
