"""What the tests of this room share: a tiny real model, an engine over the toy model, and the invariants of an engine.

An engine on ``SimDevice(execute=True)`` runs every closure at a virtual time that a seed decides, so that a test
chooses when the CPU finishes, which op fails and which one hangs, without a thread and without a clock.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from held_pages import check_pages
from toy_stages import ToyStages

from hybridattn import LLM
from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Future
from hybridattn.core.op import CPU, Op
from hybridattn.core.trace import violations
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.load import load
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

LAYERS, PAGE = 3, 16
ROOT = Path(__file__).parents[2]


class Rig:
    """Makes engines over the toy model and serves jobs with the invariants checked after every step."""

    layers = LAYERS
    page = PAGE
    policies: dict[str, Callable[[], Any]] = {
        "gpu_only": GpuOnly,
        "sync_offload": lambda: SyncOffload(cpu_fraction=0.5),
        "async_overlap": AsyncOverlap,
        "all_on_cpu": lambda: AsyncOverlap(cpu_fraction=1.0, max_micro_batches=4),
    }

    @staticmethod
    def jobs(seed: int, count: int, longest: int = 60, most: int = 12) -> list[tuple[list[int], int]]:
        """(prompt, output tokens) of ``count`` requests."""
        rng = random.Random(seed)
        return [
            ([rng.randrange(50) for _ in range(rng.randint(1, longest))], rng.randint(1, most)) for _ in range(count)
        ]

    @staticmethod
    def build(
        policy: Any,
        seed: int = 1,
        *,
        gpu: int = 8,
        cpu: int = 8,
        scale: int = 20,
        make_device: Callable[[Callable[[Op], int]], SimDevice] = lambda price: SimDevice(price, execute=True),
        **limits: Any,
    ) -> Engine:
        """CPU attention takes up to ``scale`` times as long as other ops."""
        durations = random.Random(seed)
        price = lambda op: durations.randint(0, 40 * (scale if op.lane == CPU else 1))  # noqa: E731
        config = EngineConfig(
            gpu, cpu, PAGE,
            **{"max_model_len": 400, "max_num_seqs": 6, "max_num_batched_tokens": 48, "op_timeout_ns": 10**9, **limits},
        )  # fmt: skip
        stages = ToyStages(LAYERS, gpu, cpu, PAGE, config.max_num_seqs)
        return Engine(stages, make_device(price), policy, config)

    @staticmethod
    def check(engine: Engine) -> None:
        """Every page is held once or free, nobody is in two queues, no limit is exceeded."""
        check_pages(engine)
        queues = engine.scheduler.queues
        assert len({id(r) for r in queues.running + queues.waiting}) == len(queues)
        assert len(queues.running) <= engine.config.max_num_seqs
        order = [(r.arrival_ns, r.index) for r in queues.waiting]
        assert order == sorted(order)

    @classmethod
    def finish(cls, engine: Engine, between: Callable[[int], None] = lambda step: None, limit: int = 6000) -> None:
        """Step until nothing is left; ``between(step)`` runs before each step."""
        step = 0
        while engine.unfinished:
            between(step)
            if engine.unfinished:
                engine.step()
            cls.check(engine)
            step += 1
            assert step < limit, "no progress"
        assert violations(engine.drain()) == []
        cls.check_empty(engine)

    @staticmethod
    def check_empty(engine: Engine) -> None:
        assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
        assert engine.unfinished == 0

    @staticmethod
    def outputs(requests: Sequence[Any]) -> list[list[int]]:
        return [r.token_ids[r.num_prompt :] for r in requests]


class FaultyDevice(SimDevice):
    """A simulated device that spoils the ``at``-th op of a name.

    ``raise`` lets its closure fail, ``hang`` makes it end beyond every time-out, ``slow`` delays it 1000-fold.
    """

    def __init__(self, price: Callable[[Op], int], name: str, at: int, fault: str) -> None:
        self._count, self._spoil, self._at, self._fault = 0, name, at, fault
        self.hit: Op | None = None
        super().__init__(lambda op: self._spoiled(op, price(op)), execute=True)

    def _spoiled(self, op: Op, price: int) -> int:
        if op is not self.hit:
            return price
        return {"hang": 10**15, "slow": 1000 * (price + 1)}.get(self._fault, price)

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> Any:
        if op.name == self._spoil:
            self._count += 1
            if self._count == self._at:
                self.hit = op
                if self._fault == "raise":
                    op.run = _explode
        return super().submit(op, after)


def _explode() -> None:
    raise ArithmeticError("an injected fault")


@pytest.fixture(scope="session")
def rig() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def faulty_device() -> type[FaultyDevice]:
    return FaultyDevice


@pytest.fixture(scope="session")
def tiny() -> Any:
    """Random weights, three layers, no tokenizer: prompts are token ids."""
    return load("dummy:tiny")


@pytest.fixture
def open_tiny(tiny: Any) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        return LLM(tiny, **{"gpu_kv_blocks": 8, "cpu_kv_blocks": 8, "page_size": 32, "cpu_fraction": 0.5, **options})

    return make


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in a process of its own; ``-W error`` there too."""

    def run(code: str, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-W", "error", "-c", code, *args]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    return run
