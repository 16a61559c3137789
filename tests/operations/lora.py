"""Operations on LoRA layers, through diffusers' own methods. The adapters are called "style" and "detail"."""

from __future__ import annotations

import torch

from tests.operations.operation import also_in_bfloat16, operation
from tests.operations.subject import Subject


@operation("`load_lora_weights`")
def load(subject: Subject) -> None:
    subject.load("plain")


@operation("`load_lora_weights(low_cpu_mem_usage=True)`")
def load_low_memory(subject: Subject) -> None:
    subject.load("plain", low_cpu_mem_usage=True)


@operation("`load_lora_weights(low_cpu_mem_usage=False)`")
def load_high_memory(subject: Subject) -> None:
    subject.load("plain", low_cpu_mem_usage=False)


@operation("a second adapter, of another rank", load)
def load_second(subject: Subject) -> None:
    subject.load("larger", "detail")
    subject.pipe.set_adapters(["style", "detail"])


@operation("a LoRA of the first block alone")
def load_first_block(subject: Subject) -> None:
    subject.load("first_block")


@operation("a LoRA of layers outside of the blocks, too")
def load_outside(subject: Subject) -> None:
    subject.load("outside")


@operation("a LoRA in bfloat16 on float32")
def load_half(subject: Subject) -> None:
    subject.load("half")


@operation("a LoRA of text encoders, too", families=("SD3",))
def load_text(subject: Subject) -> None:
    subject.load("text")


@operation("`set_adapters` with weights", load_second)
def set_adapters(subject: Subject) -> None:
    subject.pipe.set_adapters(["style", "detail"], [0.5, 0.25])


@operation("`set_adapters` with another weight", set_adapters)
def change_scale(subject: Subject) -> None:
    subject.pipe.set_adapters(["style", "detail"], [0.9, 0.25])


@operation("`set_adapters` of one of two", load_second)
def choose_one(subject: Subject) -> None:
    subject.pipe.set_adapters("detail")


@operation("a scale in the call's attention arguments", load)
def scale_in_call(subject: Subject) -> None:
    subject.arguments[subject.family.scale_argument] = {"scale": 0.3}


@operation("`disable_lora`", load)
def disable(subject: Subject) -> None:
    subject.pipe.disable_lora()


@operation("`enable_lora`", disable)
def enable(subject: Subject) -> None:
    subject.pipe.enable_lora()


@operation("`fuse_lora(lora_scale=0.7)`", load)
def fuse(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7)


@operation("`fuse_lora(safe_fusing=True)`", load)
def fuse_safely(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7, safe_fusing=True)


@operation("`fuse_lora` of one of two adapters", load_second)
def fuse_one(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7, adapter_names=["detail"])


@operation("`unfuse_lora`", fuse)
def unfuse(subject: Subject) -> None:
    subject.unfuse()


@operation("`fuse_lora`, then `unload_lora_weights`", load)
def fuse_and_unload(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7)
    subject.pipe.unload_lora_weights()


@operation("`fuse_lora`, then `disable_lora`", load)
def fuse_and_disable(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7)
    subject.pipe.disable_lora()


@operation("`set_adapters` while fused", fuse, shows=None)
def set_adapters_while_fused(subject: Subject) -> None:
    subject.pipe.set_adapters("style", 0.4)


@operation("`delete_adapters` while fused", load_second, fuse, shows=False)
def delete_while_fused(subject: Subject) -> None:
    subject.pipe.delete_adapters("style")


@operation("`fuse_lora`, text encoders too", load_text, families=("SD3",))
def fuse_text(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7)


@operation("`fuse_lora` and `unfuse_lora`, text encoders too", load_text, families=("SD3",))
def fuse_and_unfuse_text(subject: Subject) -> None:
    subject.fuse(lora_scale=0.7)
    subject.run()
    subject.unfuse()
    subject.pipe.set_adapters("style", 0.6)


@operation("`fuse_lora` of the DiT itself", load)
def fuse_component(subject: Subject) -> None:
    for dit in subject.dits:
        dit.fuse_lora(lora_scale=0.7)


@operation("`unfuse_lora` of the DiT itself", fuse_component)
def unfuse_component(subject: Subject) -> None:
    for dit in subject.dits:
        dit.unfuse_lora()


@operation("`delete_adapters`", load_second)
def delete(subject: Subject) -> None:
    subject.pipe.delete_adapters("style")


@operation("`unload_lora_weights`", load_second)
def unload(subject: Subject) -> None:
    subject.pipe.unload_lora_weights()


@operation("hotswap, same rank", load)
def hotswap(subject: Subject) -> None:
    subject.load("same", hotswap=True)


@operation("hotswap, smaller rank", load)
def hotswap_smaller(subject: Subject) -> None:
    subject.load("smaller", hotswap=True)


@operation("hotswap, larger rank", load)
def hotswap_larger(subject: Subject) -> None:
    subject.load("larger", hotswap=True)


def load_with_room(subject: Subject) -> None:
    """Load with layers padded to the rank of a later one."""
    subject.pipe.enable_lora_hotswap(target_rank=8)
    subject.load("plain")


@operation("hotswap after `enable_lora_hotswap`", load_with_room)
def hotswap_into_room(subject: Subject) -> None:
    subject.load("larger", hotswap=True)


@operation("hotswap with layers of text encoders", load_text, shows=None, families=("SD3",))
def hotswap_text(subject: Subject) -> None:
    subject.load("text", hotswap=True)


@operation("`set_lora_device` to the host and back", load, shows=False)
def set_device(subject: Subject) -> None:
    subject.pipe.set_lora_device(["style"], torch.device("cpu"))
    subject.pipe.set_lora_device(["style"], subject.pipe._execution_device)


@operation("a name that is taken already", load, shows=False)
def load_again(subject: Subject) -> None:
    subject.load("same")


@operation("`set_adapters` of one that isn't there", load, shows=False)
def set_unknown(subject: Subject) -> None:
    subject.pipe.set_adapters("detail")


also_in_bfloat16(
    "`load_lora_weights`",
    "`fuse_lora(lora_scale=0.7)`",
    "`fuse_lora(safe_fusing=True)`",
    "`unfuse_lora`",
    "`fuse_lora`, text encoders too",
    "`fuse_lora` and `unfuse_lora`, text encoders too",
    "`fuse_lora`, then `unload_lora_weights`",
    "`fuse_lora`, then `disable_lora`",
    "`set_adapters` while fused",
    "`delete_adapters` while fused",
    "`fuse_lora` of the DiT itself",
    "`unfuse_lora` of the DiT itself",
)
