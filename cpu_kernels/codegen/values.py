"""Values of generated code: LLVM type names, constants, operators, mutable variables."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cpu_kernels.codegen.emit import Function

I1, I8, I16, I32, I64, F32, PTR = "i1", "i8", "i16", "i32", "i64", "float", "ptr"


def vec(n: int, element: str) -> str:
    """Return the LLVM type of a vector of `n` elements."""
    return f"<{n} x {element}>"


def element_of(kind: str) -> str:
    """Return the element type of a vector type, or the type itself."""
    return kind.split(" x ")[1][:-1] if kind.startswith("<") else kind


def lanes_of(kind: str) -> int:
    """Return the number of lanes of a vector type, 1 for a scalar."""
    return int(kind[1:].split(" x ")[0]) if kind.startswith("<") else 1


def literal(kind: str, x: int | float) -> str:
    """Write a Python number as an LLVM constant of type `kind` (splat over vectors)."""
    element = element_of(kind)
    if element == F32:
        rounded = float(np.float32(x))
        text = "0x" + struct.pack(">d", rounded).hex().upper()
    else:
        text = str(int(x))
    return f"splat ({element} {text})" if kind.startswith("<") else text


class Value:
    """An SSA value or a constant of one function: its type and its name in the text."""

    __slots__ = ("fn", "kind", "name")

    def __init__(self, fn: Function, kind: str, name: str) -> None:
        self.fn, self.kind, self.name = fn, kind, name

    def __bool__(self) -> bool:
        raise TypeError("a value of generated code has no truth in Python: use Function.when")

    @property
    def is_float(self) -> bool:
        return element_of(self.kind) == F32

    def _two(self, op_int: str, op_float: str, other: Number, flip: bool = False) -> Value:
        rhs = self.fn.as_value(self.kind, other)
        a, b = (rhs, self) if flip else (self, rhs)
        op = op_float if self.is_float else op_int
        return self.fn.let(self.kind, f"{op} {self.kind} {a.name}, {b.name}")

    def __add__(self, other: Number) -> Value:
        return self._two("add", "fadd", other)

    __radd__ = __add__

    def __sub__(self, other: Number) -> Value:
        return self._two("sub", "fsub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._two("sub", "fsub", other, flip=True)

    def __mul__(self, other: Number) -> Value:
        return self._two("mul", "fmul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> Value:
        return self._two("bad", "fdiv", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self._two("bad", "fdiv", other, flip=True)

    def __floordiv__(self, other: Number) -> Value:
        """Unsigned division: every integer of a kernel that is divided is a count, an index or a size."""
        return self._two("udiv", "bad", other)

    def __mod__(self, other: Number) -> Value:
        return self._two("urem", "bad", other)

    def __and__(self, other: Number) -> Value:
        return self._two("and", "bad", other)

    def __or__(self, other: Number) -> Value:
        return self._two("or", "bad", other)

    def __xor__(self, other: Number) -> Value:
        return self._two("xor", "bad", other)

    def __lshift__(self, other: Number) -> Value:
        return self._two("shl", "bad", other)

    def __rshift__(self, other: Number) -> Value:
        """Logical shift; `ashr` is the arithmetic one."""
        return self._two("lshr", "bad", other)

    def ashr(self, other: Number) -> Value:
        return self._two("ashr", "bad", other)

    def _compare(self, op_int: str, op_float: str, other: Number) -> Value:
        rhs = self.fn.as_value(self.kind, other)
        op = f"fcmp {op_float}" if self.is_float else f"icmp {op_int}"
        n = lanes_of(self.kind)
        return self.fn.let(vec(n, I1) if self.kind.startswith("<") else I1, f"{op} {self.kind} {self.name}, {rhs.name}")

    def __lt__(self, other: Number) -> Value:
        return self._compare("slt", "olt", other)

    def __le__(self, other: Number) -> Value:
        return self._compare("sle", "ole", other)

    def __gt__(self, other: Number) -> Value:
        return self._compare("sgt", "ogt", other)

    def __ge__(self, other: Number) -> Value:
        return self._compare("sge", "oge", other)

    def eq(self, other: Number) -> Value:
        return self._compare("eq", "oeq", other)

    def ne(self, other: Number) -> Value:
        return self._compare("ne", "une", other)

    def select(self, yes: Value, no: Number) -> Value:
        """Choose `yes` where this condition holds, else `no`."""
        other = self.fn.as_value(yes.kind, no)
        text = f"select {self.kind} {self.name}, {yes.kind} {yes.name}, {yes.kind} {other.name}"
        return self.fn.let(yes.kind, text)

    def cast(self, op: str, kind: str) -> Value:
        """Apply a conversion instruction (``sext``, ``bitcast``, ``fpext`` ...)."""
        return self.fn.let(kind, f"{op} {self.kind} {self.name} to {kind}")

    def bits(self, kind: str) -> Value:
        return self if kind == self.kind else self.cast("bitcast", kind)

    def splat(self, n: int) -> Value:
        """Spread a scalar over `n` lanes."""
        kind = vec(n, self.kind)
        one = self.fn.let(kind, f"insertelement {kind} poison, {self.kind} {self.name}, i32 0")
        return self.fn.let(kind, f"shufflevector {kind} {one.name}, {kind} poison, {vec(n, I32)} zeroinitializer")

    def lane(self, i: int) -> Value:
        return self.fn.let(element_of(self.kind), f"extractelement {self.kind} {self.name}, i32 {i}")

    def at(self, offset: Number) -> Value:
        """Pointer plus a number of bytes."""
        rhs = self.fn.as_value(I64, offset)
        return self.fn.let(PTR, f"getelementptr i8, ptr {self.name}, i64 {rhs.name}")


Number = Value | int | float


class Var:
    """A mutable variable; LLVM turns it into registers."""

    __slots__ = ("fn", "kind", "slot")

    def __init__(self, fn: Function, kind: str, slot: str) -> None:
        self.fn, self.kind, self.slot = fn, kind, slot

    def get(self) -> Value:
        return self.fn.let(self.kind, f"load {self.kind}, ptr {self.slot}")

    def set(self, x: Number) -> None:
        value = self.fn.as_value(self.kind, x)
        self.fn.do(f"store {self.kind} {value.name}, ptr {self.slot}")


def natural_align(kind: str) -> int:
    """Alignment that every address of this package's buffers has: the element's own size (vectors may be unaligned)."""
    return {I8: 1, I16: 2, "half": 2, "bfloat": 2, I32: 4, F32: 4, I64: 8, PTR: 8}[element_of(kind)]
