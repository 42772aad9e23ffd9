"""Benchmarks of the kernels against a read loop and other libraries: ``python -m cpu_kernels.bench``."""
