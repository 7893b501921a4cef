"""A warp of the emulated GPU: where its lanes are, and what its instructions do to memory and to other warps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree.emulator import tensor
from kdtree.emulator.arithmetic import LANES
from kdtree.emulator.memory import RANK_BITS, Access, BadAccess, joined

if TYPE_CHECKING:
    from kdtree.emulator.machine import Block

DONE = 1 << 30  # where a lane is that has returned


class Deadlock(RuntimeError):
    """Nothing can go on."""


def lanes_of(mask: np.ndarray | None) -> np.ndarray:
    """Numbers of the lanes that take part."""
    return np.arange(LANES) if mask is None else np.nonzero(mask)[0]


class Warp:
    """32 lanes. Methods named after instructions take (…, mask or None, line)."""

    def __init__(self, block: Block, number: int, agent: int):
        self.block, self.number, self.agent = block, number, agent
        machine = block.machine
        self.machine = machine
        self.code = machine.code
        self.dtypes = machine.register_dtypes
        self.R: list[np.ndarray] = [np.zeros(LANES, d) for d in self.dtypes]
        self.pc: int | None = 0  # None: the lanes are in different places, `pcs`
        self.pcs = np.zeros(LANES, dtype=np.int64)
        if machine.threads < LANES * (number + 1):  # the last warp of a block need not be full
            self.pc, self.pcs[machine.threads % LANES :] = None, DONE
        self.clock = np.zeros(block.agents, dtype=np.int32)
        self.clock[agent] = 1
        self.at_fence = np.zeros_like(self.clock)  # the clock at its last fence
        self.blocked = ""  # at a barrier, which
        self.asleep: tuple[tensor.MBarrier, int] | None = None  # until this phase ends
        self.cluster_phase: int | None = None  # in which it has arrived at the cluster's barrier
        self.meets_cluster, self.has_met_cluster = False, False
        self.stop = False  # end this turn
        self.line = 0
        self.products: list[list[tensor.Operation]] = [[]]  # wgmma: groups, the last of them open
        self.awaited: list[tensor.Operation] = []
        self.stores: list[list[tensor.BulkStore]] = [[]]
        self.copies: list[list[tuple]] = [[]]
        lane = np.arange(LANES, dtype=np.uint32)
        self.special = {
            "%tid.x": lane + np.uint32(32 * number),
            "%laneid": lane,
            "%ntid.x": np.full(LANES, machine.threads, np.uint32),
            "%cluster_ctarank": np.full(LANES, block.rank, np.uint32),
            "%clock": np.zeros(LANES, np.uint32),
        }
        for axis, name in enumerate("xyz"):
            self.special[f"%ctaid.{name}"] = np.full(LANES, block.index[axis], np.uint32)
            self.special[f"%nctaid.{name}"] = np.full(LANES, machine.grid[axis], np.uint32)
            if axis:
                self.special[f"%tid.{name}"] = np.zeros(LANES, np.uint32)
                self.special[f"%ntid.{name}"] = np.ones(LANES, np.uint32)

    # ---- control

    @property
    def done(self) -> bool:
        """Have all lanes returned?"""
        return self.pc == DONE

    def ready(self) -> bool:
        """Can it go on?"""
        if self.blocked or self.done or not self._products_ended():
            return False
        if self.meets_cluster:
            if not self.block.cluster.passed(self):
                return False
            self.meets_cluster, self.has_met_cluster, self.cluster_phase = False, True, None
            joined(self.clock, self.block.cluster.known)
        if self.asleep is not None:
            barrier, phase = self.asleep
            if barrier.phase == phase:
                return False
            self.asleep = None
        return True

    def run(self, blocks: int) -> None:
        """Execute up to so many basic blocks, until it has to wait."""
        self.stop = False
        while blocks and not self.stop and not self.done:
            blocks -= 1
            if self.pc is not None:
                self._uniform()
            else:
                self._diverged()

    def _uniform(self) -> None:
        pc = self.pc
        code = self.code[pc]
        self.line = code.line
        taken = code.full(self, self.R, None)
        if taken is None:
            self.pc = pc + 1
        elif taken is True or taken.all():
            self.pc = DONE if code.ends else code.target
        elif not taken.any():
            self.pc = pc + 1
        else:
            self.pc = None
            self.pcs = np.where(taken, DONE if code.ends else code.target, pc + 1)
        if self.pc == DONE:
            self.finish()

    def _diverged(self) -> None:
        """The lanes that are furthest behind go on, but wait where a warp has to be together."""
        pcs = self.pcs
        live = pcs < DONE
        for pc in np.unique(pcs[live]):
            mask = pcs == pc
            if self.code[pc].together and not (mask == live).all():
                continue
            break
        else:
            where = {int(self.code[p].line) for p in np.unique(pcs[live])}
            raise Deadlock(f"{self}: lanes wait for each other at different instructions, lines {sorted(where)}")
        code = self.code[pc]
        self.line = code.line
        taken = code.partial(self, self.R, mask)
        target = DONE if code.ends else code.target
        if taken is None:
            self.pcs = np.where(mask, pc + 1, pcs)
        elif taken is True:
            self.pcs = np.where(mask, target, pcs)
        else:
            self.pcs = np.where(mask, np.where(taken, target, pc + 1), pcs)
        first = int(self.pcs[0])
        if (self.pcs == first).all():
            self.pc = first
            if first == DONE:
                self.finish()

    def finish(self) -> None:
        """All lanes have returned."""
        self._store(0)
        if any(self.products) or any(self.copies):
            raise RuntimeError(f"{self}: returned with copies or wgmma in flight")
        self.block.ended_early()

    def __repr__(self) -> str:
        return f"block {self.block.index} warp {self.number} at line {self.line}"

    def who(self, line: int, *, is_async: bool = False) -> Access:
        """This warp as one that accesses shared memory."""
        return Access(self.agent, self.clock, line, is_async)

    def tick(self) -> None:
        """What this warp does next is later than what it has made known."""
        self.clock[self.agent] += 1

    def set(self, register: int, values: np.ndarray, mask: np.ndarray | None) -> None:
        """A register in the lanes of the mask."""
        dtype = self.dtypes[register]
        if values.dtype != dtype:
            values = values.view(dtype) if values.dtype.itemsize == dtype.itemsize else values.astype(dtype)
        self.R[register] = values if mask is None else np.where(mask, values, self.R[register])

    # ---- memory

    def _block_of(self, addresses: np.ndarray, *, window: bool) -> tuple[Block, np.ndarray]:
        """(block, addresses in it) of addresses of this block or, all of them, of one block of the cluster.

        window: the instruction takes addresses of the cluster's window.
        """
        ranks = np.unique(addresses >> RANK_BITS)
        if len(ranks) > 1:
            raise BadAccess(f"{self}: one instruction reaches into the shared memory of several blocks")
        if not len(ranks) or ranks[0] == 0:
            return self.block, addresses
        if not window:
            raise BadAccess(f"{self}: ld.shared or st.shared with an address of the cluster's window")
        if ranks[0] > len(self.block.cluster.blocks):
            raise BadAccess(f"{self}: no block {int(ranks[0]) - 1} in this cluster")
        block = self.block.cluster.blocks[int(ranks[0]) - 1]
        if not self.has_met_cluster:
            raise BadAccess(f"{self}: reaches into block {block.index} without knowing that it has begun")
        if block is not self.block and all(w.done for w in block.warps):
            raise BadAccess(f"{self}: reaches into the shared memory of block {block.index}, which has ended")
        return block, addresses & np.uint32((1 << RANK_BITS) - 1)

    def map_shared(self, register: int, addresses: np.ndarray, ranks: np.ndarray, mask: Any, line: int) -> None:
        """mapa."""
        self.set(register, addresses + ((ranks + np.uint32(1)) << np.uint32(RANK_BITS)), mask)

    def cluster_arrive(self, mask: Any, line: int) -> None:
        self.block.cluster.arrive(self, self.clock)

    def cluster_arrive_relaxed(self, mask: Any, line: int) -> None:
        self.block.cluster.arrive(self, self.at_fence)

    def cluster_wait(self, mask: Any, line: int) -> None:
        if self.cluster_phase is None:
            raise RuntimeError(f"{self}: waits at the cluster's barrier, at which it has not arrived")
        self.meets_cluster, self.stop = True, True

    def load_shared(
        self, registers: tuple, addresses: np.ndarray, size: int, mask: Any, line: int, *, window: bool = False
    ) -> None:
        lanes = lanes_of(mask)
        block, here = self._block_of(addresses[lanes], window=window)
        shared = block.shared
        at = shared.offsets(here, size * len(registers))
        shared.read(self.who(line), shared.words(at, size * len(registers)))
        memory = shared.bytes.view(f"u{size}")
        for i, register in enumerate(registers):
            values = np.zeros(LANES, dtype=f"u{size}")
            values[lanes] = memory[at // size + i]
            self.set(register, values, mask)

    def store_shared(
        self, values: tuple, addresses: np.ndarray, size: int, mask: Any, line: int, *, window: bool = False
    ) -> None:
        lanes = lanes_of(mask)
        for rank in np.unique(addresses[lanes] >> RANK_BITS):  # to several blocks of the cluster at once is fine
            chosen = lanes[addresses[lanes] >> RANK_BITS == rank]
            block, here = self._block_of(addresses[chosen], window=window)
            shared = block.shared
            at = shared.offsets(here, size * len(values))
            memory = shared.bytes.view(f"u{size}")
            new = np.stack([value.view(f"u{value.dtype.itemsize}")[chosen].astype(f"u{size}") for value in values], 1)
            places = (at // size)[:, None] + np.arange(len(values))
            # Warps may store what is there already: flags that only ever rise.
            fresh = (memory[places] != new).any(axis=1)
            shared.write(self.who(line), shared.words(at[fresh], size * len(values)))
            memory[places] = new

    def load_global(self, registers: tuple, addresses: np.ndarray, size: int, mask: Any, line: int) -> None:
        lanes = lanes_of(mask)
        if not len(lanes):
            return
        buffer, at = self.machine.memory.places(addresses[lanes], size * len(registers))
        for i, register in enumerate(registers):
            values = np.zeros(LANES, dtype=f"u{size}")
            values[lanes] = buffer[(at + i * size)[:, None] + np.arange(size)].view(f"u{size}")[:, 0]
            self.set(register, values, mask)
        self.stop = True  # another warp may have its turn: this is how one waits for another block

    def store_global(self, values: tuple, addresses: np.ndarray, size: int, mask: Any, line: int) -> None:
        lanes = lanes_of(mask)
        if not len(lanes):
            return
        buffer, at = self.machine.memory.places(addresses[lanes], size * len(values))
        for i, value in enumerate(values):
            raw = value.view(f"u{value.dtype.itemsize}")[lanes].astype(f"u{size}")
            buffer[(at + i * size)[:, None] + np.arange(size)] = raw[:, None].view(np.uint8)

    def atomic(
        self, registers: tuple, addresses: np.ndarray, values: np.ndarray, how: str, mask: Any, line: int
    ) -> None:
        lanes = lanes_of(mask)
        before = np.zeros(LANES, dtype=np.uint32)
        for lane in lanes:
            buffer, at = self.machine.memory.find(int(addresses[lane]), 4)
            word = buffer[at : at + 4].view(np.uint32)
            before[lane] = word[0]
            if how == "add":
                word[0] = (int(word[0]) + int(values[lane])) & 0xFFFFFFFF
            else:
                raise NotImplementedError(f"atom.{how}")
        self.set(registers[0], before, mask)

    # ---- within the warp

    def shuffle(self, register: int, how: str, a: Any, b: Any, mask: Any, line: int) -> None:
        lane, by = np.arange(LANES), b.astype(np.int64)
        source = {"idx": by & 31, "bfly": lane ^ by, "up": lane - by, "down": lane + by}[how]
        # A lane without a source keeps its own value.
        self.set(register, a[np.where((0 <= source) & (source < LANES), source, lane)], mask)

    def vote(self, register: int, how: str, value: Any, mask: Any, line: int) -> None:
        lanes = lanes_of(mask)
        if how == "ballot":
            bits = sum(1 << int(i) for i in lanes[value[lanes]])
            self.set(register, np.full(LANES, bits, dtype=np.uint32), mask)
        else:
            chosen = value[lanes]
            self.set(register, np.full(LANES, chosen.any() if how == "any" else chosen.all()), mask)

    def elect(self, register: int, mask: Any, line: int) -> None:
        chosen = np.zeros(LANES, dtype=bool)
        chosen[lanes_of(mask)[0]] = True
        self.set(register, chosen, mask)

    # ---- barriers

    def barrier(self, which: np.ndarray, count: np.ndarray, waits: bool, mask: Any, line: int) -> None:
        lane = lanes_of(mask)[0]
        self.block.meet(self, int(which[lane]), int(count[lane]), waits)

    def mbarrier_init(self, addresses: Any, counts: Any, mask: Any, line: int) -> None:
        for lane in lanes_of(mask):
            self.block.make_mbarrier(self, int(addresses[lane]), int(counts[lane]))

    def mbarrier_arrive(self, addresses: Any, extra: Any, mask: Any, line: int) -> None:
        for lane in lanes_of(mask):
            barrier = self.block.mbarrier(int(addresses[lane]))
            if extra is not None:
                barrier.bytes += int(extra[lane])
            barrier.arrive(self.clock)
        self.tick()

    def mbarrier_try_wait(self, register: int, addresses: Any, parity: Any, mask: Any, line: int) -> None:
        ended = np.zeros(LANES, dtype=bool)
        for lane in lanes_of(mask):
            barrier = self.block.mbarrier(int(addresses[lane]))
            if barrier.phase & 1 != int(parity[lane]) & 1:
                ended[lane] = True
                joined(self.clock, barrier.known)
            elif mask is None:
                self.asleep, self.stop = (barrier, barrier.phase), True
        self.set(register, ended, mask)

    def fence_proxy(self, mask: Any, line: int) -> None:
        self.block.shared.fenced[self.agent] = self.clock[self.agent]
        self.at_fence = self.clock.copy()
        self.tick()

    # ---- copies by threads

    def copy(self, to: Any, of: Any, size: int, real: Any, mask: Any, line: int) -> None:
        shared, lanes = self.block.shared, lanes_of(mask)
        if not len(lanes):
            return
        at = shared.offsets(to[lanes], size)
        shared.write(self.who(line), shared.words(at, size))
        self.copies[-1].append((at, of[lanes].copy(), size, real[lanes].copy()))

    def copy_commit(self) -> None:
        self.copies.append([])

    def copy_wait(self, left: int, mask: Any, line: int) -> None:
        while len(self.copies) - 1 > left:
            for at, of, size, real in self.copies.pop(0):
                for i in range(len(at)):
                    data = np.zeros(size, np.uint8)
                    if real[i]:
                        buffer, start = self.machine.memory.find(int(of[i]), int(real[i]))
                        data[: real[i]] = buffer[start : start + int(real[i])]
                    self.block.shared.bytes[at[i] : at[i] + size] = data

    # ---- bulk copies

    def bulk_load(self, to: Any, maps: Any, coordinates: tuple, barriers: Any, mask: Any, line: int) -> None:
        for lane in lanes_of(mask):
            tensor_map = self.machine.map_at(int(maps[lane]))
            place = [int(np.int32(c[lane])) for c in coordinates]
            barrier = self.block.mbarrier(int(barriers[lane]))
            load = tensor.BulkLoad(self.block, tensor_map, int(to[lane]), place, barrier)
            who = self.who(line, is_async=True)
            self.block.shared.write(who, load.words(), epoch=barrier.phase + 1, agent=barrier.agent)
            self.machine.in_flight.append(load)

    def bulk_send(self, to: Any, of: Any, sizes: Any, barriers: Any, mask: Any, line: int) -> None:
        for lane in lanes_of(mask):
            block, there = self._block_of(to[lane : lane + 1], window=True)
            at_home, barrier_there = self._block_of(barriers[lane : lane + 1], window=True)
            if at_home is not block:
                raise BadAccess(f"{self}: a copy to block {block.index} that ends at an mbarrier of {at_home.index}")
            barrier = block.mbarrier(int(barrier_there[0]))
            send = tensor.BulkSend(self.block, block, int(of[lane]), int(there[0]), int(sizes[lane]), barrier, line)
            who = self.who(line, is_async=True)
            self.block.shared.read(who, send.words_of)
            block.shared.write(who, send.words_to, epoch=barrier.phase + 1, agent=barrier.agent)
            self.machine.in_flight.append(send)

    def bulk_store(self, maps: Any, coordinates: tuple, of: Any, mask: Any, line: int) -> None:
        for lane in lanes_of(mask):
            place = [int(np.int32(c[lane])) for c in coordinates]
            store = tensor.BulkStore(self.block, self.machine.map_at(int(maps[lane])), int(of[lane]), place)
            self.block.shared.read(self.who(line, is_async=True), store.words())
            self.stores[-1].append(store)

    def bulk_commit(self, mask: Any, line: int) -> None:
        self.stores.append([])

    def bulk_wait(self, left: int, mask: Any, line: int) -> None:
        self._store(left)

    def _store(self, left: int) -> None:
        """Execute groups of bulk stores, all but the last `left`."""
        while len(self.stores) - 1 > left:
            for store in self.stores.pop(0):
                store.perform()
                self.block.shared.note_read(self.who(0), store.words())

    # ---- tensor cores

    def load_matrix(self, registers: tuple, addresses: Any, transposed: bool, mask: Any, line: int) -> None:
        shared = self.block.shared
        at = shared.offsets(addresses[: 8 * len(registers)], 16)
        shared.read(self.who(line), shared.words(at, 16))
        rows = shared.bytes.view(np.uint16)[(at // 2)[:, None] + np.arange(8)]
        for i, register in enumerate(registers):
            self.set(register, tensor.fragment(rows[8 * i : 8 * i + 8], transposed), None)

    def store_matrix(self, addresses: Any, values: tuple, mask: Any, line: int) -> None:
        shared = self.block.shared
        at = shared.offsets(addresses[: 8 * len(values)], 16)
        shared.write(self.who(line), shared.words(at, 16))
        rows = np.concatenate([tensor.matrix(v) for v in values])
        shared.bytes.view(np.uint16)[(at // 2)[:, None] + np.arange(8)] = rows

    def mma(self, d: tuple, a: tuple, b: tuple, c: tuple, kind: str, mask: Any, line: int) -> None:
        for register, value in zip(d, tensor.mma(a, b, c, kind), strict=True):
            self.set(register, value, None)

    def wgmma(
        self, d: tuple, a: Any, b: Any, adds: Any, n: int, kind: str, transposed: bool, mask: Any, line: int
    ) -> None:
        part = tensor.Product(self, d, a, b, bool(adds[0]), n, kind, transposed, line)
        self.block.shared.read(self.who(line, is_async=True), part.words(), note=False)
        self.products[-1].append(self.block.warpgroups[self.number // 4].issue(self, part))
        if self.machine.rng.random() < 0.1:  # or at any time until it is waited for
            self.block.warpgroups[self.number // 4].advance()

    def wgmma_commit(self, mask: Any, line: int) -> None:
        self.products.append([])

    def wgmma_wait(self, left: int, mask: Any, line: int) -> None:
        self.awaited = []
        while len(self.products) - 1 > left:
            self.awaited += self.products.pop(0)
        self.stop = not self._products_ended()

    def _products_ended(self) -> bool:
        """Are the products it waits for issued by the whole warpgroup? Then they end now."""
        if self.awaited:
            if any(len(operation.parts) < 4 for operation in self.awaited):
                return False
            group = self.block.warpgroups[self.number // 4]
            group.advance(upto=self.awaited[-1])
            self.clock[group.agent] = max(self.clock[group.agent], self.awaited[-1].number)
            self.awaited = []
        return True
