"""Serve many small requests and check the invariants after every step.

    python scripts/soak.py --device sim --requests 20000
    python scripts/soak.py --device host --requests 2000
    python scripts/soak.py --device sim --requests 10000 --share     common prefixes and sessions; on host, a file tier

Requests come in waves with pauses between them; lengths, seeds and choices are random; some are aborted at a random
time. After each step: every request is in one place, every page has as many holders as hold it or is free, no limit is
exceeded, time does not go back. At the end: each request was reported once and all pages are free. Memory must not grow
once the first quarter has been served. On ``host`` the requests repeat a handful of prompts, and each must be answered
alike whatever runs beside it. Prints one JSON line; exit code 1 and a message when an invariant breaks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from hybridattn.core.config import EngineConfig
from hybridattn.core.params import SamplingParams
from hybridattn.core.records import RequestRecord
from hybridattn.core.request import DeclaredTokens, Request
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.registry import make_policy

PAGE, MAX_WAITING, SESSIONS = 16, 40, 6
POLICIES = ["gpu_only", "sync_offload", "async_overlap", "asymmetric", "split"]
# Allowed between the first quarter and the end: allocator noise, and on host what torch keeps for each number of rows
# that it multiplies for the first time.
GROWTH_MIB = {"simulated": 8.0, "measured": 32.0}
SHAPE = ModelShape("small", 3, 256, 512, 4, 2, 32, 1024, 1024)


class Broken(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass(slots=True)
class StepStats:
    """What was served."""

    added: int = 0
    steps: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    reused_tokens: int = 0
    on_cpu: int = 0
    open_ids: set[str] = field(default_factory=set)

    def ended(self, record: RequestRecord) -> None:
        require(record.request_id in self.open_ids, f"request {record.request_id} ended twice or was never added")
        self.open_ids.remove(record.request_id)
        self.reasons[record.finish_reason] += 1
        self.tokens += record.output_tokens
        self.preemptions += record.preemptions
        self.recomputed_tokens += record.recomputed_tokens
        self.reused_tokens += record.reused_tokens
        self.on_cpu += record.tier == "cpu"


def check(engine: Engine, stats: StepStats) -> None:
    """The invariants of a step."""
    queues, kv = engine.scheduler.queues, engine.kv
    require(engine.unfinished == len(stats.open_ids), f"{engine.unfinished} unfinished, {len(stats.open_ids)} open")
    require(len(queues.running) <= engine.config.max_num_seqs, "more requests run than max_num_seqs")
    holders = {id(r): r for r in [*queues.running, *kv.contexts, *(m.request for m in kv.under_way)]}.values()
    for tier, pool in kv.pools.items():
        held = Counter(page for r in holders for page in r.pages.held(tier))
        require(
            kv.prefixes is not None or max(held.values(), default=1) == 1, f"a page of the {tier} tier is held twice"
        )
        wrong = next((p for p in range(pool.num_blocks) if pool.holders(p) != held[p]), None)
        require(wrong is None, f"page {wrong} of the {tier} tier counts other holders than it has")
        count = len(held) + pool.num_free
        require(count == pool.num_blocks, f"{count} pages of the {tier} tier are held or free, of {pool.num_blocks}")
    require(all(not r.pages for r in queues.waiting), "a waiting request holds pages")


def serve(
    engine: Engine, total: int, rng: random.Random, add: Callable[[int], Request], pause: Callable[[], None]
) -> dict[str, Any]:
    """Waves of requests, aborts among them, until ``total`` have ended."""
    stats, process = StepStats(), psutil.Process()
    engine.send_records(stats.ended)
    baseline, last_ns, began = 0, 0, time.monotonic()
    while stats.added < total or engine.unfinished:
        if stats.added < total and engine.unfinished < MAX_WAITING:
            if rng.random() < 0.05:
                pause()
            for _ in range(min(rng.randint(1, 12), total - stats.added)):
                stats.open_ids.add(add(stats.added).request_id)
                stats.added += 1
        if stats.open_ids and rng.random() < 0.02:
            engine.abort(rng.choice(sorted(stats.open_ids)))
        if engine.unfinished:
            engine.step()
        stats.steps += 1
        check(engine, stats)
        now_ns = engine.device.now_ns()
        require(now_ns >= last_ns, "time went back")
        last_ns = now_ns
        if not baseline and stats.added >= total // 4:
            baseline = process.memory_info().rss
    engine.executor.moves.wait_all()
    for number in range(SESSIONS):
        engine.end_session(f"s{number}")
    require(sum(stats.reasons.values()) == total, f"{total} requests, {dict(stats.reasons)}")
    require(all(p.num_free == p.num_blocks for p in engine.kv.pools.values()), "blocks are missing at the end")
    grown = (process.memory_info().rss - baseline) / 2**20
    require(grown < GROWTH_MIB[engine.device.kind], f"memory grew by {grown:.1f} MiB after the first quarter")
    return {
        "requests": total, "steps": stats.steps, "reasons": dict(stats.reasons), "tokens": stats.tokens,
        "preemptions": stats.preemptions, "recomputed_tokens": stats.recomputed_tokens,
        "reused_tokens": stats.reused_tokens, "on_cpu": stats.on_cpu, "grown_mib": round(grown, 2),
        "took_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def soak_sim(total: int, seed: int, policy: str, share: bool) -> dict[str, Any]:
    """Declared lengths, priced by shipped profiles."""
    rng = random.Random(seed)
    pricing = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
    device = SimDevice(pricing, record=False)
    config = EngineConfig(
        24, 48, PAGE, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, share_prefixes=share
    )
    chosen = make_policy(policy, costs=Costs(ModelCost(SHAPE, "fp16"), pricing))
    engine = Engine(PricedStages(SHAPE, "fp16"), device, chosen, config)

    def add(number: int) -> Request:
        prompt = DeclaredTokens(rng.randint(1, 120), rng.choice((0, 40, 80)))
        session = f"s{rng.randrange(SESSIONS)}" if share and rng.random() < 0.3 else ""
        return engine.add(prompt, rng.randint(1, 60), session=session)

    return serve(engine, total, rng, add, lambda: device.sleep_until_ns(device.now_ns() + rng.randint(0, 10**8)))


def soak_host(total: int, seed: int, policy: str, share: bool) -> dict[str, Any]:
    """Real math on tiny random weights; equal requests must get equal answers."""
    from hybridattn import LLM

    rng = random.Random(seed)
    kinds = []
    begin = [rng.randrange(512) for _ in range(35)]
    for number in range(12):
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 40))]
        if share and number % 2:
            prompt = begin[: rng.choice((16, 20, 35))] + prompt[:8]
        hot = number % 3 != 0
        kinds.append(
            (prompt, SamplingParams(max_tokens=rng.randint(1, 12), temperature=1.0 if hot else 0.0, seed=number))
        )
    with tempfile.TemporaryDirectory() as folder, LLM(
        "dummy:tiny", policy=policy, gpu_kv_blocks=10, cpu_kv_blocks=10, page_size=PAGE, max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=48, record=False, share_prefixes=share,
        kv_store_dir=folder if share else None, kv_store_bytes=200_000,
    ) as llm:  # fmt: skip
        engine = llm.engine
        answers: dict[int, list[int]] = {}
        asked: dict[str, tuple[int, Request]] = {}

        def compare(number: int, request: Request) -> None:
            got = request.token_ids[request.num_prompt :]
            want = answers.setdefault(number, got) if request.finish_reason == "length" else answers.get(number, got)
            require(got == want[: len(got)], f"kind {number} was answered otherwise before")

        def add(number: int) -> Request:
            for name in [n for n, (_, r) in asked.items() if r.finish_reason is not None]:
                compare(*asked.pop(name))
            prompt, params = kinds[rng.randrange(len(kinds))]
            session = f"s{rng.randrange(SESSIONS)}" if share and rng.random() < 0.3 else ""
            request = engine.add(prompt, params.max_tokens, params, session=session)
            asked[request.request_id] = (params.seed or 0, request)
            return request

        found = serve(engine, total, rng, add, lambda: time.sleep(rng.random() * 0.01))
        for number, request in asked.values():
            compare(number, request)
        if share:
            store: Any = engine.kv.prefixes.store  # type: ignore[union-attr]
            require(store.refused == store.failed == 0, f"{store.refused} files refused, {store.failed} errors")
            found |= {"pages_saved": store.saved, "pages_loaded": store.loaded}
    return found | {"kinds_compared": len(answers)}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Serve many small requests and check the invariants after every step.")
    p.add_argument("--device", choices=["sim", "host"], required=True)
    p.add_argument("--requests", type=int, required=True)
    p.add_argument("--policies", nargs="+", default=POLICIES)
    p.add_argument("--share", action="store_true", help="requests share prefixes, and some belong to sessions")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    soak = soak_sim if args.device == "sim" else soak_host
    requests = -(-args.requests // len(args.policies))
    for policy in args.policies:
        try:
            found = soak(requests, args.seed, policy, args.share)
        except Broken as error:
            print(f"soak: {args.device}, {policy}, seed {args.seed}: {error}", file=sys.stderr)
            return 1
        print(
            json.dumps({"device": args.device, "policy": policy, "share": args.share, "seed": args.seed, **found}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
