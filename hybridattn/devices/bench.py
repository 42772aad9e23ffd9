"""What the driver of a card costs: ``python -m hybridattn.devices.bench --json``, on a machine without one.

    driver      Executor -> TorchStages -> CudaTier -> CudaDevice -> Triton's binder      all real, all timed
    card        streams, events and graphs are objects; kernels are compiled, bound and not run

The model has 32 layers and is otherwise tiny, so that what torch computes here takes about as long as a launch on a
card. CUDA's own calls (about 2 us for a launch, 6 us for a graph) come on top. Times are those that the driver's thread
has a core. Medians of 5 rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count as counting
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

import gpu_kernels.capability
from hybridattn.core.config import EngineConfig
from hybridattn.core.params import SamplingParams
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, CpuRow, Segment
from hybridattn.devices.cuda import CudaDevice
from hybridattn.executor.executor import Executor
from hybridattn.models.load import LoadedModel, load
from hybridattn.models.torch_stages import TorchStages
from hybridattn.models.weights import random_weights
from hybridattn.policies.base import DispatchView, Policy
from hybridattn.policies.fixed import GpuOnly, SyncOffload

LAYERS, PAGE, ROUNDS = 32, 32, 5
STEPS = 8  # timed in a round, behind one that warms up
TIMEOUT_NS = 60_000_000_000
_PATIENCE_NS = 2_000_000
_word = ctypes.c_uint32.from_address
_now_ns = time.thread_time_ns


class _Object:
    """A stream or an event."""


class NullRuntime:
    """A ``CudaRuntime`` on which everything has happened as soon as it is enqueued, and a captured graph does nothing.

    Attributes
    ----------
    calls : how often each of CUDA's calls would have been made, in this process
    away_ns : what CPU attention took, which is not the driver's work
    """

    gpu_name, kind, torch_device = "null", "emulated", "cpu"
    calls: Counter[str] = Counter()

    def __init__(self) -> None:
        self.pool: Any = None
        self.away_ns = 0
        self._probed: list[tuple[int, int]] = []  # address and value of a wait for a word, then of a write behind it

    def open_stream(self) -> Any:
        return _Object()

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def enqueue(self, stream: Any, run: Callable[[], None]) -> None:
        run()

    def event(self, timing: bool = True) -> Any:
        return _Object()

    def record(self, event: Any, stream: Any) -> None:
        self.calls["record"] += 1

    def wait(self, stream: Any, event: Any) -> None:
        self.calls["wait"] += 1

    def follow(self, stream: Any, earlier: Any) -> None:
        self.calls["record"] += 1
        self.calls["wait"] += 1

    def query(self, event: Any) -> bool:
        self.calls["query"] += 1
        if self._probed and _word(self._probed[0][0]).value == self._probed[0][1]:
            _word(self._probed[1][0]).value = self._probed[1][1]
            self._probed = []
        return not self._probed

    def elapsed_ns(self, first: Any, second: Any) -> int:
        self.calls["elapsed"] += 1
        return 1

    def why_no_words(self) -> str | None:
        return None

    def wait_word(self, stream: Any, address: int, value: int) -> None:
        self.calls["wait for a word"] += 1
        if self.pool is None:
            self._probed.append((address, value))

    def write_word(self, stream: Any, address: int, value: int) -> None:
        """Has a job computed before this returns: the driver never waits for it. Only the probe, when the device opens,
        finds that writes come behind waits."""
        self.calls["write of a word"] += 1
        if self.pool is None:
            self._probed.append((address, value))
            return
        began_ns = _now_ns()
        _word(address).value = value
        while self.pool.backlog():  # giving the core away would empty its caches, which a driver beside a card keeps
            if _now_ns() - began_ns > _PATIENCE_NS:
                time.sleep(0)
        self.away_ns += _now_ns() - began_ns

    def why_no_host_call(self) -> str | None:
        return "words are there"

    def host_call(self, stream: Any, function: int, argument: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def allocated(self) -> int:
        return 0

    def pin(self, address: int, num_bytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...
    def synchronize(self) -> None: ...

    def capture(self, stream: Any, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        def replay() -> None:
            self.calls["graph"] += 1

        return [replay for _ in runs]


class StubDriver:
    """Triton's driver for one sm_90: kernels are compiled and bound, and launched nowhere."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = lambda source, metadata: self._launch

    def _launch(self, *arguments: Any) -> None:
        NullRuntime.calls["kernel"] += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: the median of ``samples``, and the calls into CUDA of one unit where they are counted."""

    name: str
    value: float
    unit: str
    samples: tuple[float, ...]
    calls: dict[str, float] | None = None


class _Parts(SyncOffload):
    """All CPU rows, in so many micro-batches, join at every layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        return (view.idle_rows // self.count,) * self.count


class _Executor(Executor):
    """Keeps what the driver took for the layers of the latest step, but the last: that one samples as well."""

    device: CudaDevice
    layers_ns = 0

    def _layers(self, batch: Batch, made: Any) -> None:
        runtime: Any = self.device.runtime
        self._began_ns = _now_ns() - runtime.away_ns
        super()._layers(batch, made)

    def _layer(self, layer: int, batch: Batch, made: Any) -> Any:
        if layer == self.stages.num_layers - 1:
            runtime: Any = self.device.runtime
            self.layers_ns = _now_ns() - runtime.away_ns - self._began_ns
        return super()._layer(layer, batch, made)


class Bench:
    """Stages of ``layers`` layers on the null runtime, with rows of a stated number of keys."""

    def __init__(self, rows: int, keys: int, layers: int = LAYERS, cpu_rows: int = 8, **options: Any) -> None:
        self.runtime = NullRuntime()
        triton.runtime.driver.set_active(StubDriver())
        self.device = CudaDevice(runtime=self.runtime, **options)
        self.runtime.pool = self.device.pool
        room = keys + PAGE * (3 * ROUNDS * (STEPS + 1) // PAGE + 2)  # for three series of figures
        self._pages = room // PAGE + 1
        self.config = EngineConfig(
            rows * self._pages, cpu_rows * self._pages, PAGE, max_model_len=room, max_num_seqs=rows + cpu_rows,
            max_num_batched_tokens=rows + cpu_rows,
        )  # fmt: skip
        self.stages = TorchStages(_model(layers, room), self.device, self.config, "fp32")
        self._gpu = self._requests(GPU_TIER, rows, keys)
        self._cpu = self._requests(CPU_TIER, cpu_rows, PAGE)
        self.layers, self._keys, self._steps = layers, keys, counting()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.device.close()

    def _requests(self, tier: str, count: int, keys: int) -> list[Request]:
        made = []
        for i in range(count):
            request = Request(f"{tier}{i}", i, [1] * keys, 1 << 20, SamplingParams(max_tokens=1 << 20), 0)
            request.tier, request.state = tier, State.DECODE
            request.pages.append(tier, list(range(i * self._pages, i * self._pages + keys // PAGE)))
            made.append(request)
        return made

    def batch(self) -> Batch:
        """The GPU rows of the next step: each a token further on, with a page more where that needs one."""
        at = self._keys + next(self._steps)
        for i, request in enumerate(self._gpu):
            request.token_ids.append(1)
            if at % PAGE == 0:
                request.pages.append(GPU_TIER, [i * self._pages + at // PAGE])
        return Batch(tuple([Segment(r, GPU_TIER, at, 1, samples=True, prefill=False) for r in self._gpu]))

    def executor(self, policy: Policy) -> _Executor:
        return _Executor(
            self.stages, self.device, policy, max_rows=self.config.max_num_seqs, run_ahead=2, op_timeout_ns=TIMEOUT_NS,
            on_release=lambda request: None, any_leaving=lambda: False,
        )  # fmt: skip

    def planning_us(self) -> float:
        batch = self.batch()
        began_ns = _now_ns()
        self.stages.begin(batch)
        return (_now_ns() - began_ns) / 1e3

    def layer_us(self, executor: _Executor, micro_batch: bool = False) -> float:
        """What the driver takes per layer of a step, with a micro-batch that joins at each of them or without."""
        rows = [CpuRow(r, PAGE - 1) for r in self._cpu] if micro_batch else []
        executor.run(self.batch(), rows)
        return executor.layers_ns / 1e3 / (self.layers - 1)

    def move_us(self, tokens: int) -> float:
        """What the driver takes to begin the move of a request whose pages lie scattered."""
        count = tokens // PAGE
        request = self._gpu[0]
        blocks = request.pages.hot[:count]
        request.pages.move_down(count, list(range(0, 2 * count, 2)))
        began_ns = _now_ns()
        self.device.submit(self.stages.move(request, GPU_TIER, blocks, tokens))
        took_us = (_now_ns() - began_ns) / 1e3
        request.pages.hot, request.pages.goes_to = request.pages.hot, None
        return took_us


def _model(layers: int, positions: int) -> LoadedModel:
    tiny = load("dummy:tiny")
    shape = replace(
        tiny.config.shape, num_layers=layers, num_q_heads=4, num_kv_heads=1, max_model_len=positions, hidden_size=64,
        intermediate_size=64, head_dim=16,
    )  # fmt: skip
    config = replace(tiny.config, shape=shape, layer_windows=(None,) * layers)
    return LoadedModel(config, random_weights(config, 3, "fp32"), None, replace(tiny.source, dummy=config))


def _figure(name: str, unit: str, measure: Callable[[], float], calls: Counter[str] | None = None) -> Figure:
    """Medians of the steps of each round, and their median."""
    samples: list[float] = []
    for _ in range(ROUNDS):
        measure()
        if calls is not None:
            calls.clear()
        samples.append(round(statistics.median(measure() for _ in range(STEPS)), 2))
    counted = None if calls is None else {name: n / STEPS for name, n in sorted(calls.items())}
    return Figure(name, statistics.median(samples), unit, tuple(samples), counted)


def layer_figures(rows: int, keys: int) -> list[Figure]:
    """Driver per layer, with and without graphs, and what each micro-batch adds. The first ends runs of layers."""
    found = []
    for graphs in (True, False):
        with Bench(rows, keys, record=False, graphs=graphs) as bench:
            name = f"a layer of {rows} x {keys}, {'graphs' if graphs else 'eager'}"
            alone = bench.executor(GpuOnly())
            found.append(_figure(name, "us", partial(bench.layer_us, alone), bench.runtime.calls))
            last = found[-1].value
            for count, which in enumerate(("first", "second"), 1):
                beside = bench.executor(_Parts(count))
                all_of_them = _figure(name, "us", partial(bench.layer_us, beside, micro_batch=True))
                added = tuple([round(s - last, 2) for s in all_of_them.samples])
                found.append(Figure(f"{name}: the {which} micro-batch", statistics.median(added), "us", added))
                last = all_of_them.value
    return found


def planning_figure(rows: int, keys: int) -> Figure:
    with Bench(rows, keys, layers=1, record=False) as bench:
        return _figure(f"planning a step of {rows} x {keys}", "us", bench.planning_us)


def moving_figure(tokens: int) -> Figure:
    with Bench(1, tokens, cpu_rows=3, record=False) as bench:
        return _figure(f"moving {tokens} scattered tokens", "us", lambda: bench.move_us(tokens))


def memory_figure(record: bool | int = 512, steps: int = 160) -> Figure:
    """What a step leaves behind once the record is full: growth of the least memory from window to window."""
    with Bench(1, PAGE, record=record) as bench:
        executor = bench.executor(GpuOnly())
        executor.on_step = None
        batch = bench.batch()
        tracemalloc.start()
        least = []
        for _ in range(1 + ROUNDS):
            window = []
            for _ in range(steps):
                executor.run(batch, ())
                window.append(tracemalloc.get_traced_memory()[0])
            least.append(min(window))
        tracemalloc.stop()
    growth = [round((b - a) / steps, 1) for a, b in zip(least[1:], least[2:], strict=False)]
    return Figure(f"memory of a step, record={record}", statistics.median(growth), "bytes", tuple(growth))


def figures() -> list[Figure]:
    """All of them. The kernels must not be interpreted."""
    found = [*layer_figures(8, 512), *layer_figures(32, 4096)]
    found += [planning_figure(32, 4096), planning_figure(64, 65_536)]
    return [*found, moving_figure(4096), memory_figure()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridattn.devices.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    # Nothing runs, so the capability that the kernels are laid out for needs no card.
    gpu_kernels.capability.interpreted = lambda: True
    for figure in figures():
        calls = "" if figure.calls is None else "  " + ", ".join(f"{n:g} {name}" for name, n in figure.calls.items())
        line = f"{figure.name:<55} {figure.value:>10.1f} {figure.unit}{calls}"
        print(json.dumps(asdict(figure)) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
