"""What the kernels would do on this machine, for people: ``python -m cpu_kernels.doctor``."""

from __future__ import annotations

from cpu_kernels import backends, isa, jit, memory, topology, tuning


def lines() -> list[str]:
    """Return one sentence per fact: processor, ISA level and why, CPUs, memory, back ends, cache folder."""
    here, choice = topology.read(), isa.detect()
    out = [
        f"processor: {here.cpu_model}, {here.num_cores} cores, CPUs {list(here.allowed)}, quota {here.quota}",
        f"worker CPUs: {list(topology.worker_cpus(here))} by default",
        f"NUMA nodes: {', '.join(f'{node}: {list(cpus)}' for node, cpus in here.numa)}",
        f"transparent huge pages: {here.huge_pages}",
        f"memory available: {memory.available_bytes()} bytes",
        f"ISA level: {choice.level} ({choice.reason}); override with {isa.ENVIRONMENT}",
    ]
    out += [f"ISA level {level}: absent, {why}" for level, why in choice.missing]
    for name in backends.REGISTRY:
        out.append(f"backend {name}: {backends.why_absent(name) or 'available'}")
    out.append(f"tuning: pages of {tuning.best_page_size()} tokens are best here; {tuning.current()[1]}")
    out.append(f"compiled code: {jit.cache_dir() or 'kept nowhere: no home folder is known; set CPU_KERNELS_CACHE'}")
    return out


if __name__ == "__main__":
    print("\n".join(lines()))
