"""`gather()`: what all ranks do to weights that are divided, compared with the same done to a plain pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests import distributed_cases, tiny
from tests.ranks import RankPool, answers

RANKS = 2
Gathered = Callable[[], AbstractContextManager[None]]


def load_and_fuse(pipe: Any, gathered: Gathered) -> None:
    """A LoRA is loaded in one body and fused in the next: methods that find LoRA layers work there."""
    with gathered():
        _add_lora(pipe, "first", rank=4)
        _add_lora(pipe, "second", rank=2)
        pipe.set_adapters(["first", "second"], [0.5, 0.25])
    with gathered():
        pipe.fuse_lora(components=["transformer"])


def grow(pipe: Any, gathered: Gathered) -> None:
    """Blocks grow beyond the slots, and are gathered again before any call."""
    with gathered():
        _add_lora(pipe, "large", rank=64)
    with gathered():
        pipe.transformer.blocks[0].attn1.to_q.base_layer.weight.data.mul_(1.5)


def nest(pipe: Any, gathered: Gathered) -> None:
    """The inner one divides nothing: the outer body reads and changes weights after it."""
    with gathered():
        with gathered():
            pipe.transformer.blocks[0].attn1.to_q.weight.data.mul_(2)
        assert torch.isfinite(sum(weight.sum() for weight in pipe.transformer.parameters()))
        pipe.transformer.blocks[1].attn1.to_k.weight.data.mul_(2)


CHANGES = {change.__name__: change for change in (load_and_fuse, grow, nest)}


def _add_lora(pipe: Any, name: str, rank: int) -> None:
    from peft import LoraConfig

    torch.manual_seed(len(name))
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])
    pipe.transformer.add_adapter(config, name)


def changed(rank: int, size: int, name: str) -> dict[str, bool]:
    """One rank's work: whether its outputs are those of a plain pipeline with the same changes."""
    device = torch.device("sim", 0)
    plain, call = distributed_cases.build("wan", rank)
    plain.to(device)
    CHANGES[name](plain, nullcontext)
    expected = tiny.run(plain, call)
    pipe, call = distributed_cases.build("wan", rank)
    untouched = tiny.run(pipe.to(device), call)
    pipe.to("cpu")
    handle = pipe.enable_omni_offload("layer", layer_options={"dit": {"weight_transfer": "allgather"}}, device=device)
    CHANGES[name](pipe, handle.gather)
    found = {"the change counts": not np.array_equal(expected, untouched)}
    found |= {f"call {n}": np.array_equal(tiny.run(pipe, call), expected) for n in range(2)}
    pipe.disable_omni_offload()
    return found | {"disabled": np.array_equal(tiny.run(pipe.to(device), call), expected)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS, "sim") as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", CHANGES)
def test_equal_to_a_plain_pipeline_with_the_same_changes(name: str, pool: RankPool) -> None:
    for found in answers(pool.run(changed, name)):
        assert all(found.values()), found
