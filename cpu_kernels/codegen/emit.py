"""A small emitter of LLVM IR text: values with operators, structured loops, mutable variables.

Why text and not numba: a kernel here is scalar control around hand-chosen vector instructions, it must compile for
instruction sets that this machine does not have, and its cache must be keyed by exactly what is compiled. Text gives
all three: the object cache key is the hash of the IR, the target is an argument, and nothing is typed twice.

Types are LLVM's own names (``"i64"``, ``"ptr"``, ``"float"``, ``"<16 x float>"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpu_kernels import isa
from cpu_kernels.codegen.values import I32, I64, PTR, Number, Value, Var, literal, natural_align


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

    @contextmanager
    def default_floats(self) -> Iterator[None]:
        """Round to nearest and keep subnormals in what follows, whatever the caller's control word says (x86)."""
        if not isa.is_x86():
            yield
            return
        before, wanted = self.buffer(4), self.buffer(4)
        self.call("void", "llvm.x86.sse.stmxcsr", before)
        self.store(self.const(I32, 0x1F80), wanted)
        self.call("void", "llvm.x86.sse.ldmxcsr", wanted)
        yield
        self.call("void", "llvm.x86.sse.ldmxcsr", before)

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
