"""Collectives of a process group over MPI (mpi4py), in Python, because torch's wheels are built
without MPI.

Bytes are sent point to point, directly between tensors; sums are torch's own arithmetic in the
order of Gloo's ring (``ring_order``), so no dtype needs an MPI type and results have Gloo's bits.
Lengths are not checked here but by the guard: Open MPI writes past the end of a receive buffer that
is too short.
"""

import weakref
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.collectives.transports.mpi import ending, host_buffer, mpi, within
from commpress.collectives.transports.staged import Scratch
from commpress.errors import InvalidArgument
from commpress.integrations.process_group.mpi_progress import MpiProgress, MpiWork, Steps
from commpress.integrations.process_group.ring_order import Fold, bounds, chunk

Tensors = Sequence[torch.Tensor]
SMALL = 1 << 14  # bytes: every rank reduces shorter buffers by itself, in one round
_TAGS = 1 << 14
_CPU = torch.device("cpu")


class MpiGroup:
    """Group inside a ``ProcessGroup``, with its own communicators; all its ranks make it together.

    ``communicator`` carries no data: others make copies of it, in the same order on every rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        limit: timedelta,
        *,
        epoch: str = "",
        connecting: float | None = None,
    ) -> None:
        self._mpi, self.rank, self.size, self.seconds = mpi(), rank, size, limit.total_seconds()
        self.communicator = self._communicator(
            store, epoch, self.seconds if connecting is None else connecting
        )
        self._data, self._pairs = (
            within(self.seconds, "a copy of it", self.communicator.Dup) for _ in range(2)
        )
        self._progress, self._scratch, self._calls = MpiProgress(), Scratch(), 0
        weakref.finalize(self, self._progress.close)

    def _communicator(self, store: dist.Store, epoch: str, seconds: float) -> Any:
        """Make a communicator of these ranks, which exchange their ranks in MPI; with an ``epoch``
        one without dead ranks."""
        world = self._mpi.COMM_WORLD
        store.set(f"mpi/{self.rank}", str(world.Get_rank()))
        places = [int(store.get(f"mpi/{r}")) for r in range(self.size)]
        if len(set(places)) < self.size or max(places) >= world.Get_size():
            raise InvalidArgument(
                f"the ranks of this group are {places} of {world.Get_size()} in MPI, expected one "
                "process each: start all of them with one mpirun"
            )
        group = world.Get_group().Incl(places)
        if epoch:
            make = partial(self._mpi.Intracomm.Create_from_group, group, f"commpress {epoch}")
            comm = within(seconds, "a communicator of the remaining ranks", make)
            ending.go_on(comm, set(range(world.Get_size())) - set(places))
        else:
            comm = world.Create_group(group)
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    # ------------------------------------------------------------ collectives

    def allreduce(self, tensors: Tensors, opts: Any) -> MpiWork:
        if (
            tensors[0].layout is torch.sparse_coo
            and len(tensors) == 1
            and opts.reduceOp == dist.ReduceOp.SUM
        ):
            return self._begin("all_reduce", self._sparse_sum(tensors[0]), tensors, opts)
        _dense(tensors)
        return self._begin("all_reduce", self._all_reduce(tensors, opts), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MpiWork:
        _dense(tensors)
        return self._begin("reduce", self._reduce(tensors[0], opts), tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MpiWork:
        for output, row in zip(outputs, inputs, strict=True):
            self._fit("reduce_scatter", row, output)
        steps = self._reduce_scatter(outputs, inputs, opts, whole=False)
        return self._begin("reduce_scatter", steps, outputs, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MpiWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MpiWork:
        rows = [self._dealt(i) for i in inputs]
        for output, row in zip(outputs, rows, strict=True):
            self._fit("reduce_scatter", row, output)
        steps = self._reduce_scatter(outputs, rows, opts, whole=True)
        return self._begin("reduce_scatter", steps, outputs, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> MpiWork:
        return self._begin("broadcast", self._broadcast(tensors[0], opts.rootRank), tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MpiWork:
        for row, given in zip(outputs, inputs, strict=True):
            self._fit("all_gather", row, given)
        outgoing = {r: list(inputs) for r in range(self.size)}
        incoming = {r: [row[r] for row in outputs] for r in range(self.size)}
        return self._begin(
            "all_gather", self._move(outgoing, incoming), [t for row in outputs for t in row], opts
        )

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> MpiWork:
        """Set ``outputs[r][i]`` to input i of rank r."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MpiWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MpiWork:
        return self.allgather([self._dealt(contiguous(o)) for o in outputs], inputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MpiWork:
        incoming: dict[int, Tensors] = {}
        if self.rank == opts.rootRank:
            self._fit("gather", outputs[0], inputs[0])
            incoming = {r: [t] for r, t in enumerate(outputs[0])}
        return self._begin("gather", self._move({opts.rootRank: inputs}, incoming), inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MpiWork:
        outgoing: dict[int, Tensors] = {}
        if self.rank == opts.rootRank:
            self._fit("scatter", inputs[0], outputs[0])
            outgoing = {r: [t] for r, t in enumerate(inputs[0])}
        return self._begin("scatter", self._move(outgoing, {opts.rootRank: outputs}), outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> MpiWork:
        dtypes = {t.dtype for t in (*inputs, *outputs)}
        if len(inputs) != self.size or len(outputs) != self.size or len(dtypes) > 1:
            raise InvalidArgument(
                f"all_to_all got {len(inputs)} inputs and {len(outputs)} outputs of "
                f"{sorted(map(str, dtypes))}, expected {self.size} of each, all of one dtype"
            )
        if inputs[self.rank].numel() != outputs[self.rank].numel():
            raise InvalidArgument(
                f"rank {self.rank} sends itself {inputs[self.rank].numel()} elements, but expects "
                f"{outputs[self.rank].numel()} from itself"
            )
        outgoing, incoming = (
            {r: [t] for r, t in enumerate(tensors)} for tensors in (inputs, outputs)
        )
        return self._begin("all_to_all", self._move(outgoing, incoming), outputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> MpiWork:
        outs, ins = self._split(contiguous(output), output_splits), self._split(input, input_splits)
        return self.alltoall(outs, ins, opts)

    def barrier(self, opts: Any) -> MpiWork:
        return self._begin("barrier", self._barrier(), [], opts)

    # ------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, peer: int, tag: int) -> MpiWork:
        return self._begin("send", self._send(tensors[0], peer, tag), tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> MpiWork:
        return self._begin("recv", self._receive(tensors[0], peer, tag), tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MpiWork:
        """Receive in a group of one rank; in others the guard knows the source before and calls
        ``recv``."""
        work = self.recv(tensors, 0, tag)
        work.source = 0
        return work

    # ------------------------------------------------------------ steps

    def _move(
        self,
        outgoing: Mapping[int, Tensors],
        incoming: Mapping[int, Tensors],
        tag: int | None = None,
    ) -> Steps:
        """Exchange tensors with each rank; those for this rank itself are copied."""
        views = {r: [HostView(t) for t in tensors] for r, tensors in incoming.items()}
        sent = {r: [flat_of(t) for t in tensors] for r, tensors in outgoing.items()}
        yield self._swap(
            sent, {r: [x.numbers for x in row] for r, row in views.items()}, self._tag(tag)
        )
        for row in views.values():
            for view in row:
                view.write_back()

    def _swap(
        self, outgoing: Mapping[int, Tensors], incoming: Mapping[int, Tensors], tag: int
    ) -> list[Any]:
        """Start receives and then sends. Each rank begins with its neighbor, so that not all send
        to the same one."""
        comm, me, size = self._data, self.rank, self.size
        requests = []
        for r in ((me - i) % size for i in range(1, size)):
            requests += [
                comm.Irecv(self._bytes(t), r, tag) for t in incoming.get(r, ()) if t.numel()
            ]
        for r in ((me + i) % size for i in range(1, size)):
            requests += [
                comm.Isend(self._bytes(t), r, tag) for t in outgoing.get(r, ()) if t.numel()
            ]
        if me in incoming:
            for target, source in zip(incoming[me], outgoing[me], strict=True):
                target.copy_(source)
        return requests

    def _all_reduce(self, tensors: Tensors, opts: Any) -> Steps:
        view = JoinedViews(tensors) if len(tensors) > 1 else HostView(tensors[0])
        buffer, tag = view.numbers, self._tag()
        every = range(self.size)
        if buffer.nbytes <= SMALL:
            fold, per_rank = self._fold(buffer, opts)
            parts, held = self._parts(buffer.numel(), buffer)
            yield self._swap({r: [buffer] for r in every}, self._others(parts), tag)
            fold(self._with(buffer, parts), buffer, 0, per_rank)
            self._scratch.give(held)
        else:
            chunks, total = yield from self._own_chunk(buffer, opts, tag)
            everywhere = {r: [c] for r, c in enumerate(chunks)}
            yield self._swap({r: [total] for r in every}, everywhere, tag)
        view.write_back()

    def _own_chunk(
        self, buffer: torch.Tensor, opts: Any, tag: int, *, even: bool = True, here: bool = True
    ) -> Generator[list[Any], None, tuple[list[torch.Tensor], torch.Tensor]]:
        """Return the chunks of a buffer, one per rank, and this rank's chunk reduced: in place
        (``here``), or in new memory."""
        fold, per_rank = self._fold(buffer, opts, even=even)
        cuts = [bounds(r, buffer.numel(), per_rank) for r in range(self.size)]
        chunks = [buffer[slice(*each)] for each in cuts]
        mine = chunks[self.rank]
        parts, held = self._parts(mine.numel(), buffer)
        yield self._swap({r: [c] for r, c in enumerate(chunks)}, self._others(parts), tag)
        total = mine if here else torch.empty_like(mine)
        fold(self._with(mine, parts), total, cuts[self.rank][0], per_rank)
        self._scratch.give(held)
        return chunks, total

    def _sparse_sum(self, tensor: torch.Tensor) -> Steps:
        """Send all indices and values to every rank, and add them in the order of ranks."""
        mine, tag = tensor.detach().cpu().coalesce(), self._tag()
        others = [r for r in range(self.size) if r != self.rank]
        count = torch.tensor([mine._nnz()])
        counts = [count if r == self.rank else torch.empty_like(count) for r in range(self.size)]
        yield self._swap({r: [count] for r in others}, {r: [counts[r]] for r in others}, tag)
        sent = [mine.indices().contiguous(), mine.values().contiguous()]
        every = [
            sent
            if r == self.rank
            else [t.new_empty(shape) for t, shape in zip(sent, _shapes(mine, int(n)), strict=True)]
            for r, n in enumerate(counts)
        ]
        outgoing = [t.view(-1) for t in sent]
        yield self._swap(
            {r: outgoing for r in others}, {r: [t.view(-1) for t in every[r]] for r in others}, tag
        )
        total, *rest = (
            torch.sparse_coo_tensor(i, v, mine.shape, check_invariants=False) for i, v in every
        )
        for part in rest:
            total.add_(part)
        tensor.copy_(total.coalesce())

    def _reduce(self, tensor: torch.Tensor, opts: Any) -> Steps:
        view, root, tag = HostView(tensor), opts.rootRank, self._tag()
        at_root = self.rank == root  # only its tensor changes
        chunks, total = yield from self._own_chunk(
            view.numbers, opts, tag, even=False, here=at_root
        )
        arriving = {r: [c] for r, c in enumerate(chunks)} if at_root else {}
        yield self._swap({root: [total]}, arriving, tag)
        if self.rank == root:
            view.write_back()

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any, *, whole: bool
    ) -> Steps:
        """Set ``outputs[i]`` to the reduction of every rank's ``inputs[i][me]``.

        The order of summation is that of an all-reduce of the concatenated ``inputs[i]``
        (``whole``), or of each by itself.
        """
        views, tag = [HostView(t) for t in outputs], self._tag()
        rows = [[flat_of(t) for t in row] for row in inputs]
        parts, held = zip(*(self._parts(x.numbers.numel(), x.numbers) for x in views), strict=True)
        incoming = {r: [p[r] for p in parts] for r in range(self.size) if r != self.rank}
        outgoing = {r: [row[r] for row in rows] for r in range(self.size) if r != self.rank}
        yield self._swap(outgoing, incoming, tag)
        for view, row, part in zip(views, rows, parts, strict=True):
            numbers = view.numbers
            fold, per_rank = self._fold(
                numbers, opts, numel=numbers.numel() * (self.size if whole else 1)
            )
            start = self.rank * numbers.numel() if whole else 0
            fold(self._with(numbers_of(row[self.rank]), part), numbers, start, per_rank)
            view.write_back()
        self._scratch.give(*held)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Steps:
        view = HostView(tensor)
        if tensor.numel():
            yield [self._data.Ibcast(self._bytes(view.numbers), root)]
        if self.rank != root:
            view.write_back()

    def _barrier(self) -> Steps:
        yield [self._data.Ibarrier()]

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Steps:
        flat = flat_of(tensor)  # kept alive until it is sent
        yield [self._pairs.Isend(self._bytes(flat), peer, tag)]

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Steps:
        view = HostView(tensor)
        yield [self._pairs.Irecv(self._bytes(view.numbers), peer, tag)]
        view.write_back()

    # ------------------------------------------------------------ parts of steps

    def _begin(self, name: str, steps: Steps, tensors: Tensors, opts: Any = None) -> MpiWork:
        asked = getattr(opts, "timeout", timedelta()).total_seconds()
        return self._progress.start(name, steps, tensors, asked if asked > 0 else self.seconds)

    def _tag(self, given: int | None = None) -> int:
        """Return the tag of an operation; every rank begins operations in the same order."""
        if given is not None:
            return given
        self._calls += 1
        return self._calls % _TAGS

    def _bytes(self, flat: torch.Tensor) -> list[Any]:
        return host_buffer(self._mpi, flat)

    def _fold(
        self, numbers: torch.Tensor, opts: Any, *, numel: int = -1, even: bool = True
    ) -> tuple[Fold, int]:
        fold = Fold(int(opts.reduceOp.op), numbers.dtype, self.size)
        return fold, chunk(
            numbers.numel() if numel < 0 else numel, numbers.itemsize, self.size, even=even
        )

    def _parts(self, numel: int, like: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return room for ``numel`` elements of every rank, and the memory to give back."""
        held = self._scratch.take(self.size * numel * like.itemsize, _CPU)
        return list(
            held.view(like.dtype).split(numel) if numel else [held.view(like.dtype)] * self.size
        ), held

    def _others(self, parts: Tensors) -> dict[int, Tensors]:
        return {r: [part] for r, part in enumerate(parts) if r != self.rank}

    def _with(self, mine: torch.Tensor, parts: Tensors) -> Tensors:
        return [mine if r == self.rank else part for r, part in enumerate(parts)]

    def _dealt(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Divide a tensor's elements evenly among the ranks, in order."""
        numel, rest = divmod(tensor.numel(), self.size)
        if rest:
            raise InvalidArgument(
                f"{tensor.numel()} elements cannot be divided evenly among {self.size} ranks"
            )
        flat = tensor.reshape(-1)
        return [flat[r * numel : (r + 1) * numel] for r in range(self.size)]

    def _split(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        if not splits:
            return self._dealt(tensor)
        if len(splits) != self.size or sum(splits) != len(tensor):
            raise InvalidArgument(
                f"splits are {splits}, expected {self.size} numbers that add up to {len(tensor)} "
                "rows"
            )
        return list(tensor.split(splits))

    def _fit(self, name: str, tensors: Tensors, like: torch.Tensor) -> None:
        if len(tensors) != self.size or any(
            t.numel() != like.numel() or t.dtype != like.dtype for t in tensors
        ):
            raise InvalidArgument(
                f"{name} has a tensor of {like.numel()} {like.dtype} and a list of "
                f"{[t.numel() for t in tensors]} elements, expected {self.size} tensors of the "
                "same length and dtype, one for each rank"
            )

    # ------------------------------------------------------------ life

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def abort(self) -> None:
        self._progress.give_up("a peer died or stopped")

    def shutdown(self) -> None:
        """Free the communicators, unless MPI may still need them."""
        self._progress.close()
        if not self._progress.left and not self._mpi.Is_finalized():
            for comm in (self._data, self._pairs, self.communicator):
                if comm != self._mpi.COMM_NULL:
                    comm.Free()


def _dense(tensors: Tensors) -> None:
    if any(t.layout is not torch.strided for t in tensors):
        raise InvalidArgument(
            "sparse tensors over MPI can only be summed one at a time: convert them to dense ones"
        )


def _shapes(tensor: torch.Tensor, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the indices and values of a sparse tensor like this one with ``count``
    entries."""
    return (tensor.sparse_dim(), count), (count, *tensor.values().shape[1:])


# --------------------------------------------------- host memory for MPI


class HostView:
    """A tensor's elements as contiguous ``numbers``: its own memory if it is contiguous, else a
    copy to write back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, flat = tensor, flat_of(tensor)
        self.numbers = numbers_of(flat)
        self.copied = flat.data_ptr() != tensor.data_ptr()

    def write_back(self) -> None:
        if self.copied:
            self.tensor.detach().copy_(self.numbers.view(self.tensor.dtype).view(self.tensor.shape))


class JoinedViews:
    """Several tensors copied into one buffer, like ``HostView``."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.numbers = torch.cat([numbers_of(flat_of(t)) for t in tensors])

    def write_back(self) -> None:
        for tensor, part in zip(
            self.tensors, self.numbers.split([t.numel() for t in self.tensors]), strict=True
        ):
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order in host memory: the tensor's own memory, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)


def numbers_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory as numbers that can be added: bools as bytes."""
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous, expected a contiguous one "
            "to receive into: call contiguous() on it"
        )
    return tensor
