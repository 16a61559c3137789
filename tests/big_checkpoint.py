"""A checkpoint of 1 GB, and what processes that run a pipeline from it take of the host's memory."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.modeling_utils import no_init_weights

from diffusers_omni_offload import enable_omni_offload, load_omni_pipeline
from diffusers_omni_offload.demo import tiny_wan
from diffusers_omni_offload.streaming.page_cache import FromPageCache
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.topology.sizes import module_nbytes
from tests import simdevice

BLOCKS = 64

Way = Literal["mapped", "page cache", "ordinary"]
"""How a process gets the weights: by `load_omni_pipeline`, and staged or copied straight; or by stock loading."""


def save(folder: Path) -> int:
    """Save a Wan pipeline whose DiT has 1 GB of bfloat16 weights, in shards; the size of its files."""
    with no_init_weights():
        dit = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=128,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=256,
            ffn_dim=5632,
            num_layers=BLOCKS,
            rope_max_seq_len=32,
        ).eval()
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    kept = WanTransformer3DModel._keep_in_fp32_modules
    for number, (path, parameter) in enumerate(dit.named_parameters()):
        flat = noise.roll(97 * number).repeat(-(-parameter.numel() // noise.numel()))[: parameter.numel()]
        dtype = torch.float32 if any(name in path.split(".") for name in kept) else torch.bfloat16
        parameter.data = flat.reshape(parameter.shape).to(dtype)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(
        tokenizer=tiny_wan.t5_tokenizer(),
        text_encoder=tiny_wan.umt5_encoder(),
        vae=tiny_wan.wan_vae(),
        scheduler=scheduler,
        transformer=dit,
    )
    pipe.save_pretrained(folder, max_shard_size="256MB")
    return sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))


def load(folder: Path, way: Way) -> Any:
    """The pipeline, loaded."""
    how: dict[str, Any] = {"torch_dtype": torch.bfloat16, "local_files_only": True}
    if way == "ordinary":
        return WanPipeline.from_pretrained(folder, **how)
    return load_omni_pipeline(WanPipeline, folder, **how)


def enable(pipe: Any, way: Way) -> None:
    """Enable offload."""
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"weight_transfer": "rank-local"}
    if way == "page cache":
        options["host_registration_limit_gib"] = 4
    enable_omni_offload(pipe, "layer", layer_options={"dit": options})


def call(pipe: Any) -> str:
    """One call of a step and a few tokens; its output's digest."""
    frames = pipe(
        "dance monkey",
        height=16,
        width=16,
        num_frames=1,
        num_inference_steps=1,
        guidance_scale=1.0,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="pt",
    ).frames
    assert bool(torch.isfinite(frames).all())
    return hashlib.sha256(frames.cpu().float().numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Increase:
    """Anonymous memory of one process over what it had after its imports, less the simulated device's, in bytes.

    Attributes:
        peaks: the most in each phase.
        apart: weights that aren't in streamed blocks.
        staging: both staging buffers.
        own: bytes of streamed blocks that are in host memory for good.
        digests: of the outputs.
    """

    peaks: dict[str, int]
    apart: int
    staging: int
    own: int
    digests: list[str]


def measure_one(rank: int, size: int, folder: Path, way: Way) -> Increase:
    """Load, enable, and call twice."""
    gc.collect()
    status = os.open("/proc/self/status", os.O_RDONLY)
    before, peaks = _anonymous(status) - torch.accelerator.memory_allocated(), {}
    with _peak(peaks, "load", before, status):
        pipe = load(folder, way)
    with _peak(peaks, "enable", before, status):
        enable(pipe, way)
    digests = []
    for number in (1, 2):
        with _peak(peaks, f"call {number}", before, status):
            digests.append(call(pipe))
    os.close(status)
    backend = pipe.omni_offload.backend
    masters = [master for master in backend.streamer.masters if master is not None]
    blocks = sum(master.nbytes for master in masters)
    weights = sum(module_nbytes(pipe.components[name]) for name in ("transformer", "text_encoder", "vae"))
    staging = [transport for transport in backend.streamer.transports if isinstance(transport, Staging)]
    staged = sum(b.host.nbytes for transport in staging for b in transport._buffers if b.host is not None)
    return Increase(peaks, weights - blocks, staged, sum(master.host_nbytes for master in masters), digests)


def _anonymous(status: int) -> int:
    """Bytes of anonymous memory, that of page-locked buffers included (which Linux counts as shared), from an open
    /proc/self/status."""
    text = os.pread(status, 8192, 0)
    return 1024 * sum(
        int(text[text.index(name) + len(name) :].split(None, 1)[0]) for name in (b"RssAnon:", b"RssShmem:")
    )


@contextmanager
def _peak(peaks: dict[str, int], phase: str, before: int, status: int) -> Iterator[None]:
    """Note the most that was seen in the body, by a thread that looks every five milliseconds. The device's memory is
    what it has when the body begins: what it takes meanwhile counts, since asking in that thread could block this one.
    """
    device, seen, is_over = torch.accelerator.memory_allocated(), [_anonymous(status)], threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            seen.append(_anonymous(status))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    peaks[phase] = max(*seen, _anonymous(status)) - device - before


# ---------------------------------------------------------------------- several processes


@dataclass(frozen=True)
class Share:
    """What one of several processes has more than after its imports, in bytes.

    Attributes:
        proportional: its share of memory (PSS): what several have mapped counts for each in part.
        device: what of that is the simulated device's memory.
        straight: blocks that were copied straight from the page cache.
        digest: of the output.
    """

    proportional: int
    device: int
    straight: int
    digest: str


def measure_together(rank: int, size: int, folder: Path, way: Way) -> Share:
    """Load, enable and call twice in each, and measure while all hold what they have."""
    gc.collect()
    _meet()
    before = _proportional(), torch.accelerator.memory_allocated()
    _meet()
    pipe = load(folder, way)
    enable(pipe, way)
    first, second = call(pipe), call(pipe)
    assert first == second
    gc.collect()
    _meet()
    after = _proportional(), torch.accelerator.memory_allocated()
    _meet()
    transports = pipe.omni_offload.backend.streamer.transports
    straight = sum(transport.loads for transport in transports if isinstance(transport, FromPageCache))
    simdevice.check()
    return Share(after[0] - before[0], after[1] - before[1], straight, first)


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))


def _proportional() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel doesn't say how much memory is shared with others")
