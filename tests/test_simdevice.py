"""The simulated device: streams, races, the modelled clock, memory."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def round_rates(sim):
    """A copy of n bytes takes n nanoseconds and nothing else costs time unless a test says so."""
    sim.configure(
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        copy_latency_s=0,
        launch_overhead_s=0,
        kernel_overhead_s=0,
        pin_bytes_per_s=1e30,
    )


@pytest.fixture
def source():
    return torch.full((MEBIBYTE // 4,), 3.0, pin_memory=True)


@pytest.fixture
def slot(device, sim):
    slot = torch.zeros(MEBIBYTE // 4, device=device)
    torch.accelerator.synchronize()
    sim.reset_clock()
    return slot


def copy_on_side_stream(target, source):
    stream, done = torch.Stream(device=target.device), torch.Event(device="sim")
    with stream:
        target.copy_(source, non_blocking=True)
        done.record()
    return stream, done


def is_filled(tensor):
    return bool((tensor == 3.0).all().item())


def add_one(tensor):
    """A kernel that reads the tensor."""
    return tensor + 1


# Deferred copies


def test_an_asynchronous_copy_runs_when_it_is_waited_for(sim, source, slot):
    stream, _ = copy_on_side_stream(slot, source)
    assert sim.stats()["pending"] == 1 and sim.stats()["deferred_run"] == 0
    stream.synchronize()
    assert sim.stats()["pending"] == 0 and sim.stats()["deferred_run"] == 1
    assert is_filled(slot)


def test_without_a_wait_the_old_bytes_are_read(sim, source, slot):
    sim.configure(race=0)
    copy_on_side_stream(slot, source)
    assert (slot * 1).sum().item() == 0


def test_an_event_wait_is_enough(sim, source, slot):
    _, done = copy_on_side_stream(slot, source)
    assert not done.query()
    torch.accelerator.current_stream().wait_event(done)
    assert is_filled(slot)


def test_a_device_to_host_copy_is_deferred_too(device):
    computed = torch.full((MEBIBYTE // 4,), 2.0, device=device)
    host = torch.zeros(MEBIBYTE // 4, pin_memory=True)
    host.copy_(computed, non_blocking=True)
    assert host.sum().item() == 0
    torch.accelerator.synchronize()
    assert host.sum().item() == 2.0 * host.numel()


def test_a_copy_from_pageable_memory_blocks(sim, slot):
    copy_on_side_stream(slot, torch.full((MEBIBYTE // 4,), 3.0))
    assert sim.stats()["pending"] == 0 and is_filled(slot)


def test_a_copy_of_inference_mode_may_be_waited_for_outside_it(source, slot):
    with torch.inference_mode():
        stream, _ = copy_on_side_stream(slot, source)
    stream.synchronize()
    assert is_filled(slot)


def test_copies_may_be_issued_from_another_thread(source, slot):
    events = []
    thread = threading.Thread(target=lambda: events.append(copy_on_side_stream(slot, source)[1]))
    thread.start()
    thread.join()
    torch.accelerator.current_stream().wait_event(events[0])
    assert is_filled(slot)


# Races


@pytest.mark.expects_hazards
def test_reading_before_the_copy_is_done_raises(sim, source, slot):
    copy_on_side_stream(slot, source)
    with pytest.raises(RuntimeError, match=r"race.*reads"):
        add_one(slot)
    assert len(sim.hazards()) == sim.stats()["hazards"] == 1
    with pytest.raises(RuntimeError, match="1 hazards; the first: simdevice race"):
        sim.check()


@pytest.mark.expects_hazards
def test_overwriting_before_the_compute_is_done_raises(source, slot):
    stream = torch.Stream(device=slot.device)
    add_one(slot)
    with stream, pytest.raises(RuntimeError, match=r"race.*writes"):
        slot.copy_(source, non_blocking=True)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        slot.copy_(source, non_blocking=True)


@pytest.mark.expects_hazards
def test_two_unordered_writes_raise(source, slot):
    copy_on_side_stream(slot, source)
    with pytest.raises(RuntimeError, match=r"race.*writes"):
        copy_on_side_stream(slot, source)


@pytest.mark.expects_hazards
def test_halves_of_one_arena_are_apart(device, source):
    arena = torch.zeros(2 * source.numel(), device=device)
    torch.accelerator.synchronize()
    first, second = arena.chunk(2)
    add_one(first)
    copy_on_side_stream(second, source)
    add_one(first)
    with pytest.raises(RuntimeError, match="race"):
        add_one(arena)


@pytest.mark.expects_hazards
def test_a_source_that_changes_in_flight_is_reported(source, slot):
    stream, _ = copy_on_side_stream(slot, source)
    source.zero_()
    with pytest.raises(RuntimeError, match="pinned source"):
        stream.synchronize()


@pytest.mark.expects_hazards
def test_reset_clock_reports_what_it_meets(sim, source, slot):
    copy_on_side_stream(slot, source)
    source.zero_()
    with pytest.raises(RuntimeError, match="pinned source"):
        sim.reset_clock()
    sim.reset_clock()
    assert sim.stats()["pending"] == 0


@pytest.mark.expects_hazards
@pytest.mark.parametrize("recorded", [False, True])
def test_freeing_what_another_stream_uses_needs_record_stream(device, sim, recorded):
    stream = torch.Stream(device=device)
    with stream:
        tensor = torch.ones(MEBIBYTE // 4, pin_memory=True).to(device, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(stream)
    add_one(tensor)
    if recorded:
        tensor.record_stream(torch.accelerator.current_stream())
    del tensor
    assert len(sim.hazards()) == (0 if recorded else 1)


@pytest.mark.expects_hazards
def test_recording_mode_goes_on(sim, source, slot):
    sim.configure(race=1)
    copy_on_side_stream(slot, source)
    add_one(slot)
    assert len(sim.hazards()) == 1


@pytest.mark.expects_hazards
def test_the_checker_stays_exact_over_many_views(device, sim, source):
    arena = torch.zeros(source.numel(), device=device)
    views = arena.split(1024)
    for _ in range(3):
        for view in views:
            view.add_(1)
    stream = torch.Stream(device=device)
    with stream, pytest.raises(RuntimeError, match=r"race.*writes"):
        arena.copy_(source, non_blocking=True)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        arena.copy_(source, non_blocking=True)
    sim.clear_hazards()
    with pytest.raises(RuntimeError, match=r"race.*reads"):
        add_one(views[-1])


@pytest.mark.expects_hazards
def test_many_live_accesses_stay_quick_and_recent_ones_are_remembered(device, sim):
    """A block has more live, disjoint reads than the checker keeps: it forgets the oldest, and stays bounded."""
    arena = torch.zeros(20_000, device=device)
    views = arena.split(2)
    torch.accelerator.synchronize()
    begin = time.process_time()
    for view in views:
        view.neg()
    assert time.process_time() - begin < 5
    with torch.Stream(device=device), pytest.raises(RuntimeError, match=r"race.*writes"):
        views[-1].zero_()


# The modelled clock


def test_copy_and_compute_overlap_on_the_modelled_clock(device, sim, source, slot):
    sim.configure(flops_per_s=1e9, mem_bytes_per_s=1e30)
    matrix = torch.ones(512, 512, device=device)
    torch.accelerator.synchronize()
    sim.reset_clock()
    begin, end = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    begin.record()
    stream, _ = copy_on_side_stream(slot, source)
    matrix @ matrix
    torch.accelerator.current_stream().wait_stream(stream)
    end.record()
    torch.accelerator.synchronize()
    compute = 2 * 512**3
    assert begin.elapsed_time(end) == pytest.approx(compute / 1e6)
    counters = sim.stats()
    assert (counters["h2d_busy_ns"], counters["compute_busy_ns"]) == (MEBIBYTE, compute)
    assert counters["host_ns"] == compute
    assert sim.stream_time(stream) == MEBIBYTE / 1e9


def test_the_same_program_takes_the_same_modelled_time(device, sim, source, slot):
    sim.restore_defaults()
    times = []
    for _ in range(2):
        sim.reset_clock()
        stream, _ = copy_on_side_stream(slot, source)
        torch.accelerator.current_stream().wait_stream(stream)
        add_one(slot)
        torch.accelerator.synchronize()
        times.append(sim.stats()["host_ns"])
    assert times[0] == times[1] > 0


def test_trace_lists_work_in_order(device, sim, source, slot):
    sim.configure(trace=1)
    stream, _ = copy_on_side_stream(slot, source)
    stream.synchronize()
    add_one(slot)
    copy, kernel = sim.trace()
    assert copy == ("copy_h2d", stream.stream_id, 0, MEBIBYTE)
    assert kernel[0] == "aten::add" and kernel[2] >= MEBIBYTE


def test_reset_clock_zeroes_counters_and_keeps_memory_figures(device, sim, source, slot):
    copy_on_side_stream(slot, source)
    torch.accelerator.synchronize()
    sim.advance_host(1.0)
    before = sim.stats()
    assert before["host_ns"] >= 1e9 and before["copies"] == 1 and before["h2d_bytes"] == MEBIBYTE
    sim.reset_clock()
    after = sim.stats()
    kept = {"pinned_current", "pinned_peak", "allocations"}
    assert {key: value for key, value in after.items() if key not in kept and value} == {}
    assert after["allocations"] == before["allocations"] and after["pinned_peak"] == after["pinned_current"]


# Device memory


def test_memory_is_counted(device):
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(1000, device=device)
    assert torch.accelerator.memory_allocated() - before == 4096
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4096


def test_allocations_counts_outputs_and_new_tensors(device, sim):
    tensor = torch.zeros(8, device=device)
    before = sim.stats()["allocations"]
    views = tensor.view(2, 4)[0]
    assert sim.stats()["allocations"] == before
    torch.empty(8, device=device)
    add_one(views)
    assert sim.stats()["allocations"] == before + 2


def test_new_memory_holds_no_numbers(device, sim):
    assert torch.empty(100, device=device).isnan().all().item()
    assert (torch.empty(100, dtype=torch.int64, device=device) == -1).all().item()


def test_capacity(device, sim):
    used = torch.accelerator.memory_stats()["active_bytes.all.current"]
    sim.configure(capacity_bytes=used + 10_000)
    assert torch.accelerator.get_memory_info() == (10_000, used + 10_000)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20000 bytes"):
        torch.empty(5000, device=device)
    torch.empty(2000, device=device)
    sim.configure(capacity_bytes=None)
    torch.empty(5000, device=device)


def test_recorded_memory_stays_active_until_the_stream_has_passed(device, sim):
    sim.configure(flops_per_s=1e9)

    def active():
        return torch.accelerator.memory_stats()["active_bytes.all.current"]

    side, base = torch.Stream(device=device), active()
    matrix = torch.ones(512, 512, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        product = matrix @ matrix
    matrix.record_stream(side)
    nbytes = matrix.untyped_storage().nbytes()
    del matrix
    assert active() - base == 2 * nbytes
    assert torch.accelerator.memory_allocated() <= active() - nbytes
    torch.accelerator.synchronize()
    assert active() - base == nbytes
    del product


# Streams, devices, capture


def test_streams_through_the_device_module(device):
    stream = torch.sim.Stream()
    assert stream != torch.sim.current_stream() == torch.sim.default_stream()
    with torch.sim.stream(stream):
        assert torch.accelerator.current_stream() == stream
    with torch.sim.stream(None), torch.sim.device(0):
        assert torch.accelerator.current_stream() == torch.sim.default_stream()
    assert stream.query()


def test_the_device_is_the_process_s_accelerator(device):
    assert torch.accelerator.current_accelerator() == device == torch.device("sim")
    assert torch.get_device_module("sim") is torch.sim


def test_two_devices_do_not_mix(sim):
    sim.configure(devices=2)
    second = torch.ones(3, device="sim:1")
    first = second.to("sim:0")
    assert torch.equal(first.cpu(), second.cpu())
    with pytest.raises(RuntimeError, match="found at least two devices, sim:0 and sim:1"):
        first + second
    torch.accelerator.synchronize(1)


def test_capture_can_be_pretended(sim):
    assert torch.sim.is_current_stream_capturing() is False
    sim.configure(capturing=1)
    assert torch.sim.is_current_stream_capturing() is True


def test_unknown_options_are_refused(sim):
    with pytest.raises(KeyError, match="no option 'capcity_bytes'; it has h2d_bytes_per_s"):
        sim.configure(capcity_bytes=1)
    with pytest.raises(KeyError):
        sim.get_config("capcity_bytes")


def test_collected_tensors_give_their_memory_back(device):
    before = torch.accelerator.memory_allocated()
    model = torch.nn.Linear(64, 64).to(device)
    model.itself = [model]
    del model
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
