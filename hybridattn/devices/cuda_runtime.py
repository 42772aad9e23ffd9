"""What the CUDA device needs of CUDA, behind one thin protocol: streams, events, host calls, pinned memory, graphs.

``TorchCuda`` is the real one. Tests use a fake one whose streams run late and in any order that the waits allow.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from hybridattn.core.errors import InputError
from hybridattn.devices.cuda_words import Words, loaded_library

Stream = Any
Event = Any
_MARGIN = 1 << 30  # of the card's memory, or 3 % of it: context, modules, library workspaces, graphs


class CudaRuntime(Protocol):
    """CUDA as the device sees it. Nothing here waits, except ``synchronize`` and ``capture``."""

    gpu_name: str
    kind: str  # what durations are here: "measured", but on a runtime that only plays a card
    torch_device: str  # where tensors of the GPU tier live

    def open_stream(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, what the host enqueues at once (uploads of a plan) goes to ``stream``."""
        ...

    def enqueue(self, stream: Stream, run: Callable[[], None]) -> None:
        """Put what ``run`` does on ``stream``, after everything that is there. ``run`` raises nothing."""
        ...

    def event(self, timing: bool = True) -> Event:
        """A new event, which with ``timing`` keeps the time at which the stream came by."""
        ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work enqueued on ``stream`` from now on starts after ``event`` has passed."""
        ...

    def follow(self, stream: Stream, earlier: Stream) -> None:
        """Work enqueued on ``stream`` from now on starts after all that is on ``earlier`` now."""
        ...

    def query(self, event: Event) -> bool:
        """Whether a recorded event has passed. Raises what the GPU failed with, if it did."""
        ...

    def elapsed_ns(self, first: Event, second: Event) -> int:
        """Time between two events that have passed; about 0.5 us fine, and 1 us over ten seconds."""
        ...

    def why_no_host_call(self) -> str | None: ...

    def host_call(self, stream: Stream, function: int, argument: int) -> None:
        """``void function(void *argument)`` (addresses) runs when ``stream`` comes by; it must not use CUDA."""
        ...

    def why_no_words(self) -> str | None:
        """Why streams can neither wait for a word of page-locked memory nor write one; None where they can."""
        ...

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """Work enqueued on ``stream`` from now on starts once the 32-bit word at ``address`` (page-locked) has counted
        up to ``value`` or past it, around 2**32."""
        ...

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """The word at ``address`` becomes ``value`` when ``stream`` comes by; what was copied before is seen first."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the card that can be had now, and in all."""
        ...

    def allocated(self) -> int:
        """Bytes of the card that tensors of this process hold."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory so that copies are asynchronous; RuntimeError with the reason where it cannot be."""
        ...

    def unpin(self, address: int) -> None: ...

    def synchronize(self) -> None:
        """Wait for everything on the card, default stream included: only while a model is being opened."""
        ...

    def capture(self, stream: Stream, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Record what each of ``runs`` enqueues as a graph; the results replay them. RuntimeError where that fails."""
        ...


class TorchCuda:
    """The CUDA runtime that torch has loaded, on one card.

    Raises
    ------
    InputError
        There is no such card.
    """

    kind = "measured"

    def __init__(self, index: int = 0) -> None:
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise InputError(f"CUDA device {index} does not exist: torch sees {count}")
        self.torch_device = f"cuda:{index}"
        self._device = torch.device(self.torch_device)
        self.gpu_name = torch.cuda.get_device_name(self._device)
        self._launch, self._no_launch = _find_host_call()
        self._words = Words()
        self._relay: Any = None
        self._graph_pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # those that share the pool

    def open_stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def enqueue(self, stream: Stream, run: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            run()

    def event(self, timing: bool = True) -> Event:
        return torch.cuda.Event(enable_timing=timing)

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def follow(self, stream: Stream, earlier: Stream) -> None:
        if self._relay is None:
            self._relay = torch.cuda.Event()
        self._relay.record(earlier)  # a wait is for the latest record when it is asked for
        stream.wait_event(self._relay)

    def query(self, event: Event) -> bool:
        return event.query()

    def elapsed_ns(self, first: Event, second: Event) -> int:
        return int(first.elapsed_time(second) * 1e6)

    def why_no_host_call(self) -> str | None:
        return self._no_launch

    def host_call(self, stream: Stream, function: int, argument: int) -> None:
        if self._launch is None:
            raise RuntimeError(f"no host call: {self._no_launch}")
        with torch.cuda.device(self._device):
            code = self._launch(stream.cuda_stream, function, argument)
        _raise_refused("the host call was refused", code)

    def why_no_words(self) -> str | None:
        return self._words.why_not

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        with torch.cuda.device(self._device):
            self._words.wait(stream.cuda_stream, address, value)

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        with torch.cuda.device(self._device):
            self._words.write(stream.cuda_stream, address, value)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, free + cached - max(_MARGIN, total * 3 // 100)), total

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def pin(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        _raise_refused(f"pinning {num_bytes} bytes failed", code)

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        _raise_refused("unpinning failed", code)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def capture(self, stream: Stream, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        if not self._graphs:  # the first ones, or the pool has gone with the last of them
            self._graph_pool = torch.cuda.graph_pool_handle()  # graphs replay one after the other: they share scratch
        with torch.cuda.stream(stream):
            for run in runs:
                run()  # compiles kernels and makes library handles, none of which may happen inside a capture
            stream.synchronize()
            with _no_collection():
                graphs = [self._captured(run) for run in runs]
        self._graphs.update(graphs)
        return [graph.replay for graph in graphs]

    def _captured(self, run: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # it says no more than that the capture came to nothing
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: tensors of another engine that die then would break a capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _raise_refused(what: str, code: int) -> None:
    """Raise for a CUDA error code, and make the runtime forget it: torch would blame the next kernel for it."""
    if code == 0:
        return
    library = _runtime_library()
    if library is not None and hasattr(library, "cudaGetLastError"):
        library.cudaGetLastError()
    raise RuntimeError(f"{what} with CUDA error {code}")


def _runtime_library() -> ctypes.CDLL | None:
    """The CUDA runtime that torch itself uses: symbols are asked of torch's library, which is linked to it. A process
    may have loaded a second one."""
    for name in ("libc10_cuda.so", "libcudart.so"):
        path = loaded_library(name)
        if path is not None:
            return ctypes.CDLL(path)
    return None


def _find_host_call() -> tuple[Callable[[int, int, int], int] | None, str | None]:
    """The native launch of a host function: of the runtime library that is loaded, else of the driver's."""
    driver = loaded_library("libcuda.so")
    libraries = (_runtime_library(), ctypes.CDLL(driver) if driver is not None else None)
    for library, symbol in zip(libraries, ("cudaLaunchHostFunc", "cuLaunchHostFunc"), strict=True):
        launch = getattr(library, symbol, None)
        if launch is not None:
            launch.argtypes, launch.restype = [ctypes.c_void_p] * 3, ctypes.c_int
            return launch, None
    return None, "neither libcudart nor libcuda is loaded in this process"
