"""`python -m diffusers_omni_offload.demo`: a tiny Wan pipeline, resident and in layer mode, side by side."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Where torchao is installed, much is said about it when it is imported. Run as a file, this comes before that.
for library in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(library).setLevel(logging.ERROR)

import diffusers_omni_offload  # noqa: E402, F401 - gives pipelines `enable_omni_offload`
from diffusers_omni_offload.demo import pick_device, tiny_wan  # noqa: E402
from diffusers_omni_offload.messages import format_bytes  # noqa: E402


def printer() -> Callable[[str], None]:
    """rich's console where it is installed, else `print`."""
    try:
        from rich.console import Console
    except ImportError:
        return print
    # Markup and wrapping would eat brackets and break the plan's columns.
    return Console(highlight=True, soft_wrap=True, markup=False).print


def counters(handle: Any) -> str:
    """One line: what has moved so far, and what is held for it."""
    return (
        f"{handle.loads} block loads ({handle.demand_loads} on demand), {format_bytes(handle.bytes_moved)} moved; "
        f"slots take {format_bytes(handle.device_bytes)} on the device; "
        f"{format_bytes(handle.pinned_bytes)} of host memory pinned"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if both outputs are equal, else 1."""
    parser = argparse.ArgumentParser(prog="python -m diffusers_omni_offload.demo", description=__doc__)
    parser.add_argument("--device", help="where to run, such as cuda:1 (default: the accelerator, or the CPU)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each of the two DiTs (default: %(default)s)")
    options = parser.parse_args(arguments)
    say = printer()
    device = pick_device(options.device)

    say(f"A tiny Wan pipeline with two DiTs of {options.blocks} blocks, random weights, on {device}")
    pipe, call = tiny_wan.build_pipeline(num_layers=options.blocks)
    resident = tiny_wan.to_video(pipe.to(device)(**call()))
    say("1. all weights on the device: done")

    pipe, call = tiny_wan.build_pipeline(num_layers=options.blocks)
    handle = pipe.enable_omni_offload("layer", device=device)
    say(f'2. pipe.enable_omni_offload("layer", device="{device}")')
    say(str(handle.plan))
    equal = True
    for number in ("first", "second"):
        streamed = tiny_wan.to_video(pipe(**call()))
        equal = equal and np.array_equal(resident, streamed)
        say(f"in total after the {number} call: {counters(handle)}")
    handle.disable()
    say(f"output equal: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
