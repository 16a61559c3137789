"""Whole calls of tiny pipelines, modelled: module mode beside accelerate's model offload.

The device is slow enough that fixed costs (of 800 small copies, say) weigh as little as with weights of real sizes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.hooks import CpuOffload

import diffusers_omni_offload
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.topology.sizes import module_nbytes
from tests import simdevice, tiny

Build = Callable[[], tuple[Any, Callable[[], dict[str, Any]]]]

#: By name: what is run. Wan has two DiTs and takes both in every call.
PIPELINES: dict[str, Build] = {
    "Wan 2.2, two experts": lambda: tiny.build_wan(num_layers=8),
    "Stable Diffusion 3, three text encoders": tiny.build_sd3,
}

#: Time of one pinned copy of all weights by the time of a resident call.
RATIOS = (0.1, 1.0)

#: Modelled seconds of a resident call.
CALL_S = 1.0

WITH_VAE: Mapping[str, str] = {"dit": "module", "text_encoder": "module", "vae": "module"}


@dataclass(frozen=True)
class Call:
    """One call after the first.

    Attributes:
        to_device, to_host: bytes copied; the prompt's and the output's are among them.
        copies: how many copies that were.
        swaps: how often a whole component came to the device.
        peak: device bytes at most, activations included.
        seconds: modelled time.
    """

    to_device: int
    to_host: int
    copies: int
    swaps: int
    peak: int
    seconds: float


class CallBench:
    """A tiny pipeline on the simulated device; calls it in several ways, each on a new one with the same weights.

    Args:
        build: makes the pipeline, and what makes the arguments of a call.

    Attributes:
        weight_bytes: of all of its components.
        flops_per_s: modelled rate of the compute, such that a resident call takes about `CALL_S`.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        pipe, _ = build()
        self.weight_bytes = sum(map(module_nbytes, _modules(pipe)))
        self._expected: np.ndarray | None = None
        self.flops_per_s = 1e6
        simdevice.configure(flops_per_s=self.flops_per_s)
        self.flops_per_s *= self.resident().seconds / CALL_S
        self.set_ratio(RATIOS[0])

    def set_ratio(self, ratio: float, pageable: float = 0.25) -> None:
        """Choose the link: one pinned copy of all weights takes `ratio` resident calls.

        Args:
            ratio: see above.
            pageable: the rate of pageable copies, as a part of the link's. By default it is that of the simulated
                device's own rates.
        """
        link = self.weight_bytes / (ratio * CALL_S)
        simdevice.configure(
            flops_per_s=self.flops_per_s,
            h2d_bytes_per_s=link,
            d2h_bytes_per_s=link,
            pageable_bytes_per_s=pageable * link,
        )

    def resident(self) -> Call:
        """All weights on the device."""
        pipe, call = self._build()
        return self._measure(pipe, call, lambda: pipe.to("sim"))

    def module_mode(self, components: Mapping[str, str] | None = None) -> Call:
        """Ours: "module", or a choice per component."""
        pipe, call = self._build()
        mode = "module" if components is None else None
        found = self._measure(
            pipe,
            call,
            lambda: diffusers_omni_offload.enable_omni_offload(pipe, mode, components=components),
            lambda: pipe.omni_offload.swaps,
        )
        pipe.disable_omni_offload()
        return found

    def model_offload(self) -> Call:
        """accelerate's, as stock diffusers turns it on."""
        pipe, call = self._build()
        bring, moves = CpuOffload.pre_forward, []

        def pre_forward(hook: CpuOffload, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if next(module.parameters()).device.type == "cpu":
                moves.append(module)
            return bring(hook, module, *args, **kwargs)

        with mock.patch.object(CpuOffload, "pre_forward", pre_forward):
            found = self._measure(pipe, call, pipe.enable_model_cpu_offload, lambda: len(moves))
        pipe.remove_all_hooks()
        return found

    def _measure(
        self, pipe: Any, call: Callable[[], dict[str, Any]], enable: Callable[[], Any], swaps: Callable[[], int] = int
    ) -> Call:
        """The second call after `enable`; its output has to be that of the first way that was measured."""
        gc.collect()
        before = torch.accelerator.memory_allocated()
        enable()
        tiny.run(pipe, call)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        simdevice.reset_clock()
        swapped = swaps()
        output = tiny.run(pipe, call)
        torch.accelerator.synchronize()
        stats = simdevice.stats()
        simdevice.check()
        if self._expected is None:
            self._expected = output
        assert np.array_equal(output, self._expected)
        return Call(
            to_device=stats["h2d_bytes"],
            to_host=stats["d2h_bytes"],
            copies=stats["copies"],
            swaps=swaps() - swapped,
            peak=torch.accelerator.max_memory_allocated() - before,
            seconds=stats["host_ns"] / 1e9,
        )


def _modules(pipe: Any) -> list[torch.nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def call_table(bench: CallBench) -> list[list[str]]:
    """A row for each way: what a call copies and holds, and its time by that of a resident call at each of `RATIOS`."""
    ways: dict[str, tuple[Callable[[], Call], float]] = {
        "resident": (bench.resident, 0.25),
        "module mode": (bench.module_mode, 0.25),
        "module mode, VAE too": (lambda: bench.module_mode(WITH_VAE), 0.25),
        "model offload": (bench.model_offload, 0.25),
        "model offload (*)": (bench.model_offload, 1.0),
    }
    resident: list[float] = []
    rows = []
    for name, (way, pageable) in ways.items():
        calls = []
        for ratio in RATIOS:
            bench.set_ratio(ratio, pageable)
            calls.append(way())
        resident = resident or [call.seconds for call in calls]
        one = calls[0]
        sizes = [format_bytes(nbytes) for nbytes in (one.to_device, one.to_host, one.peak)]
        times = [f"{call.seconds / alone:.2f}" for call, alone in zip(calls, resident, strict=True)]
        rows.append([name, sizes[0], sizes[1], str(one.copies), str(one.swaps), sizes[2], *times])
    return rows
