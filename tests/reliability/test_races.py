"""Races: each wait of executor and lanes is needed, the pool survives stress, and orderings are in the IR."""

from __future__ import annotations

import random
import re
import threading
import time
import zlib

import numpy as np
import pytest
from toy_stages import reference

import cpu_kernels as ck
from cpu_kernels import jit
from cpu_kernels.codegen.fields import MAX_NODES
from cpu_kernels.codegen.worker import build_worker
from cpu_kernels.layout import Layout
from hybridattn.core.errors import DeviceError
from hybridattn.core.op import CPU, D2H, GPU, Op, Work
from hybridattn.devices.host import HostDevice
from hybridattn.devices.lane import HostFuture
from hybridattn.devices.sim import SimDevice
from hybridattn.scheduler.finish import Finish

SECOND = 1_000_000_000

# -- every wait is needed --------------------------------------------------------------------------------------------


class WithoutWait(SimDevice):
    """Forgets what ops of one name wait for."""

    def __init__(self, price, name):
        super().__init__(price, execute=True)
        self._without = name

    def submit(self, op, after=()):
        return super().submit(op, () if op.name == self._without else after)


class Impatient(SimDevice):
    """Takes every CPU future for done, as a poll that looks at nothing would."""

    def submit(self, op, after=()):
        return super().submit(op, tuple(t for t in after if t.op.lane != CPU))

    def wait_any(self, futures, timeout_ns):
        return


def wrong_runs(rig, make_device, seeds=12):
    """Of so many schedules, how many gave other tokens than the model's (or met a slot that nobody had written)."""
    wrong = 0
    for seed in range(seeds):
        engine = rig.build(
            rig.policies["async_overlap" if seed % 2 else "all_on_cpu"](), seed, gpu=4, cpu=10, scale=3,
            max_num_batched_tokens=20, make_device=make_device,
        )  # fmt: skip
        jobs = rig.jobs(seed, 5, longest=50, most=8)
        requests = [engine.add(p, n) for p, n in jobs]
        try:
            rig.finish(engine)
        except (DeviceError, AssertionError):
            wrong += 1
        else:
            wrong += rig.outputs(requests) != [reference(p, n, rig.layers) for p, n in jobs]
    return wrong


def test_with_all_waits_every_schedule_is_right(rig):
    assert wrong_runs(rig, lambda price: WithoutWait(price, "none of them")) == 0


@pytest.mark.parametrize("name", ["linear", "send_qkv", "cpu_attention", "attention", "load_kv", "offload_kv"])
def test_removing_the_wait_of_an_op_is_caught(rig, name):
    """``linear`` waits for fetched outputs, ``send_qkv`` and ``offload_kv`` for what they copy, ``cpu_attention`` for
    the copy, ``attention`` and ``load_kv`` for the staging area."""
    assert wrong_runs(rig, lambda price: WithoutWait(price, name)) > 0


def test_a_poll_that_looks_at_nothing_is_caught(rig, monkeypatch):
    monkeypatch.setattr("hybridattn.devices.sim.RunFuture.done", lambda future: True)
    assert wrong_runs(rig, lambda price: Impatient(price, execute=True)) > 0


def test_reusing_slots_before_their_micro_batch_ended_is_caught(rig, monkeypatch):
    """Slots of the exchange slabs are given out again only when a micro-batch has ended."""
    monkeypatch.setattr(
        "hybridattn.executor.slots.SlotRanges.take", lambda ranges, count: (0, min(count, ranges.capacity))
    )
    monkeypatch.setattr("hybridattn.executor.slots.SlotRanges.give_back", lambda *args: None)
    assert wrong_runs(rig, lambda price: SimDevice(price, execute=True)) > 0


def test_giving_blocks_back_before_the_row_has_left_is_caught(rig, monkeypatch):
    """Pages of an aborted row in flight are held until its future has ended."""
    end = Finish.end

    def eager(finish, request, reason, now_ns):
        request.in_flight = request.in_flight and reason != "abort"
        end(finish, request, reason, now_ns)

    def run():
        wrong = 0
        for seed in range(20):
            engine = rig.build(rig.policies["all_on_cpu"](), seed, gpu=0, cpu=6, scale=60)
            jobs = rig.jobs(seed, 8, longest=30, most=10)
            requests = [engine.add(p, n) for p, n in jobs]
            gone = requests[1 + seed % 3]

            def between(step, engine=engine, gone=gone):
                if gone.in_flight and gone.num_output > 1:
                    engine.abort(gone.request_id)

            try:
                rig.finish(engine, between)
            except (DeviceError, AssertionError, KeyError, AttributeError, ValueError):
                wrong += 1
                continue
            right = [reference(p, n, rig.layers) for p, n in jobs]
            wrong += any(
                r is not gone and o != w for r, o, w in zip(requests, rig.outputs(requests), right, strict=True)
            )
        return wrong

    assert run() == 0
    monkeypatch.setattr(Finish, "end", eager)
    assert run() > 0


# -- E10: a copy starts when what it copies has been written ---------------------------------------------------------


def checksums_that_differ(rounds=30):
    """A slow writer on the GPU lane, a copy behind it, attention behind the copy: who saw something else."""
    device = HostDevice(gpu_memory_bytes=1 << 20)
    page, copy, seen = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8), []
    try:
        for number in range(1, rounds + 1):

            def write(number=number):
                page[:2048] = number
                time.sleep(0.002)  # the layer that writes K,V is late
                page[2048:] = number

            work = Work("other", 0, 0, 1)
            written = device.submit(Op("write", GPU, work, write))
            copied = device.submit(Op("copy", D2H, work, lambda: copy.__setitem__(slice(None), page)), (written,))
            summed = device.submit(Op("sum", CPU, work, lambda: zlib.crc32(copy.tobytes())), (copied,))
            seen.append(summed.wait(10 * SECOND) == zlib.crc32(bytes([number]) * 4096))
            written.wait(10 * SECOND)
        device.drain(10 * SECOND)
    finally:
        device.close()
    return seen.count(False)


def test_E10_a_copy_holds_what_was_written_before_it():
    assert checksums_that_differ() == 0


def test_E10_without_the_wait_the_checksum_differs(monkeypatch):
    monkeypatch.setattr(HostFuture, "__init__", _forgetful(HostFuture.__init__))
    assert checksums_that_differ(5) > 0


def _forgetful(init):
    return lambda future, op, after: init(future, op, ())


# -- the pool --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem():
    """(plan, q, right output): three rows, one of them split."""
    rng = np.random.default_rng(0)
    pages = ck.KVPages(16, 2, 64, 16, "bf16", huge_pages=False)
    lens, table = [200, 1, 17], [list(range(13)), [13] * 13, [14, 15] + [-1] * 11]
    shape = (200, 2, 64)
    for blocks, count in zip(table, lens, strict=True):
        slots = np.array([blocks[p // 16] * 16 + p % 16 for p in range(count)])
        ck.append_kv(pages, 0, *rng.standard_normal((2, *shape)).astype(np.float32)[:, :count], slots)
    q = rng.standard_normal((3, 4, 64)).astype(np.float32)
    plan = ck.plan_decode(pages, table, lens, 4, split_tokens=32)
    want = np.empty_like(q)
    plan.run(q, want)
    return plan, q, want


def stress(problem, workers, drivers, count, seed):
    """(right, failed, cancelled) of ``count`` submissions per driver; raises when a result is wrong or a wait hangs."""
    plan, q, want = problem
    counts, trouble = [0, 0, 0], []
    lock = threading.Lock()
    with ck.WorkerPool(workers, cpus=ck.topology.read().allowed) as pool:

        def drive(number):
            rng, flying = random.Random(seed * 100 + number), []
            try:
                for i in range(count):
                    out = np.full_like(want, np.nan)
                    fault = "raise" if rng.random() < 0.03 else None
                    job = pool.submit(plan, q, out, priority=rng.randrange(2), fault=fault)
                    flying.append((job, out, fault, rng.random() < 0.05 and job.cancel()))
                    if len(flying) > rng.randint(0, 6) or i == count - 1:
                        while flying:
                            settle(*flying.pop(rng.randrange(len(flying))))
            except BaseException as error:
                trouble.append(error)

        def settle(job, out, fault, cancelled):
            try:
                job.wait(60)
            except ck.JobCancelled:
                kind = 2
                assert cancelled
            except ck.WorkerError:
                kind = 1
                assert fault is not None
            else:
                kind = 0
                assert np.array_equal(out, want)  # bit-equal, whoever computed it
            with lock:
                counts[kind] += 1

        crew = [threading.Thread(target=drive, args=(n,)) for n in range(drivers)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(300)
        assert not any(thread.is_alive() for thread in crew), "a driver hangs"
        assert pool.backlog() == 0
    if trouble:
        raise trouble[0]
    return counts


@pytest.mark.filterwarnings("ignore:num_workers")  # more workers than cpus on purpose
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_pool_under_stress_with_errors_and_cancellations(problem, workers):
    right, failed, cancelled = stress(problem, workers, drivers=3, count=300, seed=workers)
    assert right + failed + cancelled == 900 and right > 700 and failed > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:num_workers")
@pytest.mark.parametrize("workers", range(1, 9))
def test_ten_thousand_submissions(problem, workers):
    counts = stress(problem, workers, drivers=4, count=2500, seed=workers)
    print(f"{workers} workers: {counts[0]} right, {counts[1]} failed, {counts[2]} cancelled")
    assert sum(counts) == 10_000


# -- orderings -------------------------------------------------------------------------------------------------------


def function(ir, name):
    return re.search(rf"define [^\n]*@{name}\(.*?\n}}\n", ir, re.S)[0].splitlines()


@pytest.fixture(scope="module", params=[True, False], ids=["x86", "other"])
def worker_ir(request):
    return build_worker(request.param)


def test_no_shared_word_is_ordered_less_than_its_use_needs(worker_ir):
    """On x86 a missing fence would not show in any run, so the IR is read instead."""
    atomics = [line for line in worker_ir.splitlines() if " atomic" in line or "cmpxchg" in line or "atomicrmw" in line]
    assert len(atomics) > 15
    for line in atomics:
        if "load atomic" in line:
            assert re.search(r"(acquire|seq_cst), align 8", line), line
        elif "store atomic" in line:
            assert re.search(r"(release|seq_cst), align 8", line), line
        else:
            assert "seq_cst" in line, line
    assert "monotonic" not in worker_ir and "unordered" not in worker_ir


def test_a_push_publishes_the_job_before_it_rings(worker_ir):
    """Ring slot, then the claim words, then the tail (release), then the unlock, then the bell (seq_cst)."""
    lines = function(worker_ir, "push")
    at = [i for i, line in enumerate(lines) if "store atomic" in line]
    slot = next(i for i, line in enumerate(lines) if re.match(r"\s*store ptr", line))
    bell = next(i for i, line in enumerate(lines) if "atomicrmw add" in line)
    sleepers = max(i for i, line in enumerate(lines) if "load atomic" in line)
    assert len(at) == MAX_NODES + 2 and slot < at[0] and at == sorted(at) and at[-1] < bell < sleepers
    assert "seq_cst" in lines[bell] and "seq_cst" in lines[sleepers]  # or a sleeper could be missed


def test_a_job_is_done_only_after_its_last_chunk(worker_ir):
    """END_NS is stored before DONE, DONE is seq_cst, and only the worker that took the count to zero stores it."""
    lines = function(worker_ir, "worker")
    done = next(i for i, line in enumerate(lines) if "store atomic" in line and "seq_cst" in line)
    end = max(i for i, line in enumerate(lines[:done]) if "store atomic" in line)
    last = max(i for i, line in enumerate(lines[:done]) if "atomicrmw add" in line and "i64 -1" in line)
    assert last < end < done
    assert any("icmp eq" in line for line in lines[last:end])


def test_the_merge_of_a_split_row_acquires_what_its_other_parts_released():
    from cpu_kernels.codegen.decode import build_decode

    ir = build_decode(Layout("fp32", 64, 16), "portable", 2)
    counters = [line for line in ir.splitlines() if "atomicrmw" in line]
    assert counters and all("acq_rel" in line or "seq_cst" in line for line in counters)


def test_the_fences_survive_to_the_machine_code():
    assembly = jit.assembly(build_worker(True), jit.Target("x86-64"))
    assert re.search(r"lock\s+(xadd|add|inc|dec|cmpxchg)", assembly.replace("\t", " "))
    assert "xchg" in assembly  # a seq_cst store
