"""What a reader has to carry: ``python scripts/structure.py [--json]``.

Per room its files, lines and floors (the longest chain of imports inside it), the longest functions, and the files and
functions of ours that one decode step of one GPU row and one CPU row goes through.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("hybridattn", "cpu_kernels", "gpu_kernels", "experiments")


def modules() -> dict[str, Path]:
    """Every module of the product by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The folder that a module lives in, two levels deep at most."""
    parts = module.split(".")
    path = ROOT.joinpath(*parts[:2])
    return ".".join(parts[:2]) if path.is_dir() else parts[0]


def rooms() -> list[dict[str, Any]]:
    """Files, lines and floors of each room."""
    packages = [p for p in PACKAGES if (ROOT / p / "__init__.py").exists()]
    graph = grimp.build_graph(*packages, cache_dir=None)  # the clone may be somebody else's
    by_room: dict[str, list[str]] = {}
    for name in modules():
        by_room.setdefault(room_of(name), []).append(name)
    rows = []
    for room, names in sorted(by_room.items()):
        inside = set(names)
        below = {n: graph.find_modules_directly_imported_by(n) & inside for n in names if n in graph.modules}
        lines = sum(len(modules()[n].read_text(encoding="utf-8").splitlines()) for n in names)
        rows.append({"room": room, "files": len(names), "lines": lines, "floors": _floors(below)})
    return rows


def _floors(below: dict[str, set[str]]) -> int:
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in known:
            known[name] = 0  # a cycle counts once
            known[name] = 1 + max((floor(n) for n in below.get(name, ())), default=0)
        return known[name]

    return max((floor(n) for n in below), default=0)


def longest_functions(count: int = 8) -> list[tuple[int, str]]:
    """Lines and names of the longest functions, docstrings included."""
    found = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}.{node.name}"))
    return sorted(found, reverse=True)[:count]


def token() -> dict[str, Any]:
    """Files and functions that one more token of a GPU row and of a CPU row goes through, all threads together."""
    from hybridattn import LLM, SamplingParams  # torch, which the rest of this file does without

    ours_begin = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)  # not an environment beside them
    seen: set[tuple[str, str]] = set()
    deepest, watching = 0, False

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        ours = [f.f_code for f in _stack(frame) if f.f_code.co_filename.startswith(ours_begin)]
        if watching and event == "call" and ours and ours[0] is frame.f_code:
            seen.add((str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_code.co_qualname))
            deepest = max(deepest, len(ours))

    threading.setprofile(watch)  # the lanes are threads, which begin with the LLM
    try:
        limits = {"gpu_kv_blocks": 1, "cpu_kv_blocks": 8, "page_size": 32, "max_model_len": 32}
        with LLM("dummy:tiny", policy="sync_offload", **limits) as llm:
            stream = llm.stream([[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=8, ignore_eos=True))
            for _ in range(6):
                next(stream)
            watching = True
            sys.setprofile(watch)
            for _ in range(2):
                next(stream)
            watching = False
            sys.setprofile(None)
            stream.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = sorted({file for file, _ in seen})
    return {"files": files, "functions": len(seen), "depth": deepest}


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {"rooms": rooms(), "longest": longest_functions(), "token": token()}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for row in found["rooms"]:
        print(f"{row['room']:<28} {row['files']:>4} files {row['lines']:>6} lines {row['floors']:>3} floors")
    files, lines = (sum(r[what] for r in found["rooms"]) for what in ("files", "lines"))
    print(f"{'total':<28} {files:>4} files {lines:>6} lines")
    for length, name in found["longest"]:
        print(f"{length:>4} lines  {name}")
    one = found["token"]
    print(f"one token: {len(one['files'])} files, {one['functions']} functions, {one['depth']} deep on the driver")


if __name__ == "__main__":
    main()
