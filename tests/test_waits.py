"""Every wait of the package is needed: each is taken out in turn, and then a test that passes with it must fail.

A new wait in the package needs an entry in `SCENARIOS`, and so a reason to be there.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload.cli import benching
from diffusers_omni_offload.measuring import measure_link
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.recorder import Recorder
from diffusers_omni_offload.streaming.stages import PackedStage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.streaming.transport import HostToDevice
from diffusers_omni_offload.weights.leaves import find_leaves
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from tests import gathered_waits, page_cache_waits, simdevice, staged_waits, tiny, waits
from tests.logs import log_lines
from tests.waits import Site

STREAMER = "diffusers_omni_offload/streaming/streamer.py"
RECORDER = "diffusers_omni_offload/streaming/recorder.py"
TRANSPORT = "diffusers_omni_offload/streaming/transport.py"

#: Rates at which a block of the toy computes for much longer than its copy takes, or for much less.
COMPUTE_BOUND = {"flops_per_s": 1e8}
TRANSFER_BOUND = {"h2d_bytes_per_s": 1e8}
#: Only floating point operations and bytes over the link cost time.
ROUND_RATES = {"launch_overhead_s": 0, "kernel_overhead_s": 0, "mem_bytes_per_s": 1e30, "copy_latency_s": 0}


class Offloaded:
    """A toy pipeline of four blocks, offloaded, and what it gives when it is resident on the device."""

    def __init__(self, *, blocks: int = 4, tie: bool = False, **options: Any) -> None:
        self.device = torch.device("sim", 0)
        reference = self._build(blocks, tie)
        self.expected = reference.to(self.device)(**self._arguments()).images.cpu()
        self.pipe = self._build(blocks, tie)
        self.handle = diffusers_omni_offload.enable_omni_offload(self.pipe, "layer", **options)
        self.streamer = self.handle.backend.streamer
        self.blocks = list(self.pipe.transformer.blocks)
        self.hidden = torch.linspace(-1, 1, 4 * 32).reshape(1, 4, 32).to(self.device)

    @staticmethod
    def _build(blocks: int, tie: bool) -> Any:
        pipe, _ = tiny.build_toy(blocks)
        if tie:
            pipe.transformer.blocks[1].gate = pipe.transformer.blocks[0].gate
        return pipe

    @staticmethod
    def _arguments(steps: int = 2) -> dict[str, Any]:
        return {"steps": steps, "generator": torch.Generator("cpu").manual_seed(0)}

    def run(self, steps: int = 2) -> torch.Tensor:
        return self.pipe(**self._arguments(steps)).images

    def check(self) -> None:
        output = self.run().cpu()
        assert torch.equal(output, self.expected), "wrong values"
        simdevice.check()


def compute_is_slow() -> None:
    """Blocks are overwritten while they are read, if anything lets them be."""
    simdevice.configure(**COMPUTE_BOUND)
    offloaded = Offloaded()
    offloaded.check()  # This one is recorded, and so waits by other lines.
    offloaded.check()


def transfer_is_slow() -> None:
    """Blocks are read before they have arrived, if anything lets them be."""
    simdevice.configure(**TRANSFER_BOUND)
    offloaded = Offloaded()
    offloaded.check()
    offloaded.check()


def copies_overlap_with_compute() -> None:
    """Nothing goes wrong without the copy stream but the speed: a step takes the sum of compute and transfer."""
    simdevice.configure(**ROUND_RATES, **COMPUTE_BOUND)
    offloaded = Offloaded(blocks=8)
    nbytes = offloaded.streamer.slot_nbytes
    with torch.no_grad(), offloaded.handle.call():
        dit = offloaded.pipe.transformer
        x = torch.zeros(1, 4, 8, device=offloaded.device)
        compute_ns = _busy(lambda: dit(x), "compute_busy_ns")
        simdevice.configure(h2d_bytes_per_s=8 * nbytes / (compute_ns / 1e9))
        dit(x)
        torch.accelerator.synchronize()
        begin = simdevice.stats()["host_ns"]
        for _ in range(4):
            dit(x)
        torch.accelerator.synchronize()
        step_ns = (simdevice.stats()["host_ns"] - begin) / 4
    assert step_ns < 1.3 * compute_ns, f"a modelled step takes {step_ns / compute_ns:.2f} x max(compute, transfer)"


def _busy(work: Callable[[], object], counter: str) -> int:
    before = simdevice.stats()[counter]
    work()
    torch.accelerator.synchronize()
    return simdevice.stats()[counter] - before


def weights_are_edited_after_a_call() -> None:
    """A call longer than the last doesn't know where it ends; an edit at rest mustn't meet its last prefetch."""
    simdevice.configure(**TRANSFER_BOUND)
    offloaded = Offloaded()
    offloaded.run()
    offloaded.run(steps=3)
    for block in offloaded.blocks:
        block.expand.weight.data.mul_(2)
    torch.accelerator.synchronize()
    simdevice.check()


def slots_are_given_back_after_a_call_on_another_stream() -> None:
    """The slots belong to the stream that they were allocated on; it doesn't know of readers on another one."""
    simdevice.configure(**COMPUTE_BOUND)
    offloaded = Offloaded()
    side = torch.Stream(device=offloaded.device)
    torch.accelerator.synchronize()
    with side:
        offloaded.run()
        output = offloaded.run()  # the end of a first call waits for all work, to say what limited its speed
    offloaded.streamer.release_slots()
    gc.collect()
    simdevice.check()
    side.synchronize()
    assert torch.equal(output.cpu(), offloaded.expected), "wrong values"


def two_streams_read_one_slot() -> None:
    """A block runs on two streams, and both have to be over before the next one takes its slot."""
    simdevice.configure(**COMPUTE_BOUND)
    offloaded = Offloaded(slots=1)
    first, second = torch.Stream(device=offloaded.device), torch.Stream(device=offloaded.device)
    torch.accelerator.synchronize()
    with torch.no_grad(), offloaded.handle.call():
        with first:
            offloaded.blocks[0](offloaded.hidden)
        with second:
            offloaded.blocks[0](offloaded.hidden)
            offloaded.blocks[1](offloaded.hidden)
    torch.accelerator.synchronize()
    simdevice.check()


def a_resident_block_reads_tied_weights() -> None:
    """The leaves shared with a streamed block are on their way when the first block, a resident one, reads them."""
    simdevice.configure(**TRANSFER_BOUND)
    options = {"layer_options": {"dit": {"resident_layers": 1}}, "resident_policy": "leading"}
    offloaded = Offloaded(tie=True, **options)
    assert offloaded.handle.plan.stacks[0].resident == (0,) and offloaded.handle.backend.shared is not None
    offloaded.check()


def slots_are_allocated_anew() -> None:
    """The allocator may hand out memory that earlier work of the stream still uses, so the first copy waits for it.

    The simulated allocator never reuses memory, so the order is read from the trace.
    """
    simdevice.configure(trace=1)
    offloaded = Offloaded()
    with torch.no_grad(), offloaded.handle.call():
        offloaded.streamer.release_slots()
        simdevice.reset_clock()
        simdevice.configure(flops_per_s=1e8)
        torch.mm(*torch.ones(2, 64, 64, device=offloaded.device))
        offloaded.blocks[0](offloaded.hidden)
        torch.accelerator.synchronize()
    rows = simdevice.trace()
    earlier = next(end for name, _, _, end in rows if name == "aten::mm")
    copy = next(begin for name, _, begin, _ in rows if name == "copy_h2d")
    assert copy >= earlier, f"modelled: a copy into a new slot begins at {copy} ns, earlier work ends at {earlier} ns"


def the_verdict_follows_the_rates() -> None:
    """The line after a first call says what limits the speed."""
    simdevice.configure(**ROUND_RATES)
    for rates, verdict in ((TRANSFER_BOUND, "transfer-bound"), (COMPUTE_BOUND, "compute-bound")):
        simdevice.configure(flops_per_s=50e12, h2d_bytes_per_s=16e9)
        offloaded = Offloaded(blocks=8)
        simdevice.configure(**rates)
        with log_lines() as lines:
            offloaded.run()
        assert any(verdict in line for line in lines), f"the modelled rates {rates} gave {lines}"


def a_stage_is_given_up_before_it_was_entered() -> None:
    """It was announced, so its copy may be under way still when its memory goes to somebody else."""
    simdevice.configure(**TRANSFER_BOUND)
    platform = Platform(torch.device("sim", 0))
    streamer = Streamer(platform, 2)
    stages = Stages(streamer)
    module = torch.nn.Linear(256, 256)
    master = PackedMaster(lambda: find_leaves(module, "encoder"), [module], "encoder", platform, PinnedBudget(True))
    master.pack()
    stage = PackedStage("encoder", "encoder", module, master, streamer)
    stages.add(module, stage)
    stages.announce(stage)
    stages.give_up_all()
    torch.zeros(master.nbytes, dtype=torch.uint8, device=platform.device)
    streamer.settle()
    assert simdevice.hazards() == [], f"simdevice: {simdevice.hazards()}"


def times_are_read_when_they_are_there() -> None:
    """CUDA refuses the time between events that haven't happened yet; the simulated device's events are made to."""
    assert len(_recorder_of_four().spans()) == 4


def so_are_those_of_memory() -> None:
    assert len(_recorder_of_four().memory()) == 12


def _recorder_of_four() -> Recorder:
    simdevice.configure(**COMPUTE_BOUND)
    device = torch.device("sim", 0)
    recorder = Recorder(_StrictPlatform(device))
    matrix = torch.ones(64, 64, device=device)
    for _ in range(4):
        recorder.run_component("dit", torch.mm, (matrix, matrix), {})
    return recorder


def links_are_measured() -> None:
    """The rate and the time besides of a copy are those that the device was given."""
    simdevice.configure(h2d_bytes_per_s=1e9, copy_latency_s=2e-5)
    rates = measure_link(_StrictPlatform(torch.device("sim", 0)), 1 << 20)
    assert abs(rates.link_bytes_per_s / 1e9 - 1) < 0.01, f"modelled: {rates}"
    assert abs(rates.copy_latency_s / 2e-5 - 1) < 0.3, f"modelled: {rates}"


def calls_are_timed() -> None:
    """A benchmark's seconds are those of the device's clock."""
    simdevice.configure(**ROUND_RATES, flops_per_s=1e9)
    matrix = torch.ones(64, 64, device="sim")
    seconds, _ = benching._timed(_StrictPlatform(torch.device("sim", 0)), lambda: torch.mm(matrix, matrix))
    assert abs(seconds / (2 * 64**3 / 1e9) - 1) < 0.01, f"modelled: {seconds}"


def recorded_blocks_wait_for_their_bytes() -> None:
    simdevice.configure(**TRANSFER_BOUND)
    offloaded = Offloaded()
    with offloaded.handle.trace():
        offloaded.check()


def a_recorded_copy_is_as_long_as_its_bytes_take() -> None:
    """Not longer by what it waits for its slot."""
    simdevice.configure(**ROUND_RATES, **COMPUTE_BOUND, h2d_bytes_per_s=1e9)
    offloaded = Offloaded(blocks=8)
    with offloaded.handle.trace() as trace:
        offloaded.run()
    copies = [span for span in trace.spans if span.lane == "copy"]
    assert copies and all(abs(span.seconds - span.nbytes / 1e9) < 1e-8 for span in copies), f"modelled: {copies}"


class _StrictPlatform(Platform):
    def event(self, *, enable_timing: bool = False) -> Any:
        return _StrictEvent(super().event(enable_timing=enable_timing))


class _StrictEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def record(self, stream: Any) -> None:
        self.event.record(stream)

    def elapsed_time(self, other: _StrictEvent) -> float:
        assert self.event.query() and other.event.query(), "asked for the modelled time of an event to come"
        return self.event.elapsed_time(other.event)


#: What fails without each wait.
SCENARIOS: dict[Site, Callable[[], None]] = {
    Site(
        "diffusers_omni_offload/streaming/slots.py", "Slot.__init__", 0, "self.free.record(self.stream)"
    ): slots_are_allocated_anew,
    **{
        Site("diffusers_omni_offload/cli/benching.py", "_timed", nth, source): calls_are_timed
        for nth, source in enumerate(
            (
                "begin.record(platform.current_stream())",
                "end.record(platform.current_stream())",
                "platform.synchronize()",
            )
        )
    },
    **{
        Site("diffusers_omni_offload/measuring.py", "_seconds", nth, source): links_are_measured
        for nth, source in enumerate(("begin.record(stream)", "end.record(stream)", "platform.synchronize()"))
    },
    Site(RECORDER, "Recorder.spans", 0, "self._platform.synchronize()"): times_are_read_when_they_are_there,
    Site(RECORDER, "Recorder.memory", 0, "self._platform.synchronize()"): so_are_those_of_memory,
    Site(RECORDER, "Recorder._mark", 0, "event.record(stream)"): the_verdict_follows_the_rates,
    Site(RECORDER, "Recorder.enter_when", 0, "stream.wait_event(ready)"): recorded_blocks_wait_for_their_bytes,
    Site(RECORDER, "Recorder.load", 0, "copies.wait_event(slot.free)"): a_recorded_copy_is_as_long_as_its_bytes_take,
    Site(STREAMER, "Streamer.wait_for_copies", 0, "self._copies.synchronize()"): weights_are_edited_after_a_call,
    Site(
        "diffusers_omni_offload/streaming/slots.py", "Slot.tell_allocator", 0, "self.buffer.record_stream(stream)"
    ): slots_are_given_back_after_a_call_on_another_stream,
    Site(
        "diffusers_omni_offload/streaming/stages.py",
        "PackedStage.hold_compute",
        0,
        "self._streamer.platform.current_stream().wait_event(self.slot.ready)",
    ): a_stage_is_given_up_before_it_was_entered,
    Site(STREAMER, "Streamer.enter", 0, "stream.wait_event(slot.ready)"): transfer_is_slow,
    Site(
        STREAMER, "Streamer.bind_apart", 0, "self.platform.current_stream().wait_event(slot.ready)"
    ): a_resident_block_reads_tied_weights,
    Site(STREAMER, "Streamer._mark_free", 0, "stream.wait_event(slot.free)"): two_streams_read_one_slot,
    Site(STREAMER, "Streamer._mark_free", 1, "slot.free.record(stream)"): compute_is_slow,
    Site(TRANSPORT, "HostToDevice.load", 0, "copies.wait_event(slot.free)"): compute_is_slow,
    Site(TRANSPORT, "HostToDevice.load", 1, "with copies:"): copies_overlap_with_compute,
    Site(TRANSPORT, "HostToDevice.load", 2, "slot.ready.record(copies)"): transfer_is_slow,
    **staged_waits.SCENARIOS,
    **gathered_waits.SCENARIOS,
    **page_cache_waits.SCENARIOS,
}


#: How a scenario fails: by a hazard, by values, by the modelled clock, or since an event was never recorded.
FAILURES = r"simdevice|wrong values|modelled|must be recorded"


def test_every_wait_has_a_scenario() -> None:
    sites = waits.list_sites()
    missing = [str(site) for site in sites if site not in SCENARIOS]
    assert not missing, f"waits without a test that fails without them: {missing}"
    gone = [str(site) for site in SCENARIOS if site not in sites]
    assert not gone, f"tests for waits that the package doesn't have: {gone}"


@pytest.mark.parametrize("scenario", dict.fromkeys(SCENARIOS.values()), ids=lambda scenario: scenario.__name__)
def test_passes_with_all_waits(sim: ModuleType, scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.expects_hazards
@pytest.mark.parametrize("site", SCENARIOS, ids=str)
def test_fails_without_the_wait(sim: ModuleType, monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    with monkeypatch.context() as patch:
        waits.without(None, patch, function=(site.file, site.function))
        SCENARIOS[site]()  # compiled anew and whole, so that a failure below is the wait's
    assert sim.hazards() == []
    waits.without(site, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=FAILURES):
        SCENARIOS[site]()


# The list itself


def _sites(source: str) -> list[str]:
    return [f"{site.function}: {site.source}" for site in waits.sites_of("a.py", ast.parse(source))]


def test_the_list_finds_waits_wherever_they_are() -> None:
    source = """
def f(stream, event):
    if event:
        stream.wait_event(event)
    def g():
        event.record()
    with torch.cuda.stream(stream), self._lock:
        pass
    with stream as s:
        torch.cuda.synchronize()
    with self._scope:
        pass
class A:
    async def h(self):
        self.x.y.record_stream(self.s)
"""
    assert _sites(source) == [
        "f: stream.wait_event(event)",
        "f: event.record()",
        "f: with torch.cuda.stream(stream), self._lock:",
        "f: with stream as s:",
        "f: torch.cuda.synchronize()",
        "A.h: self.x.y.record_stream(self.s)",
    ]


@pytest.mark.parametrize(
    "source", ["def f(e):\n    return e.record()", "def f(e):\n    r = e.record\n    r()", "event.record()"]
)
def test_the_list_refuses_waits_that_no_test_could_take_out(source: str) -> None:
    with pytest.raises(waits.CannotBeRemoved, match="statement"):
        _sites(source)


def test_a_wait_is_removed_and_nothing_else() -> None:
    tree = ast.parse("def f(e, s):\n    e.record()\n    with s:\n        e.record()\n    return 1")
    target = next(node for node in ast.walk(tree) if isinstance(node, ast.With))
    text = ast.unparse(waits._Remover(target).visit(tree))
    assert text == "def f(e, s):\n    e.record()\n    e.record()\n    return 1"


def test_modules_are_not_left_with_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    before = HostToDevice.load
    with monkeypatch.context() as patch:
        waits.without(next(s for s in SCENARIOS if s.function == "HostToDevice.load"), patch)
        assert HostToDevice.load is not before
    assert HostToDevice.load is before
