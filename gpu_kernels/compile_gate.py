"""Compile the kernels for GPUs that are not here, and hold registers, spills and shared memory to their limits.

``python -m gpu_kernels.compile_gate --json`` compiles every variant for every target and prints one JSON line each.
It fails (exit code 1) where a target does not compile, shared memory exceeds the target's, or decode waits for tiles
that it has just asked for. Where this version of Triton has a record, it fails too if a 16-bit variant with head_dim
<= 128 spills registers, or a spill is larger than the recorded one: another version is another compiler.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from gpu_kernels.capability import Capability
from gpu_kernels.config import tensor_cores
from gpu_kernels.environment import interpreted
from gpu_kernels.variants import TARGETS, Variant, variants

RECORD = Path(__file__).with_name("recorded_spills.json")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one variant needs on one target; ``problem`` is empty where it passes."""

    kernel: str
    variant: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    in_flight: int  # copies of later tiles that may be under way when the loop begins one; -1: it has no such copies
    num_warps: int
    num_stages: int
    seconds: float
    problem: str

    def __post_init__(self) -> None:
        if min(self.registers, self.spills, self.shared_bytes) < 0:
            raise ValueError(f"{self.kernel} {self.variant} {self.target}: negative register, spill or memory figures")

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.variant} {self.target}"


def source(variant: Variant) -> ASTSource:
    """The variant as the launchers' arguments specialise it: aligned data, strides that are multiples of 16."""
    body = variant.body
    signature = variant.signature
    plain = {*(body.do_not_specialize or ()), *(body.do_not_specialize_on_alignment or ())}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(body.arg_names)
        if name not in plain and signature[name] not in ("constexpr", "fp32")
    }
    return ASTSource(fn=body, signature=signature, constexprs=variant.config.constants, attrs=attributes)


def ptxas_usage(ptx: str, sm: int) -> tuple[int, int]:
    """Registers per thread, and bytes of spill stores and loads, as Triton's own ptxas reports them."""
    tool = get_ptxas(sm)
    options = ["--regAllocOptLevel=2"] if int(tool.version.split(".")[0]) >= 13 else []  # as Triton calls it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool.path, "-v", *options, f"--gpu-name={sm_arch_from_capability(sm)}", str(path)]
        done = subprocess.run([*command, "-o", str(path) + ".o"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"ptxas failed with code {done.returncode}: {done.stderr[-500:]}")
    return read_log(done.stderr)


def read_log(log: str) -> tuple[int, int]:
    """Registers and spilled bytes from the text of ``ptxas -v``."""
    registers = re.search(r"Used (\d+) registers", log)
    stores, loads = re.search(r"(\d+) bytes spill stores", log), re.search(r"(\d+) bytes spill loads", log)
    if not (registers and stores and loads):
        raise RuntimeError(f"ptxas -v printed no usage: {log[-500:]}")
    return int(registers[1]), int(stores[1]) + int(loads[1])


def measure(variant: Variant, sm: int, recorded: dict[str, int] | None) -> Reading:
    """Compile one variant for one target and judge it; without a record, spills may be any where some are allowed."""
    start, config = time.perf_counter(), variant.config
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    registers = spills = shared = 0
    in_flight = -1
    try:
        compiled = triton.compile(source(variant), target=GPUTarget("cuda", sm, 32), options=options)
        registers, spills = ptxas_usage(compiled.asm["ptx"], sm)
        shared = compiled.metadata.shared
        in_flight = copies_in_flight(compiled.asm["ttgir"])
        allowed = None if recorded is None else recorded.get(f"{variant.kernel} {variant.name} sm_{sm}", 0)
        problem = judge(variant, sm, registers, spills, shared, in_flight, allowed)
    except Exception as error:  # whatever a compiler raises is this variant's result, and fails the gate
        problem = f"does not compile: {type(error).__name__}: {str(error)[-500:]}"
    return Reading(
        variant.kernel, variant.name, f"sm_{sm}", registers, spills, shared, in_flight, config.num_warps,
        config.num_stages, round(time.perf_counter() - start, 2), problem,
    )  # fmt: skip


def copies_in_flight(ttgir: str) -> int:
    """The least that any wait inside the kernel's loop leaves under way, from Triton's own intermediate code."""
    begin, end = ttgir.find("scf.for"), ttgir.rfind("scf.yield")
    waits = re.findall(r"ttg\.async_wait.*?num = (\d+)", ttgir[begin:end]) if begin >= 0 else []
    return min(map(int, waits), default=-1)


def double_buffered(variant: Variant, sm: int) -> bool:
    """Whether the next tile of K and V is to be under way while one is computed with: decode, from three stages on."""
    cards = tensor_cores(torch.float16 if variant.half else torch.float32, Capability(sm))
    return variant.kernel == "attend_split" and cards and variant.config.num_stages >= 3


def judge(
    variant: Variant, sm: int, registers: int, spills: int, shared: int, in_flight: int, recorded: int | None
) -> str:
    """The first limit that is broken, in words, or nothing; spills may be any without a record of this Triton."""
    limit = Capability(sm).shared_bytes
    if shared > limit:
        return f"shared memory of {shared} bytes exceeds the target's {limit}"
    if double_buffered(variant, sm) and in_flight < 1:
        return f"{in_flight} copies are under way when a tile of K and V is used: the loop waits for memory each time"
    if recorded is not None and spills and variant.half and variant.head_dim <= 128:
        return f"{spills} bytes of spills in a 16-bit variant with head_dim {variant.head_dim} <= 128"
    if recorded is not None and spills > recorded:
        return f"{spills} bytes of spills, {recorded} are recorded"
    if registers * variant.config.num_warps * 32 > 65_536:
        return f"{registers} registers for {variant.config.num_warps * 32} threads exceed a multiprocessor's 65,536"
    return ""


def sample(count: int) -> list[tuple[Variant, int]]:
    """About ``count`` pairs that touch every kernel and every target, the same ones on each call."""
    draw = random.Random(0)
    by_kernel: dict[str, list[Variant]] = {}
    for variant in variants(TARGETS[-1]):
        by_kernel.setdefault(variant.kernel, []).append(variant)
    weights = {"attend_split": 5, "attend_tile": 4}  # the kernels with the most ways to fail
    shares = {kernel: weights.get(kernel, 1) for kernel in by_kernel}
    chosen = []
    for turn, kernel in enumerate(by_kernel):
        number = max(1, count * shares[kernel] // sum(shares.values()))
        for i in range(number):
            sm = TARGETS[(turn + i) % len(TARGETS)]
            chosen.append((draw.choice([v for v in variants(sm) if v.kernel == kernel]), sm))
    return chosen


def load_record() -> dict[str, int] | None:
    """Spilled bytes by variant with the Triton that is installed; None where nothing was recorded with it."""
    return _records().get(triton.__version__)


def _records() -> dict[str, dict[str, int]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def save_record(readings: Sequence[Reading]) -> None:
    """Bring this Triton's record up to date for the variants that were read; the others keep their entries."""
    spills = (load_record() or {}) | {reading.key: reading.spills for reading in readings}
    kept = {key: value for key, value in sorted(spills.items()) if value}
    RECORD.write_text(json.dumps(_records() | {triton.__version__: kept}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_kernels.compile_gate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--sample", type=int, metavar="N", help="about N variants over all kernels and targets")
    parser.add_argument("--targets", type=int, nargs="+", choices=TARGETS, default=TARGETS, metavar="SM")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these kernels")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th pair, from the I-th on")
    parser.add_argument("--record", action="store_true", help="write the spills found as the new record")
    options = parser.parse_args(arguments)
    if interpreted():
        print("compile_gate: TRITON_INTERPRET is set; unset it, the interpreter compiles nothing", file=sys.stderr)
        return 2
    pairs = sample(options.sample) if options.sample else [(v, sm) for sm in TARGETS for v in variants(sm)]
    wanted = options.kernels or {variant.kernel for variant, _ in pairs}
    pairs = [(v, sm) for v, sm in pairs if sm in options.targets and v.kernel in wanted]
    index, count = map(int, options.shard.split("/"))
    recorded = None if options.record else load_record()
    readings = []
    for variant, sm in pairs[index::count]:
        readings.append(measure(variant, sm, recorded))
        print(_line(readings[-1], options.json), flush=True)
    if options.record:
        save_record(readings)
    failed = sum(bool(reading.problem) for reading in readings)
    print(f"{len(readings)} variants, {failed} failed", file=sys.stderr)
    return 1 if failed or not readings else 0


def _line(reading: Reading, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(reading))
    usage = f"{reading.registers:4d} registers {reading.spills:5d} spilled {reading.shared_bytes:7d} shared"
    return f"{reading.target:7s}{reading.kernel:13s}{reading.variant:40s}{usage}  {reading.problem or 'ok'}"


if __name__ == "__main__":
    sys.exit(main())
