"""All-gather where calls of ranks are not quite alike: errors of one alone, threads, casts in forwards, siblings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests import distributed_cases, tiny
from tests.ranks import RankPool, answers

GATHERED = {"dit": {"weight_transfer": "allgather"}}
Run = Callable[[], bool]
"""Calls the pipeline; whether the output is the plain one."""


def an_error_of_one_rank_outside_of_calls(rank: int, pipe: Any, run: Run) -> list[bool]:
    """It is nobody else's concern, and teaches nobody another order."""
    found = [run(), run()]
    if rank == 0:
        with pytest.raises((RuntimeError, TypeError)):
            pipe.text_encoder(torch.zeros(1, 4))
    return [*found, run(), run()]


def what_one_rank_alone_has_unlearned(rank: int, pipe: Any, run: Run) -> list[bool]:
    """What ranks expect is compared before anything is gathered."""
    found = [run(), run()]
    if rank == 0:
        pipe.omni_offload.backend.streamer.order.unlearn()
    return [*found, run(), run()]


def a_second_thread(rank: int, pipe: Any, run: Run) -> list[bool]:
    """It waits for the first one's call, whenever it comes."""
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(run())) for _ in range(2)]
    threads[0].start()
    time.sleep(0.02 if rank == 0 else 0.3)
    threads[1].start()
    for thread in threads:
        thread.join()
    return [len(found) == 2, *found, run()]


def a_cast_in_each_forward(rank: int, pipe: Any, run: Run) -> list[bool]:
    return [run() for _ in range(3)]


def a_sibling(rank: int, pipe: Any, run: Run) -> list[bool]:
    """`from_pipe` casts what it takes over to the dtype that it has."""
    found = [run()]
    sibling = type(pipe).from_pipe(pipe, torch_dtype=torch.float32)
    sibling.set_progress_bar_config(disable=True)
    sibling.enable_omni_offload("layer", layer_options=GATHERED, device=torch.device("sim", 0))
    expected, call = (
        distributed_cases.reference("wan", rank, torch.device("sim", 0)),
        distributed_cases.build("wan", rank)[1],
    )
    found.append(np.array_equal(tiny.run(sibling, call), expected))
    pipe.disable_omni_offload()
    found.append(np.array_equal(tiny.run(sibling, call), expected))
    sibling.disable_omni_offload()
    return [*found, run()]


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        an_error_of_one_rank_outside_of_calls,
        what_one_rank_alone_has_unlearned,
        a_second_thread,
        a_cast_in_each_forward,
        a_sibling,
    )
}


def cast_in_forwards(pipe: Any) -> None:
    """Each block casts a weight for good, as bitsandbytes does with biases."""
    for dit in (pipe.transformer, pipe.transformer_2):
        for block in dit.blocks:
            table, forward = block.scale_shift_table, block.forward

            def casting(*args: Any, table: Any = table, forward: Any = forward, **kwargs: Any) -> Any:
                if table.dtype != torch.float16:
                    table.data = table.data.to(torch.float16)
                return forward(*args, **kwargs)

            block.forward = casting


def work(rank: int, size: int, name: str) -> list[bool]:
    device = torch.device("sim", 0)
    pipe, call = distributed_cases.build("wan", rank)
    plain, _ = distributed_cases.build("wan", rank)
    for each in (pipe, plain):
        if name == a_cast_in_each_forward.__name__:
            cast_in_forwards(each)
    expected = tiny.run(plain.to(device), call)
    components = {"dit": "layer", "text_encoder": "module"}
    pipe.enable_omni_offload("layer", components=components, layer_options=GATHERED, device=device)
    if name == a_sibling.__name__:
        pipe.enable_omni_offload("layer", layer_options=GATHERED, device=device)
    found = SCENARIOS[name](rank, pipe, lambda: np.array_equal(tiny.run(pipe, call), expected))
    if pipe.omni_offload is not None:
        pipe.disable_omni_offload()
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, "sim") as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_is_equal_to_the_plain_one(name: str, pool: RankPool) -> None:
    for found in answers(pool.run(work, name)):
        assert found and all(found), found
