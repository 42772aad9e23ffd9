"""The worker pool: results, order, priorities, many drivers, bounded waits, errors, closing."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import memory
from cpu_kernels.codegen.fields import JOB_WORDS, Ctl, Item
from cpu_kernels.pool import MAX_JOBS

pytestmark = pytest.mark.filterwarnings("ignore:num_workers 2 is more than the")  # where one cpu is left


@pytest.fixture
def one() -> Any:
    """A pool of one worker."""
    with ck.WorkerPool(1) as pool:
        yield pool


def test_a_job_gives_what_run_gives(problem: Any) -> None:
    p = problem([577, 0, 33, 1, 64], num_layers=2)
    want = p.run(split_tokens=64)
    plan = p.plan(split_tokens=64)
    for workers in (1, 2):
        with ck.WorkerPool(workers) as pool:
            assert pool.num_workers == workers
            out, lse = np.full_like(p.out, np.nan), np.full_like(p.lse, np.nan)
            job = pool.submit(plan, p.q, out, lse, layer=1)
            job.wait(10)
            assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
            assert job.done() and job.error is None and pool.backlog() == 0


def test_arrays_that_were_checked_once_serve_many_jobs(problem: Any, one: Any) -> None:
    p = problem([577, 33], num_layers=2)
    plan, want = p.plan(), p.run()
    given = plan.hand(p.q, p.out, p.lse)
    for _ in range(2):
        p.out.fill(np.nan)
        one.submit(plan, given, layer=1).wait(10)
        assert np.array_equal(p.out, want[0]) and np.array_equal(p.lse, want[1])
    with pytest.raises(ValueError, match="q has shape"):
        one.submit(problem([20]).plan(), given)


def test_times_are_of_the_clock_of_perf_counter(problem: Any, one: Any) -> None:
    p = problem([300])
    before = time.perf_counter_ns()
    job = one.submit(p.plan(), p.q, p.out)
    job.wait(10)
    assert before <= job.start_ns <= job.end_ns <= time.perf_counter_ns()


def test_submit_appends_like_run(problem: Any, one: Any) -> None:
    p = problem([40, 97], poison=False)
    new = np.random.default_rng(0).standard_normal((2, 2, 2, 64)).astype(np.float32)
    one.submit(p.plan(), p.q, p.out, p.lse, k_new=new[0], v_new=new[1]).wait(10)
    k, v = ck.unpack(p.pages, 0, np.arange(p.pages.num_pages))
    want, _ = ck.reference.decode_reference(p.q, k, v, p.table, p.lens)
    assert np.abs(p.out - want).max() < 2e-2
    slot = int(p.table[0, 1]) * 32 + 7
    assert np.abs(k[slot // 32, :, slot % 32] - new[0, 0]).max() < 0.02


def test_jobs_run_in_order_and_waited_ones_before_skipped_ones(problem: Any, one: Any) -> None:
    p = problem([20])
    plan = p.plan()
    gate = one.submit(plan, p.q, p.out.copy(), fault="hang")
    late = [one.submit(plan, p.q, p.out.copy(), priority=1) for _ in range(4)]
    early = [one.submit(plan, p.q, p.out.copy(), priority=0) for _ in range(4)]
    assert one.backlog() == 9
    one.release_faults()
    for job in [*early, *late]:
        job.wait(10)
    ends = [job.end_ns for job in (gate, *early, *late)]
    assert ends == sorted(ends)


def test_several_drivers_and_plans_at_once(problem: Any) -> None:
    cases = [problem([50 * i + 1, 7], seed=i, dtype=d) for i, d in enumerate(("bf16", "fp32", "int8", "bf16"))]
    wants = [p.run()[0] for p in cases]
    failures: list[str] = []
    with ck.WorkerPool(2) as pool:

        def drive(p: Any, want: np.ndarray) -> None:
            plan = p.plan()
            for _ in range(50):
                outs = [np.full_like(p.out, np.nan) for _ in range(3)]
                jobs = [pool.submit(plan, p.q, out, priority=i % 2) for i, out in enumerate(outs)]
                for job, out in zip(jobs, outs, strict=True):
                    job.wait(30)
                    if not np.array_equal(out, want):
                        failures.append("wrong result")

        crew = [threading.Thread(target=drive, args=pair) for pair in zip(cases, wants, strict=True)]
        for t in crew:
            t.start()
        for t in crew:
            t.join(60)
        assert not failures and not any(t.is_alive() for t in crew)


def test_two_pools_do_not_see_each_other(problem: Any) -> None:
    p = problem([20])
    with ck.WorkerPool(1) as a, ck.WorkerPool(1) as b:
        hung = a.submit(p.plan(), p.q, p.out.copy(), fault="hang")
        b.release_faults()
        b.submit(p.plan(), p.q, p.out.copy()).wait(10)
        assert not hung.done() and a.backlog() == 1 and b.backlog() == 0
        a.release_faults()


def test_a_failing_job_raises_in_every_waiter_and_the_next_one_works(problem: Any, one: Any) -> None:
    p = problem([20])
    bad = one.submit(p.plan(), p.q, p.out.copy(), fault="raise")
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            bad.wait(10)
        except ck.WorkerError as error:
            seen.append(error)

    crew = [threading.Thread(target=wait) for _ in range(3)]
    for t in crew:
        t.start()
    for t in crew:
        t.join(20)
    assert len(seen) == 3 and bad.done() and "injected fault 'raise'" in str(bad.error)
    one.submit(p.plan(), p.q, p.out).wait(10)


def test_a_hung_job_times_out_and_can_be_released(problem: Any, one: Any) -> None:
    p = problem([20])
    job = one.submit(p.plan(), p.q, p.out, fault="hang")
    with pytest.raises(TimeoutError, match=r"did not end within 0.05 s"):
        job.wait(0.05)
    assert not job.done() and job.error is None and job.start_ns is None
    one.release_faults()
    with pytest.raises(ck.WorkerError, match="hang"):
        job.wait(10)


def test_cancel_discards_the_result(problem: Any, one: Any) -> None:
    p = problem([20])
    gate = one.submit(p.plan(), p.q, p.out.copy(), fault="hang")
    out = np.full_like(p.out, np.nan)
    job = one.submit(p.plan(), p.q, out)
    assert job.cancel()
    one.release_faults()
    with pytest.raises(ck.JobCancelled):
        job.wait(10)
    assert job.done() and np.isnan(out).all() and not job.cancel()
    assert gate.done() and isinstance(gate.error, ck.WorkerError)


def test_a_cancelled_split_leaves_no_trace_in_the_next_run(problem: Any, one: Any) -> None:
    p = problem([500])
    plan = p.plan(split_tokens=32)
    want, _ = p.run(split_tokens=32)
    gate = one.submit(plan, p.q, p.out.copy(), fault="hang")
    one.submit(plan, p.q, p.out.copy()).cancel()
    gate.cancel()
    one.release_faults()
    for _ in range(3):
        out = np.full_like(p.out, np.nan)
        one.submit(plan, p.q, out).wait(10)
        assert np.array_equal(out, want)


def test_close_is_bounded_fails_what_is_left_and_may_be_called_again(problem: Any) -> None:
    p = problem([20])
    pool = ck.WorkerPool(1)
    hung = pool.submit(p.plan(), p.q, p.out.copy(), fault="hang")
    left = pool.submit(p.plan(), p.q, p.out.copy())
    waiter_saw: list[BaseException] = []

    def wait() -> None:
        try:
            left.wait(20)
        except ck.WorkerError as error:
            waiter_saw.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.close(10)
    thread.join(10)
    assert hung.done() and left.done() and isinstance(hung.error, ck.WorkerError)
    assert len(waiter_saw) == 1 and isinstance(waiter_saw[0], ck.PoolClosed)
    pool.close()
    with pytest.raises(ck.PoolClosed, match="the pool is closed"):
        pool.submit(p.plan(), p.q, p.out)


def test_a_close_without_patience_still_fails_every_job(problem: Any) -> None:
    """The worker may or may not have stopped at once; nobody is left waiting, and it does stop."""
    p = problem([20])
    pool = ck.WorkerPool(1)
    jobs = [pool.submit(p.plan(), p.q, p.out.copy(), fault="hang") for _ in range(3)]
    try:
        pool.close(0.0)
    except TimeoutError as error:
        assert "a worker did not stop within 0.0 s" in str(error)
    assert all(job.done() and isinstance(job.error, ck.WorkerError) for job in jobs)
    for thread in pool._shared.threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_job_keeps_its_buffers_only_while_it_needs_them(problem: Any, one: Any) -> None:
    p = problem([20])

    class Tracked(np.ndarray):
        pass

    out = np.full_like(p.out, np.nan).view(Tracked)
    alive = weakref.ref(out)
    gate = one.submit(p.plan(), p.q, p.out.copy(), fault="hang")
    job = one.submit(p.plan(), p.q, out)
    del out
    gc.collect()
    assert alive() is not None
    one.release_faults()
    job.wait(10)
    gc.collect()
    assert alive() is None and gate.done()


def test_unwatched_jobs_let_go_of_their_buffers_at_the_next_submit(problem: Any, one: Any) -> None:
    p = problem([20])
    job = one.submit(p.plan(), p.q, p.out.copy())
    one.submit(p.plan(), p.q, p.out.copy()).wait(10)
    one.submit(p.plan(), p.q, p.out.copy()).wait(10)
    assert job._alive is None and job.end_ns is not None


def test_too_many_jobs_are_refused_not_blocked(problem: Any, one: Any) -> None:
    p = problem([1])
    plan = p.plan()
    jobs = [one.submit(plan, p.q, p.out.copy(), fault="hang")]
    jobs += [one.submit(plan, p.q, p.out) for _ in range(MAX_JOBS - 1)]
    with pytest.raises(RuntimeError, match=f"{MAX_JOBS} jobs are in flight already"):
        one.submit(plan, p.q, p.out)
    one.release_faults()
    jobs[-1].wait(20)
    for _ in range(3 * MAX_JOBS):  # the ring goes round
        one.submit(plan, p.q, p.out).wait(20)


def test_refused_submit_costs_no_descriptor(problem: Any, one: Any) -> None:
    p = problem([1])
    plan = p.plan()
    for _ in range(MAX_JOBS + 5):
        with pytest.raises(ValueError, match="q has shape"):
            one.submit(plan, p.q[:, :1], p.out)
    one.submit(plan, p.q, p.out).wait(10)
    with pytest.raises(ValueError, match="priority is 2"):
        one.submit(plan, p.q, p.out, priority=2)
    with pytest.raises(ValueError, match="fault is 'burn'"):
        one.submit(plan, p.q, p.out, fault="burn")


def test_other_back_ends_are_refused(problem: Any, one: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    p = problem([1])
    with pytest.raises(ValueError, match="runs native plans and kernels in numba only; this plan has backend 'torch'"):
        one.submit(p.plan(backend="torch"), p.q, p.out)


def test_a_prepared_job_can_be_pushed_natively(problem: Any, one: Any) -> None:
    """What a stream callback does: one C call with the descriptor's address, no interpreter."""
    p = problem([50])
    want, _ = p.run()
    out = np.full_like(p.out, np.nan)
    job = one.prepare(p.plan(), p.q, out)
    time.sleep(0.02)
    assert not job.done() and np.isnan(out).all()
    push = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(one.push_address)
    thread = threading.Thread(target=push, args=(one.descriptor(job),))
    thread.start()
    thread.join(10)
    job.wait(10)
    assert np.array_equal(out, want)


def test_sleeping_workers_are_woken(problem: Any) -> None:
    p = problem([20])
    with ck.WorkerPool(1, spin_us=0) as pool:
        for _ in range(30):
            time.sleep(0.001)  # long past the spin
            pool.submit(p.plan(), p.q, p.out).wait(10)


def test_workers_are_pinned(problem: Any) -> None:
    allowed = ck.topology.read().allowed
    before = set(os.listdir("/proc/self/task"))
    with ck.WorkerPool(cpus=allowed) as pool:
        p = problem([20])
        pool.submit(p.plan(), p.q, p.out).wait(10)
        masks = {tuple(os.sched_getaffinity(int(t))) for t in set(os.listdir("/proc/self/task")) - before}
        assert masks == {(cpu,) for cpu in allowed} and pool.cpus == allowed
    with pytest.raises(ValueError, match="must be CPUs of the affinity mask"):
        ck.WorkerPool(cpus=[9999])


def test_more_workers_than_cpus_is_obeyed_with_a_warning(problem: Any) -> None:
    p = problem([500], page=16)
    want, _ = p.run(split_tokens=16)
    with pytest.warns(UserWarning, match="num_workers 64 is more than the"), ck.WorkerPool(64) as pool:
        assert pool.num_workers == 64
        out = np.full_like(p.out, np.nan)
        pool.submit(p.plan(split_tokens=16), p.q, out).wait(30)
    assert np.array_equal(out, want)


def test_an_unclosed_pool_does_not_hold_up_the_end_of_the_process() -> None:
    code = (
        "import numpy as np, cpu_kernels as ck\n"
        "pages = ck.KVPages(2, 1, 64, 32, huge_pages=False)\n"
        "pool = ck.WorkerPool(1)\n"
        "q = np.ones((1, 1, 64), np.float32)\n"
        "pool.submit(ck.plan_decode(pages, [[0]], [5], 1), q, q.copy(), fault='hang')\n"
    )
    root = Path(ck.__file__).parents[1]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_forgotten_pool_ends_its_threads(problem: Any) -> None:
    pool = ck.WorkerPool(1)
    threads = pool._shared.threads
    del pool
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()


IN_A_PROCESS = """
import os, sys, time, warnings
import numpy as np
import cpu_kernels as ck
from cpu_kernels.job import PoolClosed
pages = ck.KVPages(2, 1, 64, 32, huge_pages=False)
plan = ck.plan_decode(pages, [[0]], [5], 1)
q = np.ones((1, 1, 64), np.float32)
"""


def in_a_process(code: str) -> str:
    root = Path(ck.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS + code], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_pinning_is_refused_workers_run_unpinned_with_one_warning() -> None:
    code = """
def deny(*_): raise PermissionError(1, "Operation not permitted")
os.sched_setaffinity = deny
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        with ck.WorkerPool(1) as pool:
            pool.submit(plan, q, q.copy()).wait(60)
    ck.KVPages(70000, 1, 64, 32, huge_pages=False)  # large enough to be touched by pinned threads
print([str(w.message) for w in seen if "choose their CPUs" in str(w.message)])
"""
    assert in_a_process(code).count("workers run unpinned") == 1


def test_a_pool_that_came_through_a_fork_ends_its_jobs_and_refuses_new_ones() -> None:
    code = """
warnings.simplefilter("ignore")  # newer Pythons warn of forks with threads
pool = ck.WorkerPool(1)
job = pool.submit(plan, q, q.copy(), fault="hang")
child = os.fork()
if not child:
    limit = time.monotonic() + 60
    while not job.done() and time.monotonic() < limit:  # a poll loop ends
        pass
    said = [type(job.error).__name__]
    for call in (lambda: pool.submit(plan, q, q.copy()), lambda: job.wait(1)):
        try:
            call()
        except PoolClosed as error:
            said.append("refused" if "no living worker" in str(error) else "ended")
    pool.close()
    with ck.WorkerPool(1) as own:
        own.submit(plan, q, q.copy()).wait(60)
    print(*said, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(job.done())
pool.release_faults()
while not job.done():
    pass
pool.close()
"""
    assert in_a_process(code).split() == ["PoolClosed", "refused", "ended", "False"]


def test_a_wait_ends_when_the_workers_are_gone(problem: Any) -> None:
    p = problem([40])
    pool = ck.WorkerPool(1)
    pool._shared.stop(10)  # as if the threads had died
    with pytest.raises(ck.PoolClosed, match="no living worker"):
        pool.submit(p.plan(), p.q, p.out)
    pool._shared.living = lambda: True  # type: ignore[method-assign]
    job = pool.submit(p.plan(), p.q, p.out)
    del pool._shared.living
    with pytest.raises(ck.PoolClosed):
        job.wait(60)
    pool.close()


def test_no_more_threads_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def second_fails(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"), pytest.warns(UserWarning):
        ck.WorkerPool(64)
    started[0].join(10)
    assert not started[0].is_alive()


def test_flush_to_zero_in_the_caller_changes_no_bit(problem: Any) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    tiny = (rng.standard_normal((64, 2, 64)) * 1e-39).astype(np.float32)
    results = []
    try:
        for flush in (False, True):
            p = problem([64], heads=2, dtype="fp32", poison=False)
            torch.set_flush_denormal(flush)
            slots = p.table[0].repeat(32) * 32 + np.tile(np.arange(32), 2)
            ck.append_kv(p.pages, 0, tiny, tiny, slots)
            p.plan().run(p.q, p.out, p.lse)
            by_run = p.out.copy()
            with ck.WorkerPool(1) as pool:
                pool.submit(p.plan(), p.q, p.out).wait(60)
            results += [by_run, p.out.copy()]
            half = np.zeros((64, 2, 64), np.float32)
            ck.gather_kv(p.pages, 0, p.table[0], 64, half, half.copy())
            results.append(half[..., :64].reshape(1, -1, 64)[:, :4])
    finally:
        torch.set_flush_denormal(False)
    assert np.abs(results[0]).max() > 0
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[3])
    assert np.array_equal(results[3], results[4]) and np.array_equal(results[2], results[5])


def two_nodes() -> ck.topology.Topology:
    """This machine, told to be two NUMA nodes with half of its CPUs each."""
    here = ck.topology.read()
    half = len(here.allowed) // 2
    return dataclasses.replace(here, numa=((0, here.allowed[:half]), (1, here.allowed[half:])))


@pytest.mark.skipif(len(ck.topology.read().allowed) < 2, reason="two fake nodes need two CPUs")
def test_chunks_are_claimed_first_by_workers_of_their_pages_node(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of both nodes in turn: each node's rows are one range of chunks, and all are computed, by one worker too."""
    fake = two_nodes()
    monkeypatch.setattr(ck.topology, "read", lambda *_: fake)
    p = problem([700, 64, 0, 700, 33, 700] * 4, heads=2, group=2)
    want, _ = p.run(split_tokens=256)
    p.pages.page_nodes = np.zeros(p.pages.num_pages, np.int64)
    for row in range(0, len(p.lens), 2):
        p.pages.page_nodes[p.table[row]] = 1
    native = p.plan(split_tokens=256).native
    node = np.where(native.items[:, Item.FIRST] < native.items[:, Item.LAST], native.items[:, Item.SEQ] % 2 == 0, 0)
    assert (np.diff(node) >= 0).all() and 0 < native.chunk_ends[0] < native.chunk_ends[1] == native.num_chunks
    units = int((node == 0).sum()) * native.units_per_item
    assert native.edges[native.chunk_ends[0]] == units and native.edges[-1] == native.num_units
    for cpus in (fake.allowed, fake.allowed[:1], fake.allowed[-1:]):
        with ck.WorkerPool(cpus=cpus) as pool:
            for _ in range(20):
                out = np.full_like(p.out, np.nan)
                pool.submit(p.plan(split_tokens=256), p.q, out).wait(60)
                assert np.array_equal(out, want)


@pytest.mark.skipif(len(ck.topology.read().allowed) < 2, reason="two fake nodes need two CPUs")
def test_a_worker_begins_with_its_own_node(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker belongs to node 1 and hangs in a job's first chunk of all; node 0's word is untouched by then."""
    fake = two_nodes()
    monkeypatch.setattr(ck.topology, "read", lambda *_: fake)
    p = problem([64] * 40, heads=2, group=2)
    p.pages.page_nodes = np.arange(p.pages.num_pages, dtype=np.int64) % 2
    with ck.WorkerPool(cpus=fake.allowed[-1:]) as pool:
        plan = p.plan()
        job = pool.submit(plan, p.q, p.out, fault="hang")  # holds in chunk 0, the first of node 0
        at, limit = job._index * JOB_WORDS, time.monotonic() + 60
        while pool._shared.words[at] & 0xFFFFFFFF != 1 and time.monotonic() < limit:
            time.sleep(0.001)
        mine = pool._shared.words[at + 1]
        assert mine & 0xFFFFFFFF > mine >> 32  # its own chunks were all claimed before
        pool.release_faults()


def test_pages_of_every_layer_are_dealt_to_the_nodes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(ck.topology.read(), numa=((0, (0,)), (3, (1,))))
    nodes = ck.pages._nodes_of_pages(here, (0, 1), 5)
    assert nodes is not None and nodes.tolist() == [0, 0, 0, 1, 1]
    assert ck.pages._nodes_of_pages(here, (0, 0), 5) is None
    buffer = np.full(1000, 7, np.uint8)
    monkeypatch.setattr(memory, "_TOUCH_CHUNK", 1)
    memory._touch(buffer, ck.topology.read().allowed, 3)
    assert not buffer.any()


def ring(bell: tuple[int, int]) -> None:
    """Write the word as a device does: from outside, 32 bits, waking nobody."""
    ctypes.c_uint32.from_address(bell[0]).value = bell[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_armed_jobs_start_when_the_bell_rings_awake_or_asleep(problem: Any, workers: int) -> None:
    """Jobs start by the number that was written, never before; one number may stand for several; it goes round."""
    p = problem([577, 33])
    want, _ = p.run()
    plan = p.plan()
    with ck.WorkerPool(workers, spin_us=100.0) as pool:
        for word in (Ctl.BELL, Ctl.ARMED, Ctl.RUNG):  # in this order the bell is never ahead of what has been rung
            pool._shared.control[word] = (1 << 32) - 3
        pool._armed = (1 << 32) - 3
        for turn in range(6):
            time.sleep(0.002 * (turn % 2))  # the workers sleep, or do not
            outs = [np.full_like(p.out, np.nan) for _ in range(2)]
            jobs = [pool.prepare(plan, p.q, out) for out in outs]
            bells = [pool.arm(job) for job in jobs]
            if turn % 3:
                time.sleep(0.002)
                assert not any(job.done() for job in jobs)  # longer than a worker spins, and it is awake still
                ring(bells[0])
                jobs[0].wait(10)
                assert not jobs[1].done()
            ring(bells[1])
            for job, out in zip(jobs, outs, strict=True):
                job.wait(10)
                assert np.array_equal(out, want)
                address, number = pool.done_word(job)
                assert ctypes.c_uint32.from_address(address).value == number
        at, size = pool.memory()
        assert at % 4096 == 0 and all(at <= word < at + size for word in (bells[0][0], address))


def test_a_job_that_is_given_up_ends_with_an_error_and_keeps_what_its_worker_uses(problem: Any) -> None:
    p = problem([33])
    plan = p.plan()
    with ck.WorkerPool(1) as pool:
        job = pool.submit(plan, p.q, p.out, fault="hang")
        address, number = pool.done_word(job)
        assert ctypes.c_uint32.from_address(address).value != number
        pool.give_up(job)
        assert ctypes.c_uint32.from_address(address).value == number and "did not end in time" in str(job.error)
        assert job._index not in pool._free
        pool.release_faults()  # the worker comes back, and the next job is none of its business
        out = np.full_like(p.out, np.nan)
        other = pool.submit(plan, p.q, out)
        other.wait(10)
        assert other._index != job._index and np.array_equal(out, p.run()[0])


@pytest.mark.parametrize("timeout", [None, "1", float("nan")])
def test_a_wait_for_no_number_of_seconds_is_refused(problem: Any, one: Any, timeout: Any) -> None:
    p = problem([33])
    job = one.submit(p.plan(), p.q, p.out, p.lse)
    with pytest.raises(TypeError, match="timeout_s is .*, expected a number of seconds"):
        job.wait(timeout)
    job.wait(1e300)
    job.wait(-1)  # it has ended


def test_what_is_no_plan_and_no_sequence_of_cpus_is_refused(problem: Any, one: Any) -> None:
    p = problem([33])
    with pytest.raises(TypeError, match="plan must be a DecodePlan, got NoneType"):
        one.submit(None, p.q, p.out, p.lse)
    with pytest.raises(TypeError, match="cpus is 0, expected a sequence of CPU numbers"):
        ck.WorkerPool(cpus=0)
