"""LLVM IR generators of the native kernels: one algorithm, several instruction sets."""
