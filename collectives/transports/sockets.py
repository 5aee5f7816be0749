"""Rows over TCP connections of our own, one between every two ranks; those of tensors on CUDA by
way of pinned host memory.

A message is an envelope (tag and bytes of the payload), a header of 64 bytes and the payload, one
behind the other: nobody asks before he sends. ``engine`` moves them.

Note: why not through Gloo. Its messages wait for a word from the receiver, its threads wake for
every part of one, and processes end where a message is longer than its receive. Measured in
docs/transports.md.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch

from commpress.collectives.frame import HEADER, Rows, memory_of, rows_in
from commpress.collectives.transports.engine import SocketEngine
from commpress.collectives.transports.meeting import Meeting, nothing
from commpress.collectives.transports.messages import Parts, SocketTransfer
from commpress.collectives.transports.scratch import Scratch
from commpress.collectives.transports.staged import Staged
from commpress.errors import CommunicationError
from commpress.work import Work

_PLACE = 160  # bytes in which a rank says where it is


class SocketTransport:
    """Among all ranks of a mesh, or some of them, ascending."""

    ordered, checks = False, True

    def __init__(self, mesh: "Mesh", *, timeout: timedelta, members: Sequence[int] = ()) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.members = tuple(members or range(len(mesh.world)))
        self.rank, self.size = self.members.index(mesh.rank), len(self.members)
        self.failure: str | None = None
        self._scratch = Scratch(pinned=True)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if inp.device.type == "cuda":
            return Staged(self, self._scratch).all_to_all(out, inp, tag)
        wanted = dict.fromkeys(range(self.size), bytes(rows_in(inp)[self.rank][:HEADER]))
        theirs, ours = _parts(out), _parts(inp)
        out[self.rank] = inp[self.rank]
        return self._post(theirs, ours, wanted, tag, (out, inp))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if inp.device.type == "cuda":
            return Staged(self, self._scratch).all_gather(out, inp, tag)
        ours = _parts(inp)[0]
        out[self.rank] = inp[0]
        return self._post(_parts(out), dict.fromkeys(range(self.size), ours), None, tag, (out, inp))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        if any(p.device.type == "cuda" for p in (*out.payloads.values(), *inp.payloads.values())):
            return Staged(self, self._scratch).exchange(out, inp, wanted, tag)
        rows = rows_in(wanted)
        expected = {r: bytes(rows[r]) for r in out.payloads}
        if self.rank in inp.payloads:
            out.payloads[self.rank].copy_(inp.payloads[self.rank])
            out.headers[self.rank] = inp.headers[self.rank]
        return self._post(_apart(out, self.rank), _apart(inp, self.rank), expected, tag, (out, inp))

    def subset(self, ranks: Sequence[int]) -> "SocketTransport | None":
        if self.rank not in ranks:
            return None
        members = sorted(self.members[r] for r in ranks)
        return SocketTransport(self.mesh, timeout=self.timeout, members=members)

    def abandon(self, reason: str) -> None:
        self.failure = reason
        self.mesh.engine.abandon(reason)

    def peer(self, rank: int) -> str:
        """The name of a rank in messages: its number here, and globally where that differs."""
        world = self.mesh.world[self.members[rank]]
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def lost(self) -> dict[int, str]:
        """Ranks that are gone, as far as their connections say by now, and how."""
        gone = self.mesh.engine.look()
        return {r: gone[member] for r, member in enumerate(self.members) if member in gone}

    def drive(self, transfer: SocketTransfer) -> None:
        self.mesh.engine.drive(transfer, time.monotonic() + self.timeout.total_seconds())

    def _post(
        self,
        out: Mapping[int, Parts],
        inp: Mapping[int, Parts],
        wanted: dict[int, bytes] | None,
        tag: int,
        keep: object,
    ) -> SocketTransfer:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Destroy the process group and "
                "build a new one."
            )
        return self.mesh.engine.post(SocketTransfer(self, wanted, keep), out, inp, tag)


class Mesh:
    """The connections of one rank, shared by a transport and its subsets: closed when the last of
    them goes.

    Made by all ranks together. ``world`` has their global numbers; ``tell`` gives every rank what
    all of them say. ``check`` is called while ranks are awaited, and raises if one of them is gone.
    """

    def __init__(
        self,
        rank: int,
        world: Sequence[int],
        tell: Callable[[bytes], list[bytes]],
        timeout: timedelta,
        check: Callable[[], object] = nothing,
    ) -> None:
        self.rank, self.world = rank, tuple(world)
        deadline = time.monotonic() + timeout.total_seconds()
        meeting = Meeting(rank, len(world), check=lambda missing: check())
        try:
            meeting.learn(
                [place.decode().strip() for place in tell(meeting.here.encode().ljust(_PLACE))]
            )
            connections = meeting.connect_all(deadline)
        finally:
            meeting.close()
        self.engine = SocketEngine(connections)
        weakref.finalize(self, self.engine.close)


def _parts(message: torch.Tensor) -> dict[int, Parts]:
    return {r: (row,) for r, row in enumerate(rows_in(message))}


def _apart(rows: Rows, rank: int) -> dict[int, Parts]:
    """The rows that peers send or get."""
    headers = rows_in(rows.headers)
    return {r: (headers[r], memory_of(p)) for r, p in rows.payloads.items() if r != rank}
