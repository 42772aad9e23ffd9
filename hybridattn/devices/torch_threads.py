"""torch's thread count, one per process: set while a device is open that computes with torch, then put back."""

from __future__ import annotations

import threading

import torch

from hybridattn.core.errors import InputError


class TorchThreads:
    """The devices of a process that use torch must agree on a number; the last one to close puts the old one back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._count = self._before = 0

    def hold(self, count: int) -> None:
        """Set the count until ``release``; InputError while another one is held."""
        with self._lock:
            if self._holders and count != self._count:
                raise InputError(
                    f"gpu_threads {count}: another host device of this process uses {self._count}, and torch's thread "
                    "count is global; close that one first or use the same number"
                )
            if not self._holders:
                self._before, self._count = torch.get_num_threads(), count
                torch.set_num_threads(count)
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                torch.set_num_threads(self._before)


torch_threads = TorchThreads()
