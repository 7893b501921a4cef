"""Tensor cores and the copy engine: fragments, swizzled operands, boxes of a tensor map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree.emulator.arithmetic import LANES
from kdtree.emulator.memory import SHARED_BASE, BadAccess, Race, joined

if TYPE_CHECKING:
    from kdtree.emulator.machine import Block

LANE = np.arange(LANES)
ROW, COLUMN = LANE // 4, 2 * (LANE % 4)  # of an accumulator's first element in an 8x8 matrix


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit floats as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def fragment(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """An 8x8 matrix of 16-bit elements as a warp holds it, two elements a lane."""
    rows = rows.T if transposed else rows
    return rows[ROW, COLUMN].astype(np.uint32) | (rows[ROW, COLUMN + 1].astype(np.uint32) << np.uint32(16))


def matrix(values: np.ndarray) -> np.ndarray:
    """The 8x8 matrix that a warp holds."""
    rows = np.zeros((8, 8), dtype=np.uint16)
    rows[ROW, COLUMN] = values & np.uint32(0xFFFF)
    rows[ROW, COLUMN + 1] = values >> np.uint32(16)
    return rows


def a_matrix(a: tuple, kind: str) -> np.ndarray:
    """A, 16x16, from a warp's four registers."""
    a0, a1, a2, a3 = (matrix(x) for x in a)
    return floats(np.block([[a0, a2], [a1, a3]]), kind)


def mma(a: tuple, b: tuple, c: tuple, kind: str) -> list[np.ndarray]:
    """mma.sync.m16n8k16: the four accumulators."""
    left = a_matrix(a, kind)
    right = floats(np.concatenate([matrix(b[0]).T, matrix(b[1]).T]), kind)  # b0: rows are columns n, pairs of k
    product = left @ right
    return [
        product[ROW, COLUMN] + c[0],
        product[ROW, COLUMN + 1] + c[1],
        product[ROW + 8, COLUMN] + c[2],
        product[ROW + 8, COLUMN + 1] + c[3],
    ]


class MBarrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count: int, agent: int, agents: int):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        self.agent = agent  # as which copies that end here are known
        self.coming = np.zeros(agents, dtype=np.int32)
        self.known = np.zeros(agents, dtype=np.int32)  # to who waits for the last phase that ended

    def arrive(self, clock: np.ndarray) -> None:
        """One arrival. Raises RuntimeError for one too many."""
        if self.pending == 0:
            raise RuntimeError("mbarrier: more arrivals in a phase than it was set up for")
        joined(self.coming, clock)
        self.pending -= 1
        self.end()

    def landed(self, count: int) -> None:
        """Bytes of a copy."""
        self.coming[self.agent] = self.phase + 1
        self.bytes -= count
        self.end()

    def end(self) -> None:
        """End the phase if everything is there."""
        if self.pending == 0 and self.bytes == 0:
            joined(self.known, self.coming)
            self.phase += 1
            self.pending = self.count


@dataclass
class Map:
    """A tensor map: `address` of the tensor, shape and strides (elements) outermost first, box the same way."""

    address: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.item


def swizzled(offset: np.ndarray) -> np.ndarray:
    """Where a byte lies under the 128-byte swizzle: the 16-byte unit is changed by the row within 8 rows."""
    return offset ^ (((offset >> 7) & 7) << 4)


class Box:
    """A box of a tensor map in shared memory at `address`; `place` innermost first, as the instruction has it."""

    def __init__(self, block: Block, tensor_map: Map, address: int, place: list[int]):
        self.block = self.source = block
        self.map, self.address, self.place = tensor_map, address, place
        if len(place) != len(tensor_map.shape):
            raise BadAccess(f"a copy with {len(place)} coordinates, its tensor map has {len(tensor_map.shape)}")
        if address % 128 or tensor_map.box[-1] * tensor_map.item != 128:
            raise BadAccess(
                f"a copy to or from shared address {address:#x}, expected a multiple of 128 and rows of 128"
            )

    def words(self) -> np.ndarray:
        """Words of shared memory."""
        offset = self.block.shared.offsets(np.array([self.address]), 4)[0]
        self.block.shared.offsets(np.array([self.address + self.map.bytes - 4]), 4)
        return np.arange(offset // 4, (offset + self.map.bytes) // 4)

    def rows(self) -> list[tuple[int, int]]:
        """(address in shared memory of a row of 128 bytes, index of its first element or -1) for each row."""
        found = []
        start = list(reversed(self.place))
        for number, index in enumerate(np.ndindex(*self.map.box[:-1])):
            at = [s + i for s, i in zip(start, (*index, 0), strict=True)]
            inside = all(0 <= a < n for a, n in zip(at, self.map.shape, strict=True))
            element = sum(a * s for a, s in zip(at, self.map.strides, strict=True)) if inside else -1
            found.append((self.address + number * 128, element))
        return found


class BulkLoad(Box):
    """A TMA load on its way."""

    def __init__(self, block: Block, tensor_map: Map, address: int, place: list[int], barrier: MBarrier):
        super().__init__(block, tensor_map, address, place)
        self.barrier = barrier

    def perform(self) -> None:
        """The bytes land, and the mbarrier counts them."""
        shared = self.block.shared.bytes
        for address, element in self.rows():
            data = np.zeros(128, np.uint8)
            if element >= 0:
                buffer, at = self.block.machine.memory.find(self.map.address + element * self.map.item, 128)
                data = buffer[at : at + 128]
            units = swizzled(address + 16 * np.arange(8)) - SHARED_BASE
            shared[units[:, None] + np.arange(16)] = data.reshape(8, 16)
        self.barrier.landed(self.map.bytes)


class BulkSend:
    """A copy from one block's shared memory to another's on its way."""

    def __init__(self, source: Block, block: Block, of: int, to: int, size: int, barrier: MBarrier, line: int):
        self.source, self.block, self.size, self.barrier, self.line = source, block, size, barrier, line
        if (of | to | size) % 16:
            raise BadAccess(f"line {line}: a copy of {size} bytes from {of:#x} to {to:#x}, expected multiples of 16")
        self.of, self.to = (
            int(b.shared.offsets(np.array([at, at + size - 4]), 4)[0]) for b, at in ((source, of), (block, to))
        )
        self.words_of, self.words_to = (np.arange(at // 4, (at + size) // 4) for at in (self.of, self.to))
        self.sent = source.shared.bytes[self.of : self.of + size].copy()

    def perform(self) -> None:
        """The bytes land, and the mbarrier counts them. Raises Race where what is sent has changed on the way."""
        if (self.source.shared.bytes[self.of : self.of + self.size] != self.sent).any():
            raise Race(f"line {self.line} sends shared memory that is written before it has gone")
        self.block.shared.bytes[self.to : self.to + self.size] = self.sent
        self.barrier.landed(self.size)


class BulkStore(Box):
    """A TMA store on its way."""

    def perform(self) -> None:
        """Shared memory is read and the tensor written, inside its bounds."""
        shared = self.block.shared.bytes
        for address, element in self.rows():
            if element >= 0:
                units = swizzled(address + 16 * np.arange(8)) - SHARED_BASE
                buffer, at = self.block.machine.memory.find(self.map.address + element * self.map.item, 128)
                buffer[at : at + 128] = shared[units[:, None] + np.arange(16)].reshape(128)


def described(descriptor: int, rows: int, k_major: bool) -> np.ndarray:
    """Shared addresses of an operand of wgmma, [rows, 16] elements over k, from its matrix descriptor.

    Raises BadAccess for a layout without 128-byte swizzle.
    """
    if descriptor >> 62 != 1 or (descriptor >> 49) & 7:
        raise BadAccess(f"matrix descriptor {descriptor:#x}: expected 128-byte swizzle and no base offset")
    start, leading, stride = ((descriptor >> s & 0x3FFF) << 4 for s in (0, 16, 32))
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if k_major:
        return swizzled(start + (r // 8) * stride + (r % 8) * 128 + k * 2)
    return swizzled(start + (r // 64) * leading + (k // 8) * stride + (k % 8) * 128 + (r % 64) * 2)


_layouts: dict[tuple, np.ndarray] = {}


def _layout(descriptor: int, rows: int, k_major: bool) -> np.ndarray:
    key = (descriptor, rows, k_major)
    if key not in _layouts:
        _layouts[key] = described(*key) - SHARED_BASE
    return _layouts[key]


class Product:
    """One warp's part of a wgmma: 16 rows of D = A·B (+ D).

    Its accumulators hold NaN from here on, in arrays that `perform` fills: whatever reads them before is wrong, and
    register moves keep pointing at them.
    """

    def __init__(self, warp: Any, d: tuple, a: Any, b: Any, adds: bool, n: int, kind: str, transposed: bool, line: int):
        self.line = line
        self.shared, self.kind, self.adds, self.n = warp.block.shared, kind, adds, n
        self.before = [warp.R[i] for i in d]
        self.after = [np.full(LANES, np.nan, np.float32) for _ in d]
        for i, token in zip(d, self.after, strict=True):
            warp.R[i] = token
        self.a = a
        self.b_at = _layout(int(b[0]), n, not transposed)
        self.a_at = None
        if not isinstance(a, tuple):
            first = 16 * (warp.number % 4)
            self.a_at = _layout(int(a[0]), 64, True)[first : first + 16]
        for at in (self.b_at, self.a_at):
            if at is not None and (at.min() < 0 or at.max() + 2 > len(self.shared.bytes)):
                raise BadAccess("wgmma: an operand outside of the block's shared memory")

    def words(self) -> np.ndarray:
        """Words of shared memory that it reads."""
        found = [self.b_at] if self.a_at is None else [self.b_at, self.a_at]
        return np.concatenate([np.unique(at >> 2) for at in found])

    def perform(self) -> None:
        """Multiply."""
        memory = self.shared.bytes.view(np.uint16)
        right = floats(memory[self.b_at >> 1], self.kind)
        left = a_matrix(self.a, self.kind) if self.a_at is None else floats(memory[self.a_at >> 1], self.kind)
        product = left @ right.T
        for j in range(self.n // 8):
            for e in range(4):
                value = product[ROW + 8 * (e >> 1), 8 * j + COLUMN + (e & 1)]
                i = 4 * j + e
                self.after[i][:] = value + self.before[i] if self.adds else value


class Operation:
    """A wgmma of a warpgroup: it starts when all four warps have issued it, and ends for all of them at once.

    (CUTLASS's pipelines rest on that: one thread of the warpgroup that has waited gives the operands' memory free.)
    That the other warps' own loads and stores before it are over follows too, but is not relied on here.
    """

    def __init__(self, number: int):
        self.number = number
        self.parts: dict[int, Product] = {}


class Warpgroup:
    """The wgmma of four neighbouring warps, in order."""

    def __init__(self, shared: Any, agent: int):
        self.shared, self.agent = shared, agent
        self.issued: dict[int, int] = {}  # by each warp
        self.count = 0
        self.queue: list[Operation] = []  # not executed yet

    def issue(self, warp: Any, part: Product) -> Operation:
        """A warp's part of its next operation."""
        number = self.issued[warp.number] = self.issued.get(warp.number, 0) + 1
        if number > self.count:
            self.count = number
            self.queue.append(Operation(number))
        operation = self.queue[number - self.queue[0].number]
        operation.parts[warp.number] = part
        return operation

    def advance(self, upto: Operation | None = None) -> None:
        """Execute what all four have issued, at most up to an operation."""
        while self.queue and len(self.queue[0].parts) == 4 and (upto is None or self.queue[0].number <= upto.number):
            operation = self.queue.pop(0)
            for part in operation.parts.values():
                part.perform()
                self.shared.note_read_by(self.agent, operation.number, part.words(), part.line)
