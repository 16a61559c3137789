"""Operations on weights and modules themselves, between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.operations.operation import operation
from tests.operations.subject import Subject


class Louder:
    """An attention processor: what another one gives, louder."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._inner(attention, hidden_states, *args, **kwargs)
        return tuple(part * 1.5 for part in output) if isinstance(output, tuple) else output * 1.5


@operation("`fuse_qkv_projections`", shows=None)
def fuse_projections(subject: Subject) -> None:
    for dit in subject.dits:
        dit.fuse_qkv_projections()


@operation("`unfuse_qkv_projections`", fuse_projections, shows=None)
def unfuse_projections(subject: Subject) -> None:
    for dit in subject.dits:
        dit.unfuse_qkv_projections()


@operation("`set_attn_processor`")
def set_processor(subject: Subject) -> None:
    for dit in subject.dits:
        dit.set_attn_processor({name: Louder(inner) for name, inner in dit.attn_processors.items()})


@operation("a weight edited in place")
def edit(subject: Subject) -> None:
    with torch.no_grad():
        subject.linear().weight.mul_(1.5)


@operation("a weight's `.data` edited in place")
def edit_data(subject: Subject) -> None:
    subject.linear().weight.data.mul_(1.5)


@operation("`weight.data =` another tensor")
def assign_data(subject: Subject) -> None:
    linear = subject.linear()
    linear.weight.data = linear.weight.data * 1.5


@operation("a replaced `Parameter`")
def replace_parameter(subject: Subject) -> None:
    linear = subject.linear()
    linear.weight = nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)


@operation("a replaced linear layer")
def replace_layer(subject: Subject) -> None:
    twin, _ = subject.family.build()
    mine, other = subject.blocks[0][1], subject.family.blocks(twin)[0][0]
    path = next(path for path, module in mine.named_modules() if isinstance(module, nn.Linear))
    mine.set_submodule(path, subject.home(other.get_submodule(path)))


@operation("a block more in a stack")
def add_block(subject: Subject) -> None:
    twin, _ = subject.family.build()
    subject.blocks[0].insert(0, subject.home(subject.family.blocks(twin)[0][0]))


@operation("a block less in a stack")
def remove_block(subject: Subject) -> None:
    del subject.blocks[0][1]


@operation("`pipe.vae =` another one")
def replace_vae(subject: Subject) -> None:
    twin, _ = subject.family.build()
    with torch.no_grad():
        for parameter in twin.vae.parameters():
            parameter.mul_(1.1)
    subject.pipe.vae = subject.home(twin.vae)
