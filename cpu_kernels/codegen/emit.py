"""A small emitter of LLVM IR text: values with operators, structured loops, mutable variables.

Why text and not numba: a kernel here is scalar control around hand-chosen vector instructions, it must compile for
instruction sets that this machine does not have, and its cache must be keyed by exactly what is compiled. Text gives
all three: the object cache key is the hash of the IR, the target is an argument, and nothing is typed twice.

Types are LLVM's own names (``"i64"``, ``"ptr"``, ``"float"``, ``"<16 x float>"``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

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


class Function:
    """One function under construction. Blocks are opened by `loop`, `when` and `either`, and close themselves."""

    def __init__(self, module: Module, name: str, result: str, args: tuple[str, ...]) -> None:
        self.module, self.name, self.result = module, name, result
        self.args = tuple(Value(self, kind, f"%a{i}") for i, kind in enumerate(args))
        self._slots: list[str] = []
        self._lines: list[str] = []
        self._count = 0

    # ------------------------------------------------------------------ plain emission
    def fresh(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def do(self, text: str) -> None:
        self._lines.append("  " + text)

    def let(self, kind: str, text: str) -> Value:
        name = "%" + self.fresh()
        self._lines.append(f"  {name} = {text}")
        return Value(self, kind, name)

    def const(self, kind: str, x: int | float) -> Value:
        return Value(self, kind, literal(kind, x))

    def as_value(self, kind: str, x: Number) -> Value:
        if isinstance(x, Value):
            if x.kind != kind:
                raise TypeError(f"{self.name}: expected {kind}, got {x.kind}")
            return x
        return self.const(kind, x)

    def call(self, result: str, name: str, *args: Value, flags: str = "") -> Value:
        """Call a function or intrinsic by name; it is declared on first use."""
        self.module.declare(name, result, tuple(a.kind for a in args))
        listed = ", ".join(f"{a.kind} {a.name}" for a in args)
        text = f"call {flags + ' ' if flags else ''}{result} @{name}({listed})"
        if result == "void":
            self.do(text)
            return Value(self, "void", "")
        return self.let(result, text)

    def call_pointer(self, target: Value, *args: Value) -> None:
        listed = ", ".join(f"{a.kind} {a.name}" for a in args)
        self.do(f"call void {target.name}({listed})")

    # ------------------------------------------------------------------ memory
    def load(self, kind: str, pointer: Value, offset: Number = 0, align: int = 0) -> Value:
        where = pointer.at(offset) if isinstance(offset, Value) or offset else pointer
        size = align or natural_align(kind)
        return self.let(kind, f"load {kind}, ptr {where.name}, align {size}")

    def store(self, value: Value, pointer: Value, offset: Number = 0, align: int = 0) -> None:
        where = pointer.at(offset) if isinstance(offset, Value) or offset else pointer
        self.do(f"store {value.kind} {value.name}, ptr {where.name}, align {align or natural_align(value.kind)}")

    def var(self, kind: str, init: Number) -> Var:
        slot = "%" + self.fresh("s")
        self._slots.append(f"  {slot} = alloca {kind}")
        out = Var(self, kind, slot)
        out.set(init)
        return out

    def buffer(self, num_bytes: int) -> Value:
        """Stack memory of a fixed size, aligned to a cache line."""
        slot = "%" + self.fresh("b")
        self._slots.append(f"  {slot} = alloca [{num_bytes} x i8], align 64")
        return Value(self, PTR, slot)

    def dynamic_buffer(self, num_bytes: Value) -> Value:
        """Stack memory of a size known at run time; take it once, outside of loops."""
        return self.let(PTR, f"alloca i8, i64 {num_bytes.name}, align 64")

    def prefetch(self, pointer: Value, locality: int) -> None:
        self.module.declare("llvm.prefetch.p0", "void", (PTR, I32, I32, I32))
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer.name}, i32 0, i32 {locality}, i32 1)")

    # ------------------------------------------------------------------ control
    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")

    def jump(self, name: str) -> None:
        self.do(f"br label %{name}")

    def fork(self, condition: Value, yes: str, no: str) -> None:
        self.do(f"br i1 {condition.name}, label %{yes}, label %{no}")

    @contextmanager
    def loop(self, start: Number, stop: Number, step: int = 1) -> Iterator[Value]:
        """Count an i64 from `start` while below `stop`."""
        head, body, done = (self.fresh(p) for p in ("head", "body", "done"))
        counter = self.var(I64, start)
        self.jump(head)
        self.label(head)
        i = counter.get()
        self.fork(i < stop, body, done)
        self.label(body)
        yield i
        counter.set(i + step)
        self.jump(head)
        self.label(done)

    @contextmanager
    def forever(self) -> Iterator[str]:
        """Loop until a jump to the yielded label."""
        body, done = self.fresh("body"), self.fresh("done")
        self.jump(body)
        self.label(body)
        yield done
        self.jump(body)
        self.label(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        yes, done = self.fresh("yes"), self.fresh("done")
        self.fork(condition, yes, done)
        self.label(yes)
        yield
        self.jump(done)
        self.label(done)

    @contextmanager
    def either(self, condition: Value) -> Iterator[Either]:
        """``with f.either(c) as e: ...; e.otherwise(); ...``: both arms in one with-block."""
        arms = Either(self)
        self.fork(condition, arms.yes, arms.no)
        self.label(arms.yes)
        yield arms
        self.jump(arms.done)
        self.label(arms.done)

    def leave(self, label: str) -> None:
        """Jump out of the current block; what follows in it is unreachable."""
        self.jump(label)
        self.label(self.fresh("dead"))

    def text(self) -> str:
        args = ", ".join(f"{a.kind} {a.name}" for a in self.args)
        body = "\n".join(["entry:", *self._slots, *self._lines])
        return f"define {self.result} @{self.name}({args}) nounwind {{\n{body}\n  ret {self.result}\n}}\n"


class Either:
    """The two arms of `Function.either`."""

    __slots__ = ("fn", "yes", "no", "done")

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.yes, self.no, self.done = (fn.fresh(p) for p in ("yes", "no", "done"))

    def otherwise(self) -> None:
        self.fn.jump(self.done)
        self.fn.label(self.no)


class Module:
    """The functions of one object file and what they call."""

    def __init__(self) -> None:
        self._declared: dict[str, str] = {}
        self._functions: list[Function] = []

    def function(self, name: str, args: tuple[str, ...], result: str = "void") -> Function:
        fn = Function(self, name, result, args)
        self._functions.append(fn)
        return fn

    def declare(self, name: str, result: str, args: tuple[str, ...]) -> None:
        if all(f.name != name for f in self._functions):
            self._declared.setdefault(name, f"declare {result} @{name}({', '.join(args)})")

    def declare_text(self, name: str, text: str) -> None:
        """Declare a function whose arguments carry attributes."""
        self._declared.setdefault(name, text)

    def text(self) -> str:
        return "\n".join([*self._declared.values(), "", *(f.text() for f in self._functions)])


def natural_align(kind: str) -> int:
    """Alignment that every address of this package's buffers has: the element's own size (vectors may be unaligned)."""
    return {I8: 1, I16: 2, "half": 2, "bfloat": 2, I32: 4, F32: 4, I64: 8, PTR: 8}[element_of(kind)]
