"""A CUDA runtime without CUDA: streams are queues, and what is on them really runs, late.

With ``threads`` each stream has a worker. Without, whoever queries an event lets a random stream take random steps, so
that a seed decides the order in which streams advance, as far as waits and records allow any choice.

``forget`` breaks the runtime on purpose: ``waits`` makes waits do nothing, so that a test can show that its check sees
the damage, ``words`` does so with waits for words; ``host calls`` makes every host call fail.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections import deque
from contextlib import nullcontext

GIB = 1 << 30
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def word_at(address):
    return ctypes.c_uint32.from_address(address)


class Mark:
    """Where an event was recorded: a wait is for the latest one there was when it was asked for."""

    def __init__(self):
        self.passed = threading.Event()
        self.gpu_ns = 0


class FakeEvent:
    def __init__(self, timing):
        self.timing = timing
        self.mark = None


class FakeStream:
    def __init__(self, runtime, number):
        self.runtime, self.number = runtime, number
        self.items = deque()
        if runtime.threads:
            self.inbox = queue.SimpleQueue()
            self.thread = threading.Thread(target=self._work, name=f"fake stream {number}", daemon=True)
            self.thread.start()

    def put(self, kind, *what):
        if self.runtime.threads:
            self.inbox.put((kind, *what))
        else:
            self.items.append((kind, *what))

    def runnable(self):
        return bool(self.items) and self.may_pass(self.items[0])

    @staticmethod
    def may_pass(item):
        if item[0] == "wait":
            return item[1].passed.is_set()
        return item[0] != "wait_word" or (word_at(item[1]).value - item[2]) % 2**32 < 2**31

    def step(self):
        self.serve(*self.items.popleft())

    def serve(self, kind, *what):
        if kind == "run":
            what[0]()
        elif kind == "record":
            what[0].gpu_ns = self.runtime.gpu_now()
            what[0].passed.set()
        elif kind == "write_word":
            word_at(what[0]).value = what[1]
            self.runtime.rings += 1
        elif kind == "call":
            _CALL(what[0])(what[1])
            self.runtime.host_calls += what[1] != 0  # a probe passes nothing

    def _work(self):
        while (item := self.inbox.get()) is not None:
            while not self.may_pass(item) and not self.runtime.closed:
                time.sleep(0.0001)
            if not self.runtime.closed:
                self.serve(*item)


class FakeCuda:
    gpu_name = "Fake GPU"
    kind = "emulated"
    torch_device = "cpu"

    def __init__(
        self,
        seed=0,
        *,
        threads=False,
        host_call=True,
        pins=True,
        free=GIB,
        forget=(),
        offset_ns=10**12,
        drift=0.0,
        words=False,
    ):
        self.threads, self.pins, self.free, self.forget = threads, pins, free, forget
        self.offset_ns, self.drift = offset_ns, drift
        self.host_calls = self.rings = 0
        self.words = words  # streams wait for words of memory, and write them
        self.held = 0  # bytes of tensors "on the card"
        self.deaf = set()  # streams whose waits do nothing
        self.closed = False
        self.failure = None  # raised by every query, as a GPU does after a fault
        self.pinned = {}
        self.streams = []
        self.started_ns = time.perf_counter_ns()
        self._host_call = host_call
        self._draw = random.Random(seed)

    def close(self):
        self.closed = True
        for stream in self.streams if self.threads else ():
            stream.inbox.put(None)
            stream.thread.join(5)

    def gpu_now(self):
        return self.offset_ns + round((time.perf_counter_ns() - self.started_ns) * (1 + self.drift))

    # -- the protocol ------------------------------------------------------------------------------------------------

    def open_stream(self):
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    def on(self, stream):
        return nullcontext()

    def enqueue(self, stream, run):
        stream.put("run", run)

    def event(self, timing=True):
        return FakeEvent(timing)

    def record(self, event, stream):
        if self.failure is not None:
            raise self.failure
        assert event.mark is None or not event.timing and event.mark.passed.is_set(), "somebody still asks for it"
        event.mark = Mark()
        stream.put("record", event.mark)

    def wait(self, stream, event):
        assert event.mark is not None, "waiting for an event that was never recorded does nothing on a real stream"
        if "waits" not in self.forget and stream not in self.deaf:
            stream.put("wait", event.mark)

    def follow(self, stream, earlier):
        event = self.event(timing=False)
        self.record(event, earlier)
        self.wait(stream, event)

    def query(self, event):
        if self.failure is not None:
            raise self.failure
        if not self.threads:
            self.advance(self._draw.choice((0, 1, 1, 2, 4)))
        return event.mark.passed.is_set()

    def advance(self, steps):
        for _ in range(steps):
            runnable = [s for s in self.streams if s.runnable()]
            if not runnable:
                return
            self._draw.choice(runnable).step()

    def elapsed_ns(self, first, second):
        first, second = first.mark, second.mark
        assert first.passed.is_set() and second.passed.is_set()
        return second.gpu_ns - first.gpu_ns

    def why_no_host_call(self):
        return None if self._host_call else "this fake has none"

    def host_call(self, stream, function, argument):
        if "host calls" in self.forget:
            raise RuntimeError("the host call was refused with CUDA error 801")
        stream.put("call", function, argument)

    def why_no_words(self):
        return None if self.words else "this fake has no words"

    def _reach(self, address):
        assert any(a <= address < a + n for a, n in self.pinned.items()), "a card reaches page-locked memory only"

    def wait_word(self, stream, address, value):
        self._reach(address)
        if "words" not in self.forget:
            stream.put("wait_word", address, value)

    def write_word(self, stream, address, value):
        self._reach(address)
        stream.put("write_word", address, value)

    def memory(self):
        return self.free, self.free

    def allocated(self):
        return self.held

    def pin(self, address, num_bytes):
        if not self.pins:
            raise RuntimeError("out of lockable memory")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address):
        del self.pinned[address]

    def synchronize(self):
        pass

    def capture(self, stream, runs):
        for run in runs:
            run()
        return list(runs)
