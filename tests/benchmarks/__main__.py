"""`make bench`: modelled times of steps, calls and ranks, and real times of this machine's CPU.

python -m tests.benchmarks [modelled] [calls] [ranks] [real] [staging]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import diffusers.utils.logging
import torch
import transformers.utils.logging

from diffusers_omni_offload.messages import format_bytes
from tests import simdevice
from tests.benchmarks import calls, ranks, real, staging, steps
from tests.benchmarks.tables import format_table

RESULTS = Path(__file__).parent / "results"


def modelled() -> Iterator[str]:
    """The tables of step / ideal.

    "2:1" has 13 blocks and then 27 of half their bytes and operations. In "Flux-like" the first ones have twice the
    bytes, but not the operations, of the others: the first stack waits for the link and the second leaves it idle,
    and two or three slots can't make up for that.
    """
    header = [f"{ratio:g}" for ratio in steps.RATIOS]
    for family, slot_counts in (("Wan-like", (2,)), ("SD3-like", (2,)), ("2:1", (2, 3)), ("Flux-like", (2, 3))):
        bench = steps.Bench(family)
        sizes = " and ".join(f"{nbytes / 1024:.0f} KiB" for nbytes in sorted(set(bench.block_bytes)))
        for slots in slot_counts:
            title = f"modelled step / ideal, by transfer / compute: {family}, 40 blocks of {sizes}, {slots} slots"
            yield format_table(title, ["residents", *header], steps.family_table(bench, slots))
        for flops_per_s in (steps.LONG_BLOCKS, steps.SHORT_BLOCKS):
            bench = steps.Bench(family, flops_per_s=flops_per_s)
            block = f"{1e3 * bench.compute / bench.num_blocks:.1f} ms of compute a block"
            title = f"modelled step / ideal, by transfer / compute, side by side: {family}, {block}, no residents"
            yield format_table(title, ["offload", *header], steps.peer_table(bench))
    yield "(*) holds the whole model on the device during a call, and moves it there and back once a call.\n"


def whole_calls() -> Iterator[str]:
    """The tables of what a call copies, holds and takes."""
    header = ["offload", "to device", "to host", "copies", "swaps", "peak", *(f"call, {r:g}" for r in calls.RATIOS)]
    for name, build in calls.PIPELINES.items():
        bench = calls.CallBench(build)
        title = f"modelled: a call of a tiny {name}; weights of {format_bytes(bench.weight_bytes)}"
        yield format_table(title, header, calls.call_table(bench))
    yield (
        "call, 0.1: modelled time of the call by a resident one's, if a copy of all weights takes 0.1 of the latter.\n"
        "Model offload is accelerate's, by pipe.enable_model_cpu_offload(). It copies pageable memory, at a quarter\n"
        "of the link; (*) as if that ran at the link's full rate. A swapped component is packed, each tensor aligned\n"
        "to 256 bytes, which shows with tensors as small as these. A resident call copies its prompt and output.\n"
    )


def measured() -> Iterator[str]:
    """What this machine's CPU takes."""
    python = real.python_per_block(torch.device("sim", 0))
    packing = real.packing()
    parts = real.packing_profile()
    audit, audit_with_lora = real.audit(), real.audit(lora=True)
    lora, leaves = real.python_per_block_with_lora(torch.device("sim", 0))
    rows = [
        ["Python per block call, ours", f"{python.ours * 1e6:.1f} us"],
        ["Python per block call, group offload with streams", f"{python.other * 1e6:.1f} us"],
        ["ours / group offload", f"{python.ratio:.3f}"],
        ["packing 1 GiB", f"{packing.ours:.3f} s"],
        ["memcpy of it into freshly mapped memory", f"{packing.other:.3f} s"],
        ["packing throughput / memcpy", f"{1 / packing.ratio:.2f}"],
        *([f"  of 256 MiB: {name}", f"{milliseconds:.2f} ms"] for name, milliseconds in parts.items()),
        [f"audit of {audit.leaves:,} leaves in {audit.modules} modules", f"{audit.seconds * 1e3:.2f} ms"],
        ["audit of 1,000 leaves", f"{audit.ms_per_1000_leaves:.2f} ms"],
        ["audit of 1,000 leaves, a LoRA on every linear layer", f"{audit_with_lora.ms_per_1000_leaves:.2f} ms"],
        [f"Python per block call, LoRA ({leaves} leaves) / none ({real.LEAVES})", f"{lora.ratio:.2f}"],
    ]
    yield format_table(f"real, CPU host only: 26 leaves a block, torch {torch.__version__}", ["what", "time"], rows)


def staged() -> Iterator[str]:
    """What reading a checkpoint takes this machine's CPU."""
    yield staging.table()


def main(wanted: list[str]) -> None:
    """Print the tables and keep them in `results/`.

    Raises:
        SystemExit: a word in `wanted` names no table.
    """
    tables = {
        "modelled": modelled,
        "calls": whole_calls,
        "ranks": ranks.tables,
        "real": measured,
        "staging": staged,
    }
    if not set(wanted) <= set(tables):
        raise SystemExit(f"Tables are {', '.join(tables)}; got {' '.join(wanted)}.")
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("diffusers_omni_offload").setLevel(logging.WARNING)
    simdevice.install()
    RESULTS.mkdir(exist_ok=True)
    for name, make in tables.items():
        if wanted and name not in wanted:
            continue
        simdevice.restore_defaults()
        texts = []
        for text in make():
            print(text, flush=True)
            texts.append(text)
        (RESULTS / f"{name}.txt").write_text("\n".join(texts))


if __name__ == "__main__":
    main(sys.argv[1:])
