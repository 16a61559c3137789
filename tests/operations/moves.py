"""The moves of a random walk: operations with random choices, each made once and then done to several pipelines."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tests.operations.subject import Change, Subject

ADAPTERS = ("style", "detail", "light")
_SWAPPABLE = ("plain", "same", "smaller", "larger")

Move = Callable[[random.Random, Subject], Change | None]
"""Chooses what is done to a pipeline in this state; None if this can't be done to it now."""


def loaded(subject: Subject) -> list[str]:
    """The adapters that all DiTs have."""
    found = subject.pipe.get_list_adapters()
    return [name for name in ADAPTERS if name in found.get("transformer", ())]


def some(rng: random.Random, names: list[str]) -> list[str]:
    """One or more of these."""
    return rng.sample(names, rng.randint(1, len(names)))


def load(rng: random.Random, subject: Subject) -> Change | None:
    free = [name for name in ADAPTERS if name not in loaded(subject)]
    files = [*_SWAPPABLE, "half", "outside", "first_block", *(["text"] if subject.family.text_encoders else [])]
    if not free:
        return None
    low_cpu_mem_usage = rng.choice([True, False])
    return partial(Subject.load, file=rng.choice(files), adapter=rng.choice(free), low_cpu_mem_usage=low_cpu_mem_usage)


def hotswap(rng: random.Random, subject: Subject) -> Change | None:
    if not loaded(subject):
        return None
    return partial(Subject.load, file=rng.choice(_SWAPPABLE), adapter=rng.choice(loaded(subject)), hotswap=True)


def set_adapters(rng: random.Random, subject: Subject) -> Change | None:
    if not loaded(subject):
        return None
    names = some(rng, loaded(subject))
    weights = [rng.choice([0.25, 0.5, 0.75, 1.0]) for _ in names]
    return lambda subject: subject.pipe.set_adapters(names, weights)


def disable(rng: random.Random, subject: Subject) -> Change | None:
    return (lambda subject: subject.pipe.disable_lora()) if loaded(subject) else None


def enable(rng: random.Random, subject: Subject) -> Change | None:
    return (lambda subject: subject.pipe.enable_lora()) if loaded(subject) else None


def fuse(rng: random.Random, subject: Subject) -> Change | None:
    if not loaded(subject):
        return None
    return partial(Subject.fuse, lora_scale=rng.choice([0.5, 0.7, 1.0]), safe_fusing=rng.choice([True, False]))


def fuse_some(rng: random.Random, subject: Subject) -> Change | None:
    return partial(Subject.fuse, adapter_names=some(rng, loaded(subject))) if loaded(subject) else None


def fuse_dit(rng: random.Random, subject: Subject) -> Change | None:
    number = rng.randrange(len(subject.dits))
    return (lambda subject: subject.dits[number].fuse_lora()) if loaded(subject) else None


def unfuse(rng: random.Random, subject: Subject) -> Change | None:
    return Subject.unfuse if loaded(subject) else None


def delete(rng: random.Random, subject: Subject) -> Change | None:
    if not loaded(subject):
        return None
    name = rng.choice(loaded(subject))
    return lambda subject: subject.pipe.delete_adapters(name)


def unload(rng: random.Random, subject: Subject) -> Change | None:
    return lambda subject: subject.pipe.unload_lora_weights()


def set_device(rng: random.Random, subject: Subject) -> Change | None:
    if not loaded(subject):
        return None
    names = some(rng, loaded(subject))

    def there_and_back(subject: Subject) -> None:
        subject.pipe.set_lora_device(names, torch.device("cpu"))
        subject.pipe.set_lora_device(names, subject.pipe._execution_device)

    return there_and_back


def scale_calls(rng: random.Random, subject: Subject) -> Change | None:
    scale = rng.choice([None, 0.3, 0.8])

    def change(subject: Subject) -> None:
        subject.arguments[subject.family.scale_argument] = None if scale is None else {"scale": scale}

    return change


def edit(rng: random.Random, subject: Subject) -> Change | None:
    dit, block = rng.randrange(len(subject.dits)), rng.randrange(2)
    factor = rng.choice([0.8, 1.25])
    way = rng.choice(["in place", "data", "parameter"])

    def change(subject: Subject) -> None:
        linear = subject.linear(dit, block)
        if way == "in place":
            linear.weight.data.mul_(factor)
        elif way == "data":
            linear.weight.data = linear.weight.data * factor
        else:
            linear.weight = nn.Parameter(linear.weight.detach() * factor, requires_grad=False)

    return change


MOVES: dict[Move, int] = {
    load: 8,
    hotswap: 3,
    set_adapters: 5,
    disable: 1,
    enable: 2,
    fuse: 3,
    fuse_some: 1,
    fuse_dit: 1,
    unfuse: 4,
    delete: 3,
    unload: 1,
    set_device: 2,
    scale_calls: 2,
    edit: 4,
}
"""Each with how often it is chosen."""
