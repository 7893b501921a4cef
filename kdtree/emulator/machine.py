"""The emulated GPU: blocks of warps that run in random order, one basic block at a time.

Everything that may happen later does so at a random time: copies land, wgmma reads its operands, warps go on. A seed
fixes the order. What is found: wrong results, accesses outside of buffers, races in shared memory, missing fences
between the proxies, barriers that do not fit, deadlocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtree.emulator.arithmetic import LANES, stored
from kdtree.emulator.compile import Compiler
from kdtree.emulator.memory import SHARED_BASE, Global, Race, Shared, joined
from kdtree.emulator.program import DTYPES, Program
from kdtree.emulator.tensor import Map, MBarrier, Warpgroup
from kdtree.emulator.warp import Deadlock, Warp

MOST_SHARED, MOST_CLUSTER = 227 * 1024, 8
MBARRIERS = 48  # of a block, at most
MAP_SPACE = 1 << 60  # generic addresses of parameters that are tensor maps
IDLE_ROUNDS = 100_000  # of all warps, in which none has ended


class Cluster:
    """Blocks that read each other's shared memory, and meet."""

    def __init__(self, machine: Machine, indices: list[tuple[int, int, int]]):
        warps = -(-machine.threads // LANES)
        readers = warps + -(-warps // 4)
        self.readers, self.agents = readers * len(indices), (readers + MBARRIERS) * len(indices)
        self.arrived: set[Warp] = set()
        self.waiting: list[Warp] = []
        self.phase = 0
        self.coming, self.known = (np.zeros(self.agents, dtype=np.int32) for _ in range(2))
        self.blocks = [Block(machine, self, rank, index) for rank, index in enumerate(indices)]
        self.warps = [warp for block in self.blocks for warp in block.warps]

    def arrive(self, warp: Warp, clock: np.ndarray) -> None:
        """barrier.cluster.arrive, which makes known what happened before `clock`."""
        if warp.cluster_phase is not None:
            raise RuntimeError(f"{warp}: arrives twice at the cluster's barrier, without a wait in between")
        warp.cluster_phase = self.phase
        self.arrived.add(warp)
        joined(self.coming, clock)
        warp.tick()
        if len(self.arrived) == len([w for w in self.warps if not w.done]):
            joined(self.known, self.coming)
            self.arrived.clear()
            self.phase += 1

    def passed(self, warp: Warp) -> bool:
        """Has the phase in which the warp arrived ended?"""
        return self.phase > warp.cluster_phase


class Block:
    """A block: shared memory, barriers, warps. Agents of a cluster: all readers of all blocks, then all mbarriers."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, index: tuple[int, int, int]):
        self.machine, self.cluster, self.rank, self.index = machine, cluster, rank, index
        warps = -(-machine.threads // LANES)
        groups = -(-warps // 4)
        self.agents, first = cluster.agents, rank * (warps + groups)
        size = machine.program.static_shared + machine.dynamic_shared
        self.shared = Shared(size, cluster.readers, cluster.agents)
        self.warpgroups = [Warpgroup(self.shared, first + warps + i) for i in range(groups)]
        self.parameters = machine.parameters
        self.parameter_addresses = machine.parameter_addresses
        self.all_threads = np.full(LANES, machine.threads, np.uint32)
        self.mbarriers: dict[int, MBarrier] = {}
        self.meetings: dict[int, dict[str, Any]] = {}
        self.warps = [Warp(self, i, first + i) for i in range(warps)]

    def meet(self, warp: Warp, which: int, count: int, waits: bool) -> None:
        """bar.sync and bar.arrive."""
        if not 0 <= which < 16 or count % LANES or not count:
            raise RuntimeError(f"{warp}: barrier {which} of {count} threads")
        m = self.meetings.setdefault(which, {"count": count, "here": 0, "waiting": [], "clock": warp.clock.copy()})
        if m["count"] != count:
            raise RuntimeError(f"{warp}: barrier {which} of {count} threads, others wait there for {m['count']}")
        joined(m["clock"], warp.clock)
        warp.tick()
        m["here"] += LANES
        if waits:
            m["waiting"].append(warp)
            warp.blocked, warp.stop = f"barrier {which}", True
        if m["here"] == count:
            del self.meetings[which]
            for other in m["waiting"]:
                other.blocked = ""
                joined(other.clock, m["clock"])

    def ended_early(self) -> None:
        """When its last warp returns: has it waited for the others of the cluster to read its shared memory?"""
        if not all(w.done for w in self.warps):
            return
        known = np.max([w.clock for w in self.warps], axis=0)[: self.cluster.readers, None]
        late = np.nonzero((self.shared.reads > known).any(axis=1))[0]
        here = {w.agent for w in self.warps} | {g.agent for g in self.warpgroups}
        if late := [int(agent) for agent in late if int(agent) not in here]:
            raise Race(f"block {self.index} ends, and nothing orders that behind reads of its memory by agents {late}")

    def make_mbarrier(self, warp: Warp, address: int, count: int) -> None:
        """mbarrier.init."""
        at = self.shared.offsets(np.array([address]), 8)[0]
        if address in self.mbarriers or len(self.mbarriers) == MBARRIERS:
            raise RuntimeError(f"{warp}: mbarrier {at} is initialised twice, or there are more than {MBARRIERS}")
        agent = self.cluster.readers + self.rank * MBARRIERS + len(self.mbarriers)
        self.mbarriers[address] = MBarrier(count, agent, self.agents)
        self.shared.reserved[at // 4 : at // 4 + 2] = True

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address."""
        found = self.mbarriers.get(address)
        if found is None:
            raise RuntimeError(f"shared byte {address - SHARED_BASE} is used as an mbarrier, which it is not yet")
        return found


class Machine:
    """Runs one launch at a time of a parsed program.

    Args:
        program: see `program.parse`.
        threads: a block.
        dynamic_shared: bytes a block.
        cluster: neighbouring blocks along x that share a cluster.
        memory: what pointers point to.
        seed: of the order of things.
    """

    def __init__(
        self,
        program: Program,
        *,
        threads: int,
        dynamic_shared: int = 0,
        cluster: int = 1,
        memory: Global | None = None,
        seed: int = 0,
    ):
        if program.static_shared + dynamic_shared > MOST_SHARED or cluster > MOST_CLUSTER:
            raise RuntimeError(
                f"{program.static_shared + dynamic_shared} bytes of shared memory a block, {cluster} blocks a cluster: "
                f"Hopper has at most {MOST_SHARED} and, portably, {MOST_CLUSTER}"
            )
        self.program, self.threads, self.dynamic_shared = program, threads, dynamic_shared
        self.cluster = cluster
        self.memory = memory or Global()
        self.rng = np.random.default_rng(seed)
        self.code = Compiler(program).blocks()
        self.register_dtypes = [np.dtype(DTYPES[stored(kind)]) for kind in program.registers.values()]
        self.in_flight: list[Any] = []
        self.maps: list[Map | None] = []

    def map_at(self, address: int) -> Map:
        """The tensor map at a generic address."""
        number = (address - MAP_SPACE) // 128
        if not 0 <= number < len(self.maps) or self.maps[number] is None:
            raise RuntimeError(f"{address:#x} is used as the address of a tensor map, which it is not")
        return self.maps[number]

    def launch(self, grid: tuple[int, ...], values: list[Any]) -> None:
        """Run all blocks to their end; `values` are numbers (pointers are addresses of `memory`) and Maps."""
        self.grid = (*grid, 1, 1)[:3]
        self.maps = [v if isinstance(v, Map) else None for v in values]
        self.parameter_addresses = [np.full(LANES, MAP_SPACE + 128 * i, np.uint64) for i in range(len(values))]
        self.parameters = []
        for value, name in zip(values, self.program.parameters, strict=True):
            size = self.program.sizes[name]
            if isinstance(value, Map):
                made = np.zeros(LANES, np.uint64)
            elif isinstance(value, float):
                made = np.full(LANES, value, np.float32 if size == 4 else np.float64)
            else:
                made = np.full(LANES, int(value) & ((1 << 8 * size) - 1), f"u{size}")
            self.parameters.append(made)
        if self.grid[0] % self.cluster:
            raise RuntimeError(f"a grid of {self.grid} blocks in clusters of {self.cluster}")
        indices = [index[::-1] for index in np.ndindex(*self.grid[::-1])]
        parts = [indices[i : i + self.cluster] for i in range(0, len(indices), self.cluster)]
        blocks = [block for part in parts for block in Cluster(self, part).blocks]
        with np.errstate(all="ignore"):
            self._run([warp for block in blocks for warp in block.warps])
        found = {key: text for block in blocks for key, text in block.shared.found.items()}
        if found:
            raise Race("\n".join(text for _, text in sorted(found.items())))

    def _run(self, warps: list[Warp]) -> None:
        idle = 0
        while warps:
            ready = [w for w in warps if w.ready()]
            if not ready and not self.in_flight:
                where = "; ".join(f"{w} ({w.blocked or 'mbarrier'})" for w in warps[:8])
                raise Deadlock(f"nothing can go on: {where}")
            self.rng.shuffle(ready)
            for warp in ready:
                warp.run(int(self.rng.integers(1, 60)))
                if self.in_flight and self.rng.random() < 0.3:
                    self._land()
            if not ready:
                self._land()
            if any(w.done for w in warps):
                warps = [w for w in warps if not w.done]
                idle = 0
                for copy in self.in_flight:
                    for block in (copy.block, copy.source):
                        if all(w.done for w in block.warps):
                            raise RuntimeError(f"block {block.index} has ended while a copy of its memory is under way")
            idle += 1
            if idle > IDLE_ROUNDS:
                raise Deadlock(f"no warp has ended for long: {'; '.join(map(str, warps[:8]))}")

    def _land(self) -> None:
        self.in_flight.pop(int(self.rng.integers(len(self.in_flight)))).perform()
