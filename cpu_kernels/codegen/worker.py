"""The native side of the worker pool: the worker loop and the push of a job.

A worker never touches the interpreter. It claims chunks with one atomic add, waited jobs before skipped ones::

    push    [desc -> ring] SIGNAL+1 ... wake sleepers
    worker         scan  claim chunk, run, claim chunk, run, ..., last chunk done: END_NS, DONE = SEQUENCE, wake waiters
    poll                                                          DONE >= SEQUENCE ?  (one load from Python)

A job may also be armed: a worker pushes it when a device (a GPU's stream, which can write memory and wake nobody) has
rung the bell often enough. Workers stay awake while armed jobs are left::

    arm     [desc -> armed] ARMED+1, SIGNAL+1, wake sleepers
    device                                  ... BELL = n
    worker              idle: BELL, RUNG differ: RUNG+1, push

Descriptors live in a slab that is never freed while workers run, and a descriptor is reused only after its job ended.
A worker that stalled with an old descriptor in hand therefore does no harm: a claim word holds the end of its chunks
and the next chunk together, so its add either fails (nothing left) or claims a chunk of the job that is there now.

The chunks of a job are ordered by the NUMA node that holds their pages, with a claim word for each node. A worker tries
the word of its own node first and then those of the others, so nobody idles while there is work.
"""

from __future__ import annotations

from contextlib import nullcontext

from cpu_kernels.codegen.emit import Function, Module
from cpu_kernels.codegen.fields import MAX_NODES, RING_SLOTS, Ctl, Fault, Job
from cpu_kernels.codegen.values import I32, I64, PTR, Value, Var

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
CLOCK_MONOTONIC = 1
EVERYBODY = 0x7FFFFFFF
PAUSES_PER_CLOCK = 16


class Atomics:
    """Atomic loads and stores, the clock and the futex, emitted into one function."""

    def __init__(self, f: Function, ctl: Value) -> None:
        self.f, self.ctl = f, ctl
        self._time = f.buffer(16)

    def word(self, base: Value, index: int) -> Value:
        return base.at(index * 8) if index else base

    def get(self, base: Value, index: int, order: str = "acquire") -> Value:
        return self.f.let(I64, f"load atomic i64, ptr {self.word(base, index).name} {order}, align 8")

    def put(self, base: Value, index: int, x: Value | int, order: str = "release") -> None:
        value = self.f.as_value(I64, x)
        self.f.do(f"store atomic i64 {value.name}, ptr {self.word(base, index).name} {order}, align 8")

    def add(self, base: Value, index: int, x: int) -> Value:
        return self.f.let(I64, f"atomicrmw add ptr {self.word(base, index).name}, i64 {x} seq_cst")

    def replace(self, base: Value, index: int, old: Value | int, new: Value | int) -> Value:
        """Compare and swap; returns whether it happened."""
        a, b = self.f.as_value(I64, old), self.f.as_value(I64, new)
        where = self.word(base, index).name
        pair = self.f.let("{ i64, i1 }", f"cmpxchg ptr {where}, i64 {a.name}, i64 {b.name} seq_cst seq_cst")
        return self.f.let("i1", f"extractvalue {{ i64, i1 }} {pair.name}, 1")

    def now(self) -> Value:
        """CLOCK_MONOTONIC in nanoseconds."""
        f = self.f
        clock = f.load(PTR, self.word(self.ctl, Ctl.CLOCK))
        f.do(f"call i32 {clock.name}(i32 {CLOCK_MONOTONIC}, ptr {self._time.name})")
        return f.load(I64, self._time) * 1_000_000_000 + f.load(I64, self._time, 8)

    def _futex(self, address: Value, operation: int, value: Value, timeout: str) -> None:
        f = self.f
        call = f.load(PTR, self.word(self.ctl, Ctl.SYSCALL))
        number = f.load(I64, self.word(self.ctl, Ctl.FUTEX))
        args = f"i64 {number.name}, ptr {address.name}, i64 {operation}, i64 {value.name}, ptr {timeout}, i64 0, i64 0"
        f.do(f"call i64 (i64, ...) {call.name}({args})")

    def sleep_while(self, base: Value, index: int, seen: Value) -> None:
        self._futex(self.word(base, index), FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF, "null")

    def wake(self, base: Value, index: int, count: int = EVERYBODY) -> None:
        self._futex(self.word(base, index), FUTEX_WAKE_PRIVATE, self.f.const(I64, count), "null")


def relax(f: Function, x86: bool) -> None:
    """Tell the core that this is a spin loop."""
    if x86:
        f.call("void", "llvm.x86.sse2.pause")
    else:
        f.call("void", "llvm.aarch64.hint", f.const(I32, 1))  # yield


def _emit_push(module: Module, x86: bool) -> None:
    """``push(job)``: append a prepared job to its class's ring; callable from Python or from a native callback."""
    f = module.function("push", (PTR,))
    job = f.args[0]
    ctl = f.load(PTR, job, Job.POOL * 8)
    at = Atomics(f, ctl)
    with f.forever() as locked:
        with f.when(at.replace(ctl, Ctl.LOCK, 0, 1)):
            f.leave(locked)
        relax(f, x86)
    lane = f.load(I64, job, Job.PRIORITY * 8)
    tail_at = ctl.at(lane * 8 + Ctl.TAIL * 8)
    tail = at.get(tail_at, 0)
    ring = ctl.at(lane * (RING_SLOTS * 8) + (tail % RING_SLOTS) * 8 + Ctl.RING * 8)
    f.store(job, ring)
    start = f.const(I64, 0)
    for node in range(MAX_NODES):  # nothing claimed yet: from here on workers may take it
        end = f.load(I64, job, (Job.CLAIM + node) * 8) >> 32
        at.put(job, Job.CLAIM + node, (end << 32) | start)
        start = end
    at.put(tail_at, 0, tail + 1)
    at.put(ctl, Ctl.LOCK, 0)
    at.add(ctl, Ctl.SIGNAL, 1)
    with f.when(at.get(ctl, Ctl.SLEEPERS, "seq_cst").ne(0)):
        at.wake(ctl, Ctl.SIGNAL)


def _emit_arm(module: Module) -> None:
    """``arm(job)``: the next ring of the bell pushes a prepared job; for one thread at a time."""
    f = module.function("arm", (PTR,))
    job = f.args[0]
    ctl = f.load(PTR, job, Job.POOL * 8)
    at = Atomics(f, ctl)
    armed = at.get(ctl, Ctl.ARMED)
    f.store(job, _armed_at(ctl, armed))
    at.put(ctl, Ctl.ARMED, armed + 1)
    at.add(ctl, Ctl.SIGNAL, 1)
    with f.when(at.get(ctl, Ctl.SLEEPERS, "seq_cst").ne(0)):
        at.wake(ctl, Ctl.SIGNAL)


def _armed_at(ctl: Value, number: Value) -> Value:
    return ctl.at((number % RING_SLOTS) * 8 + (Ctl.RING + 2 * RING_SLOTS) * 8)


def _hear(f: Function, at: Atomics) -> None:
    """Push what the bell has rung for. RUNG is read first: the bell, read later, is never behind it."""
    ctl = at.ctl
    with f.forever() as silent:
        rung = at.get(ctl, Ctl.RUNG, "seq_cst")
        with f.when((rung & 0xFFFFFFFF).eq(at.get(ctl, Ctl.BELL, "seq_cst") & 0xFFFFFFFF)):
            f.leave(silent)
        job = f.load(PTR, _armed_at(ctl, rung))
        with f.when(at.replace(ctl, Ctl.RUNG, rung, rung + 1)):
            f.call("void", "push", job)


def _emit_worker(module: Module, x86: bool) -> None:
    """``worker(ctl, node)``: run chunks until STOP; kernels of others get the default floating-point control too."""
    f = module.function("worker", (PTR, I64))
    ctl, node = f.args
    at = Atomics(f, ctl)
    job = f.var(PTR, Value(f, PTR, "null"))
    with f.default_floats() if x86 else nullcontext(), f.forever() as stopped:
        signal = at.get(ctl, Ctl.SIGNAL, "seq_cst")
        with f.when(at.get(ctl, Ctl.STOP).ne(0)):
            f.leave(stopped)
        _hear(f, at)
        _find(f, at, job, node, x86)
        with f.when(f.let("i1", f"icmp eq ptr {job.get().name}, null")):
            _rest(f, at, signal, x86)


def _find(f: Function, at: Atomics, job: Var, node: Value, x86: bool) -> None:
    """Claim and run one chunk of the first job that has one, class 0 before class 1; leaves null in `job` if none."""
    ctl = at.ctl
    found = f.fresh("found")
    for lane in range(2):
        with f.forever() as empty:
            head = at.get(ctl, Ctl.HEAD + lane)
            with f.when(head >= at.get(ctl, Ctl.TAIL + lane)):
                f.leave(empty)
            here = f.load(PTR, ctl.at((head % RING_SLOTS) * 8 + (Ctl.RING + lane * RING_SLOTS) * 8))
            nodes = f.load(I64, ctl, Ctl.NODES * 8)
            with f.loop(0, nodes) as turn:  # what lies near first
                claim = at.add(here.at(((node + turn) % nodes) * 8), Job.CLAIM, 1)
                chunk, end = claim & 0xFFFFFFFF, claim >> 32
                with f.when(chunk < end):
                    _run_chunk(f, at, here, chunk, x86)
                    job.set(here)
                    f.leave(found)
            at.replace(ctl, Ctl.HEAD + lane, head, head + 1)
    job.set(Value(f, PTR, "null"))
    f.jump(found)
    f.label(found)


def _run_chunk(f: Function, at: Atomics, job: Value, chunk: Value, x86: bool) -> None:
    with f.when(at.get(job, Job.START_NS).eq(0)):
        at.replace(job, Job.START_NS, 0, at.now())
    with f.when(chunk.eq(0)):
        fault = f.load(I64, job, Job.FAULT * 8)
        with f.when(fault.ne(0)):
            with f.when(fault.eq(int(Fault.HANG))):
                _hang(f, at, f.load(I64, job, Job.RELEASE_SEEN * 8))
            at.put(job, Job.ERROR, fault)
    with f.when(at.get(job, Job.CANCELLED).eq(0)):
        kernel = f.load(PTR, job, Job.KERNEL * 8)
        edges = f.load(PTR, job, Job.CHUNKS * 8).at(chunk * 8)
        f.call_pointer(kernel, job, f.load(I64, edges), f.load(I64, edges, 8))
    with f.when(at.add(job, Job.REMAINING, -1).eq(1)):
        at.put(job, Job.END_NS, at.now())
        sequence = f.load(I64, job, Job.SEQUENCE * 8)
        at.put(job, Job.DONE, sequence, "seq_cst")
        with f.when(at.get(job, Job.WAITERS, "seq_cst").ne(0)):
            at.wake(job, Job.DONE)


def _hang(f: Function, at: Atomics, seen: Value) -> None:
    """Sleep until hung jobs are released: the release grows the word that is slept on, so no wake-up is lost.

    `seen` is from when the job was made, so a release between then and now counts.
    """
    with f.forever() as released:
        with f.when(at.get(at.ctl, Ctl.RELEASE).ne(seen)):
            f.leave(released)
        at.sleep_while(at.ctl, Ctl.RELEASE, seen)


def _rest(f: Function, at: Atomics, signal: Value, x86: bool) -> None:
    """Spin for SPIN_NS, and for as long as armed jobs are left, then sleep until SIGNAL changes."""
    ctl = at.ctl
    start, spin = at.now(), f.load(I64, ctl, Ctl.SPIN_NS * 8)
    with f.forever() as over:
        with f.when(at.get(ctl, Ctl.SIGNAL, "seq_cst").ne(signal)):
            f.leave(over)
        rung = at.get(ctl, Ctl.RUNG)
        with f.when((rung & 0xFFFFFFFF).ne(at.get(ctl, Ctl.BELL) & 0xFFFFFFFF)):
            f.leave(over)
        with f.when(at.get(ctl, Ctl.ARMED).eq(rung)), f.when(at.now() - start >= spin):
            at.add(ctl, Ctl.SLEEPERS, 1)
            at.sleep_while(ctl, Ctl.SIGNAL, signal)
            at.add(ctl, Ctl.SLEEPERS, -1)
            f.leave(over)
        with f.loop(0, PAUSES_PER_CLOCK):
            relax(f, x86)


def build_worker(x86: bool) -> str:
    """Return the IR of ``worker``, ``push`` and ``arm``."""
    module = Module()
    _emit_push(module, x86)
    _emit_arm(module)
    _emit_worker(module, x86)
    return module.text()
