"""Starting a kernel on the device its tensors live on, and keeping what was started to start it again."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpu_kernels.config import Config

Calls = list[Callable[[], Any]]


class _Keeping(threading.local):
    calls: Calls | None = None


_keeping = _Keeping()


def launch(kernel: Any, grid: Sequence[int], config: Config, device: torch.device, *arguments: Any) -> None:
    """Enqueue ``kernel`` on the current stream of ``device``; a grid without programs enqueues nothing."""
    if 0 in grid:
        return
    options = {**config.constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors say
            compiled = kernel[tuple(grid)](*arguments, **options)
    else:
        compiled = kernel[tuple(grid)](*arguments, **options)
    if _keeping.calls is not None:
        again = partial(kernel[tuple(grid)], *arguments, **options)  # in Triton's interpreter
        _keeping.calls.append(again if compiled is None else _bound(compiled, kernel, grid, config, device, arguments))


def _bound(
    compiled: Any, kernel: Any, grid: Sequence[int], config: Config, device: torch.device, arguments: Sequence[Any]
) -> Callable[[], Any]:
    """The launch of a compiled kernel with these arguments, on the stream that is current now."""
    constants = [config.constants[name] for name in kernel.arg_names[len(arguments) :]]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    size = (*grid, 1, 1)[:3]
    return partial(
        compiled.run, *size, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments,
        *constants,
    )  # fmt: skip


def do(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Call a torch function that writes into its arguments, and keep the call as launches are kept."""
    function(*arguments, **options)
    if _keeping.calls is not None:
        _keeping.calls.append(partial(function, *arguments, **options))


@contextmanager
def kept(calls: Calls) -> Iterator[None]:
    """Inside, every launch and every ``do`` of this thread is added to ``calls``, bound to its arguments.

    They were checked and laid out once: calling all of them in order does the same work on the same tensors, in a few
    microseconds each.
    """
    before, _keeping.calls = _keeping.calls, calls
    try:
        yield
    finally:
        _keeping.calls = before
