"""The memory that Python and the generated code share: word indices, element codes. Every word is an int64."""

from __future__ import annotations

from enum import IntEnum


class Job(IntEnum):
    """Words of a job descriptor. The first lines belong to the pool, the rest to the kernel."""

    CLAIM = 0  # a word per NUMA node; high half: end of its chunks, low half: next one; one atomic add claims a chunk
    REMAINING = 8  # chunks not yet finished, alone in its cache line
    DONE = 16  # sequence number of the last job that ended in this descriptor; futex word of waiters
    WAITERS = 17
    ERROR = 18
    START_NS = 19
    END_NS = 20
    CANCELLED = 21
    SEQUENCE = 22
    FAULT = 23
    PRIORITY = 24
    RELEASE_SEEN = 26  # the pool's RELEASE word when the job was made: a hung job waits until it differs
    POOL = 25  # address of the control block, for the native push
    # From here on `NativeDecode.fill` writes all words in this order.
    KERNEL = 32
    CHUNKS = 33  # address of unit numbers [num_chunks + 1]
    ITEMS = 34
    NUM_UNITS = 35
    TABLE = 36
    TABLE_STRIDE = 37  # bytes
    Q = 38
    Q_ROW = 39  # bytes from one sequence to the next
    Q_HEAD = 40
    Q_CODE = 41
    OUT = 42
    OUT_ROW = 43
    OUT_HEAD = 44
    OUT_CODE = 45
    LSE = 46  # 0: not asked for
    LSE_ROW = 47
    BASE = 48  # first page of the layer
    PAGE_BYTES = 49
    K_NEW = 50  # 0: nothing to append
    K_NEW_ROW = 51
    K_NEW_HEAD = 52
    V_NEW = 53
    V_NEW_ROW = 54
    V_NEW_HEAD = 55
    NEW_CODE = 56
    PARTIALS = 57
    COUNTERS = 58
    SM_SCALE = 59  # float32 bits
    SOFT_CAP = 60  # float32 bits, 0: off
    ALIBI = 61  # address of float32 [num_q_heads], 0: off
    SINKS = 62  # address of float32 [num_q_heads], 0: off
    NUM_KV_HEADS = 63
    UNIT_HEADS = 64  # KV heads of one unit (the last unit of an item may have fewer)
    UNITS_PER_ITEM = 65
    ALIBI_ROW = 66  # bytes from one sequence's slopes to the next one's, 0: all share them
    SINKS_ROW = 67
    LIMIT = 68  # for kernels that are not generated here
    MEMBERS = 69  # address of the rows of items that bring several together, int64 [n, 3]: see `Member`


JOB_WORDS = 72


MAX_NODES = 8  # claim words of a job; further nodes share


class Item(IntEnum):
    """Words of a work item: one sequence, one split, all KV heads."""

    SEQ = 0
    FIRST = 1  # first token attended to
    LAST = 2  # one past the last
    SPLIT = 3
    NUM_SPLITS = 4
    PARTIAL = 5  # slot of the sequence's first partial result
    APPEND_SLOT = 6  # where this item writes the new token, -1: nowhere
    SEQ_LEN = 7  # the query stands at SEQ_LEN - 1, counted from the row's first key


ITEM_WORDS = 8

TOGETHER = -2  # in APPEND_SLOT: an item of NUM_SPLITS rows, the first of which is member PARTIAL; SEQ is one of them


class Member(IntEnum):
    """Words of a row that an item brings together with others."""

    SEQ = 0
    PARTIAL = 1
    NUM_SPLITS = 2


MEMBER_WORDS = 3


class Code(IntEnum):
    """Element types of the arrays that callers hand in."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class Fault(IntEnum):
    """What ended a job other than its result (word ERROR), and what a test may inject (word FAULT)."""

    NONE = 0
    RAISE = 1
    HANG = 2
    CANCELLED = 3
    CLOSED = 4
    LATE = 5


class Ctl(IntEnum):
    """Words of a pool's control block; each group in a cache line of its own."""

    SIGNAL = 0  # grows with every push and on stop: the futex word of sleeping workers
    SLEEPERS = 8
    STOP = 16
    LOCK = 24  # spin lock of pushes
    HEAD = 32  # two words: first job of each class that may have unclaimed chunks
    TAIL = 40  # two words: jobs pushed of each class
    RELEASE = 48  # grows with every release of hung jobs
    SPIN_NS = 56
    CLOCK = 57  # address of clock_gettime
    SYSCALL = 58  # address of libc's syscall
    FUTEX = 59  # system call number
    NODES = 60  # NUMA nodes of the workers
    BELL = 64  # low half: jobs that may be pushed, of those armed; a device writes it, and nobody else
    RUNG = 72  # armed jobs that workers have pushed
    ARMED = 80  # jobs armed so far
    RING = 88  # two rings of RING_SLOTS descriptor addresses, then those of armed jobs


RING_SLOTS = 1024
CTL_WORDS = int(Ctl.RING) + 3 * RING_SLOTS
