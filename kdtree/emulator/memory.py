"""Memory of the emulated GPU: global buffers and a block's shared memory, with bounds; who wrote what before whom.

Happens-before is kept as in FastTrack (Flanagan and Freund, PLDI 2009): every agent (a warp, or the copies that end at
one mbarrier) has a clock, what synchronises joins vector clocks, and an access is a race when an earlier one of
another agent is not ordered before it. Words are of 4 bytes. Lanes of one warp are not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SPACE_BITS = 36  # of a buffer's addresses: 64 GiB each
SHARED_BASE = 1024  # where a block's shared memory begins; 0 is not an address
RANK_BITS = 24  # an address in the cluster's window: 1 + the block's rank, above an address in its shared memory


class BadAccess(RuntimeError):
    """An address that no buffer holds, or one that is not aligned."""


class Race(RuntimeError):
    """Accesses that nothing orders."""


class Global:
    """Global memory: NumPy arrays at addresses of their own."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Address of `array`, which must be C-contiguous; loads and stores go to its memory."""
        assert array.flags.c_contiguous
        self.buffers.append(array.reshape(-1).view(np.uint8))
        return len(self.buffers) << SPACE_BITS

    def find(self, address: int, size: int) -> tuple[np.ndarray, int]:
        """(bytes of the buffer, offset) of `size` bytes at `address`."""
        number, offset = address >> SPACE_BITS, address & ((1 << SPACE_BITS) - 1)
        if not 1 <= number <= len(self.buffers) or offset + size > len(self.buffers[number - 1]):
            raise BadAccess(f"global address {address:#x}: no buffer holds {size} bytes there")
        return self.buffers[number - 1], offset

    def places(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of the buffer, offsets) of accesses of `size` bytes by several lanes, all in one buffer."""
        if len(addresses) == 0:
            return np.empty(0, np.uint8), addresses
        low, high = int(addresses.min()), int(addresses.max())
        buffer, _ = self.find(low, size)
        self.find(high, size)
        if low >> SPACE_BITS != high >> SPACE_BITS:
            raise BadAccess(f"global addresses {low:#x} and {high:#x} of one instruction are in two buffers")
        if (addresses & np.uint64(size - 1)).any():
            raise BadAccess(f"global address {low:#x}: not a multiple of {size}")
        return buffer, (addresses & np.uint64((1 << SPACE_BITS) - 1)).astype(np.int64)


@dataclass
class Access:
    """Who accesses shared memory: an agent, its vector clock, the instruction, and whether it is the async proxy."""

    agent: int
    clock: np.ndarray
    line: int
    is_async: bool = False


class Shared:
    """A block's shared memory. Agents: warps, warpgroups, and copies, an agent an mbarrier; all but these read."""

    def __init__(self, size: int, readers: int, agents: int):
        self.bytes = np.full(-(-size // 4) * 4, 0xA5, dtype=np.uint8)  # poison
        words = len(self.bytes) // 4
        self.reserved = np.zeros(words, dtype=bool)  # mbarriers lie there
        self.found: dict[tuple[int, int, str], str] = {}  # races: lines and kind -> what happened first
        self.writer = np.full(words, -1, dtype=np.int16)
        self.epoch = np.zeros(words, dtype=np.int32)
        self.line = np.zeros(words, dtype=np.int32)
        self.by_async = np.zeros(words, dtype=bool)
        self.reads = np.zeros((readers, words), dtype=np.int32)
        self.read_line = np.zeros((readers, words), dtype=np.int32)
        self.fenced = np.zeros(agents, dtype=np.int32)  # epochs up to which an agent's writes are in the async proxy

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Byte offsets of accesses of `size` bytes."""
        at = addresses.astype(np.int64) - SHARED_BASE
        if len(at) and (at.min() < 0 or at.max() + size > len(self.bytes)):
            raise BadAccess(f"shared address {int(addresses.min()):#x}…{int(addresses.max()):#x}: outside the block's")
        if (at & (size - 1)).any():
            raise BadAccess(f"shared address {int(addresses[0]):#x}: not a multiple of {size}")
        return at

    def words(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Words that accesses of `size` bytes touch."""
        if size <= 4:
            return offsets >> 2
        return ((offsets >> 2)[:, None] + np.arange(size // 4)).reshape(-1)

    def read(self, who: Access, words: np.ndarray, *, note: bool = True) -> None:
        """A read, noted or only checked."""
        if len(words) == 0:
            return
        self._after_writes(who, words, "reads")
        if note:
            self.note_read(who, words)

    def note_read(self, who: Access, words: np.ndarray) -> None:
        """The same, unchecked."""
        self.note_read_by(who.agent, who.clock[who.agent], words, who.line)

    def note_read_by(self, agent: int, epoch: int, words: np.ndarray, line: int) -> None:
        """A read by an agent at a time of its own."""
        self.reads[agent, words] = epoch
        self.read_line[agent, words] = line

    def write(self, who: Access, words: np.ndarray, epoch: int | None = None, agent: int | None = None) -> None:
        """Note a write; one that lands later (a copy) as of `agent` and its `epoch`. Raises BadAccess."""
        if self.reserved[words].any():
            raise BadAccess(f"line {who.line} writes over an mbarrier")
        if len(words) == 0:
            return
        self._after_writes(who, words, "writes")
        late = self.reads[:, words] > who.clock[: len(self.reads), None]
        late[who.agent] = False
        if late.any():
            reader, i = (int(x[0]) for x in np.nonzero(late))
            key = (int(self.read_line[reader, words[i]]), who.line, "write after read")
            self.found.setdefault(
                key,
                f"line {who.line} (agent {who.agent}) writes shared byte {4 * words[i]}, which line {key[0]} (agent "
                f"{reader}) reads: nothing orders them",
            )
        self.writer[words] = who.agent if agent is None else agent
        self.epoch[words] = who.clock[who.agent] if epoch is None else epoch
        self.line[words] = who.line
        self.by_async[words] = who.is_async

    def _after_writes(self, who: Access, words: np.ndarray, verb: str) -> None:
        writer, epoch = self.writer[words], self.epoch[words]
        known = np.where(writer < 0, np.int64(2**62), who.clock[writer])
        bad = (epoch > known) & (writer != who.agent)
        if who.is_async:  # ordinary writes need a fence between the proxies
            unfenced = (writer >= 0) & ~self.by_async[words] & (epoch > self.fenced[writer])
            bad |= unfenced
        if bad.any():
            i = int(np.nonzero(bad)[0][0])
            word = int(words[i])
            how = "no fence between the proxies" if who.is_async and not self.by_async[word] else "nothing orders them"
            self.found.setdefault(
                (int(self.line[word]), who.line, verb),
                f"line {who.line} (agent {who.agent}) {verb} shared byte {4 * word}, which line {self.line[word]} "
                f"(agent {int(writer[i])}) wrote: {how}",
            )


def joined(into: np.ndarray, other: Any) -> None:
    """Join a vector clock into another."""
    np.maximum(into, other, out=into)
