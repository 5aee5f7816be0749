"""A model with its parameters in a store: a block's parameters are in memory only while it computes
(ZeRO-3, Infinity).

    forward   fetch block | compute | release  the next block is read from the disk meanwhile
    backward  fetch block | compute | gradients to the optimizer's store | release

On several ranks each one's store has a row of every group; rows are gathered when a block is
fetched, and gradients are averaged and scattered to the rows' owners.
"""

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import FLOATS
from commpress.collectives.channel import Channel
from commpress.collectives.handover import Divided
from commpress.collectives.transports.factory import on_reform
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero.gradients import Gradients
from commpress.integrations.zero.safetensors_file import Checkpoint, Writer
from commpress.integrations.zero.stream_progress import StreamProgress
from commpress.integrations.zero.streamed_group import (
    FirstValues,
    StreamedGroup,
    StreamedWeights,
    is_streamed,
    on_memory,
    return_large_blocks,
    set_streamer,
)
from commpress.integrations.zero.streamed_module import (
    GroupSpec,
    ModuleState,
    NotCopied,
    ReadCheck,
    StreamedModule,
    group_specs,
)
from commpress.integrations.zero.tiling import PlainName, plain_names
from commpress.integrations.zero.vertical import Vertical
from commpress.integrations.zero.wrapper import of_every_rank
from commpress.optim.layout import LocalWeights, refuse_held
from commpress.tiered_mem import TieredStore

AHEAD = 2  # groups to read from the disk in advance


class GradientTaker(Protocol):
    """An object that moves gradients away as they come; not while ``syncing`` is False."""

    syncing: bool

    def across(self) -> AbstractContextManager[None]:
        """Take all backwards inside the context as one, and at its end what has not been moved."""


class Streamed(Divided, NotCopied):
    """The hooks of a model with its parameters in ``store``: the result of ``commpress.stream``."""

    def __init__(
        self,
        model: nn.Module,
        store: TieredStore,
        channel: Channel,
        specs: Sequence[GroupSpec],
        *,
        prefix: str,
        numel: int,
        progress: float | None = None,
    ) -> None:
        self.model, self.store, self.prefix = model, store, prefix
        self.channel, self.transport = channel, channel.transport
        self.groups: list[StreamedGroup] = []
        self.group_of: dict[int, StreamedGroup] = {}
        self.modules: dict[nn.Module, StreamedModule] = {}
        for spec in specs:
            group = StreamedGroup(
                len(self.groups),
                spec.name,
                spec.members,
                rank=channel.rank,
                ranks=channel.size,
                prefix=prefix,
                numel=numel,
            )
            group.kept, group.shared = spec.kept, len(spec.modules) > 1
            self.groups.append(group)
            for module in spec.modules:
                if module not in self.modules:
                    self.modules[module] = StreamedModule(module, self._fetch, self._backward)
                self.modules[module].groups.append(group)
                self.modules[module].block |= module in spec.blocks
            for parameter, _, _ in spec.members:
                self.group_of[id(parameter)] = group
                set_streamer(parameter, self)
        shown = None if channel.rank else progress
        self.progress = StreamProgress(shown, sum(not group.kept for group in self.groups))
        self._stale = True  # values kept in memory differ from those in the store
        self._followers: list[Callable[[str], None]] = []
        # groups in the order of fetches since the last step, and in the step before
        self._order: list[StreamedGroup] = []
        self._before: list[StreamedGroup] = []
        # references to the callbacks at the end of each running backward
        self._endings: dict[int, weakref.ref[Any]] = {}
        self._gradients: Gradients | None = None
        self.takers: list[GradientTaker] = []
        self.on_backward: list[Callable[[], None]] = []  # called before those of a step
        self._stay: ExitStack | None = None  # keeps what is fetched in memory
        self._accumulating = False
        # None after the first complete forward
        self._unread: ReadCheck | None = ReadCheck(model, specs, self.groups)
        self._hooks: list[RemovableHandle] = []

    def _watch(self) -> None:
        self._hooks.append(self.model.register_forward_pre_hook(self._start, prepend=True))
        self._hooks.append(self.model.register_forward_hook(self._read, always_call=True))
        on_reform(None, self)
        for streamed in self.modules.values():
            self._hooks += streamed.watch()

    def _backward(self) -> int:
        """Return the number of the running backward, at the end of which groups that it still holds
        are released."""
        graph = torch._C._current_graph_task_id()
        if graph not in self._endings:
            self.drop_aborted()
            if not (self._endings or self._accumulating):
                self._begin_backward()
            ending = partial(self._end_backward, graph)
            self._endings[graph] = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)
        return graph

    def _begin_backward(self) -> None:
        for call in self.on_backward:
            call()

    def drop_aborted(self) -> None:
        """Release groups held by a backward that ended with an error, in which case autograd frees
        the callback of its end."""
        if self._gradients is not None:
            self._gradients.drop_aborted()
        for graph in [graph for graph, ending in self._endings.items() if ending() is None]:
            self._end_backward(graph)

    def _end_backward(self, graph: int) -> None:
        self._endings.pop(graph, None)
        for module in self.modules.values():
            module.end_backward(graph)

    # ------------------------------------------------------------ moving

    @torch.no_grad()
    def _fetch(self, group: StreamedGroup) -> None:
        place = len(self._order)
        self._order.append(group)
        in_backward = torch._C._current_graph_task_id() >= 0
        self.progress.reach("backward" if in_backward else "forward", group.name)
        if self._before[place : place + 1] == [group]:
            ahead = [
                stored.name
                for one in self._before[place + 1 : place + 1 + AHEAD]
                if one.up_to_date()
                for stored in one.stored
            ]
            self.store.prefetch(ahead)
        group.settle()
        group.appear()
        if self._stay is not None:
            group.holders += 1
            self._stay.callback(group.release)
        if self.transport.size == 1:
            group.load(self.store, group.flat)
            return
        call = self.channel.call(len(group.gather_plan))
        self.channel.submit(group.gather(self.store, call), group.flat).wait()

    def _start(self, *_: Any) -> None:
        """Check, before the model's forward, that the values kept in memory are those of the last
        step and the parameters unchanged by others."""
        self.drop_aborted()
        for unit in self.modules.values():
            if not self._accumulating and unit.module is not self.model:
                unit.reset()
        for group in self.groups:
            group.check()
        if self._stale:
            self._stale = False
            for group in self.groups:
                if group.kept:
                    self._fetch(group)

        if self._unread is not None:
            self._unread.begin()

    def _read(self, module: nn.Module, args: Any, result: Any) -> None:
        """End the first forward's check; a forward without a result has failed."""
        if self._unread is not None:
            self._unread.end()
            self._unread = self._unread if result is None else None

    def stepped(self) -> None:
        """Record that the optimizer has changed the values in the store."""
        self.drop_aborted()
        self.progress.end_step()
        self._before, self._order, self._stale = self._order, [], True

    def send_gradients(self, sink: Callable[[StreamedGroup, torch.Tensor], None]) -> None:
        """Pass the mean gradients of this rank's rows to ``sink`` in every backward, on the
        worker's thread."""
        if self._gradients is not None:
            raise InvalidArgument(
                "the streamed model has an optimizer already: pass all its parameters to one"
            )
        groups = [u for u in reversed(self.groups) if u.members[0].parameter.requires_grad]
        groups.sort(key=lambda u: u.shared)  # the last use of a tied one is known at the end only
        self._gradients = Gradients(groups, self.channel, stage=2, sink=sink)
        self._gradients.at_end = sum(u.shared for u in groups)
        self.takers.append(self._gradients)

    def follow(self, follower: Callable[[str], None]) -> None:
        """Call ``follower`` with the name of each range in the store after its values were
        loaded."""
        self._followers.append(follower)

    def loaded(self, group: StreamedGroup) -> None:
        for follower in self._followers:
            for stored in group.stored:
                follower(stored.name)

    def local_weights(self, group: StreamedGroup) -> list[LocalWeights]:
        """Return the ranges of a group in this rank's store, for local updates; equally many on
        every rank, some of them empty."""
        return [
            StreamedWeights(stored, group, self.store, self._written) for stored in group.stored
        ] + [
            LocalWeights(f"{group.name}/nothing{i}", group.flat.new_empty(0))
            for i in range(len(group.stored), group.pieces)
        ]

    def _written(self, name: str) -> None:
        self._stale = True
        for follower in self._followers:
            follower(name)

    def room(self) -> int:
        """Return the bytes of the store's host memory for a fetch and for reading in advance."""
        return (1 + AHEAD) * max(group.width * group.dtype.itemsize for group in self.groups)

    def every(self, value: float) -> list[float]:
        """Return the values of all ranks."""
        return of_every_rank(self.channel, [value])

    # ------------------------------------------------------------ several micro-batches

    def accumulate(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batches: Iterable[Any],
        *,
        activations: AbstractContextManager[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Add up the gradients of ``loss_of(batch)`` over micro-batches, all of which pass through
        a block before the next is read; return the losses.

        Parameters are read twice a step, not twice for each micro-batch, and gradients leave once.
        Blocks compute their forward again in the backward. Inputs of blocks stay in memory, one for
        each block and micro-batch, or go to ``activations``, what ``commpress.activations``
        returned. Each micro-batch draws random numbers from a generator state of its own, seeded in
        order by ``torch.randint(2**62, (len(batches),))``. ``loss_of`` divides the loss by the
        number of micro-batches if their mean is wanted.
        """
        batches = list(batches)
        if not batches:
            raise InvalidArgument("batches is empty, expected one micro-batch or more")
        if self._accumulating:
            raise InvalidArgument("accumulate was called by loss_of of another accumulate")
        self.drop_aborted()
        self._begin_backward()
        self._accumulating = True
        try:
            with ExitStack() as stack:
                for taker in self.takers:
                    stack.enter_context(taker.across())
                return Vertical(self, loss_of, batches, activations).run()
        except BaseException:
            self.drop_aborted()
            for unit in self.modules.values():
                unit.reset()
            raise
        finally:
            self._accumulating = False

    @contextmanager
    def staying(self, unit: StreamedModule) -> Iterator[None]:
        """Keep the parameters of ``unit``, and all that are fetched inside the context, in
        memory."""
        with ExitStack() as stack:
            self._stay = stack
            try:
                for group in unit.groups:
                    stack.enter_context(self.whole(group))
                yield
            finally:
                self._stay = None

    @contextmanager
    def holding_gradients(self, hold: bool) -> Iterator[None]:
        """Let gradients add up where they are, if ``hold``."""
        for taker in self.takers:
            taker.syncing = not hold
        try:
            yield
        finally:
            for taker in self.takers:
                taker.syncing = True

    # ------------------------------------------------------------ whole values

    @contextmanager
    def whole(self, group: StreamedGroup) -> Iterator[None]:
        """Keep a group in memory inside the context; collective."""
        group.holders += 1
        if not group.present:
            self._fetch(group)
        try:
            yield
        finally:
            group.release()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole ``state_dict`` of the plain model in memory; collective."""
        own = plain_names(self.model)
        state = {
            one.name: one.value.new_empty(one.shape) if self._has(one) else one.value.detach()
            for one in own
        }
        for held in self._by_group(own):
            for one in held:
                one.of(state[one.name]).copy_(one.value.detach())
        return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``state_dict`` as a safetensors file for plain PyTorch, without ever having it
        whole in memory. Collective, rank 0 writes."""
        own = plain_names(self.model)
        outlines = {
            one.name: torch.empty(one.shape, dtype=one.value.dtype, device="meta") for one in own
        }
        with Writer(path, outlines) if self.channel.rank == 0 else nullcontext() as writer:
            for one in own:
                if writer and not self._has(one):
                    writer.write(one.name, one.value)
            for held in self._by_group(own):
                for one in held:
                    if writer:
                        writer.write(one.name, one.value, one.start)

    @torch.no_grad()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Load such a file, or a folder of several with their index, group by group, on any number
        of ranks."""
        own: dict[int, list[PlainName]] = {}
        for one in plain_names(self.model):
            own.setdefault(id(one.value), []).append(one)
        with Checkpoint(path) as checkpoint:
            for every in own.values():
                if not checkpoint.holds(names := [one.name for one in every]):
                    raise StateMismatch(
                        f"{' or '.join(map(repr, names))} is not in {path}: load the weights of "
                        "the same model"
                    )
            for group in self.groups:
                group.appear()
                for member in group.members:
                    every = own[id(member.parameter)]
                    names = [one.name for one in every]
                    checkpoint.into(names, member.view(group.flat), every[0].shape, every[0].start)
                group.save(self.store)
                self.progress.reach("first values", group.name)
                self.loaded(group)
                if not group.kept:
                    group.vanish()
            for every in own.values():
                if not self._has(one := every[0]):
                    checkpoint.into([one.name for one in every], one.value, one.shape, one.start)

    def _has(self, one: PlainName) -> bool:
        return id(one.value) in self.group_of

    def _by_group(self, own: list[PlainName]) -> Iterator[list[PlainName]]:
        """Yield the tensors of each group in turn, while it is in memory; collective."""
        for group in self.groups:
            with self.whole(group):
                yield [one for one in own if self.group_of.get(id(one.value)) is group]

    # ------------------------------------------------------------ first values

    def _begin(self, first: FirstValues, weights: str | os.PathLike[str] | None) -> None:
        """Take the values in the store if it has any; else write first values, or those of a
        file."""
        known = self._meta in self.store
        if known:
            with self.store.borrow(self._meta, write=False) as held:
                if held.tolist() != [float(self._layout())]:
                    raise StateMismatch(
                        f"the store has parameters {self.prefix!r} of another model, chunk_mb or "
                        "number of ranks: use those it was made with, or pass another prefix="
                    )
        if known or weights is not None:
            first.only_buffers(self.model)
            for group in self.groups:
                group.vanish()
        else:
            first.write(self.model, self.store)
        ModuleState(self.model, self.group_of, self.store, self.loaded)
        if weights is not None and not known:
            self.load(weights)
        if not known:  # now the store has all values
            mark = torch.tensor([float(self._layout())], dtype=torch.float64)
            self.store.put(self._meta, mark)

    @property
    def _meta(self) -> str:
        return f"{self.prefix}/meta"

    def _layout(self) -> int:
        """Return a hash of the places of all parts."""
        rows = [
            f"{m.name}@{u.number}+{m.first}:{tuple(m.parameter.shape)}:{u.dtype}"
            for u in self.groups
            for m in u.members
        ]
        pieces = [f"{p.name}+{p.numel}" for u in self.groups for p in u.stored]
        return zlib.crc32(
            ";".join([f"{self.transport.rank} of {self.transport.size}", *rows, *pieces]).encode()
        )

    def close(self) -> None:
        """Stop fetching. Parameters stay in the store, which belongs to the caller; ``state_dict``
        of the model still reads them."""
        for hook in self._hooks:
            hook.remove()
        if self._gradients is not None:
            self._gradients.close()
        self.channel.close()


def stream(
    model: nn.Module,
    *,
    store: TieredStore,
    blocks: Iterable[type[nn.Module]] = (),
    keep: Sequence[str] = (),
    prefix: str = "parameters",
    chunk_mb: float = 64.0,
    weights: str | os.PathLike[str] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    process_group: Any = None,
    progress: float | None = None,
) -> Streamed:
    """Move the parameters of ``model`` into ``store``: a block's parameters are in memory only
    while it computes.

    Train the model with ``Offloaded`` and the same store. If the store has committed parameters of
    the same model, the model takes these. Parameters on the meta device get their first values
    block by block: from ``initialize``, from the model's own function (``_init_weights`` of
    transformers), or from ``reset_parameters``.

    - ``blocks``: classes of modules to fetch as a unit; by default the elements of the outermost
      module lists, and every module that owns parameters outside of these.
    - ``keep``: names of parameters, or of modules, that stay in memory, because other modules read
      them directly.
    - ``weights``: a safetensors file, or a folder with ``model.safetensors.index.json``, with the
      first values.
    - ``initialize``: a function that sets the parameters and buffers of one module, without those
      of its children.
    - ``prefix``: beginning of the parameters' names in the store, for several models in one store.
    - ``chunk_mb``: megabytes of float32 weights in a chunk, as in ``Offloaded``.
    - ``process_group``: ranks, each with 1/P of everything in its store; by default all ranks, if
      torch.distributed is initialized.
    - ``progress``: seconds between two lines on standard error that say where a step is; None shows
      none.
    """
    _check(model, chunk_mb, keep)
    if progress is not None and not progress > 0:
        raise InvalidArgument(f"progress is {progress!r}, expected a positive number of seconds")
    return_large_blocks()
    channel = Channel.among(process_group, workspace=Workspace(pooled=True), at_once=1)
    fresh = on_memory(model)
    specs = group_specs(model, blocks, keep)
    numel = max(int(chunk_mb * 1e6 / 4), 1)
    streamed = Streamed(model, store, channel, specs, prefix=prefix, numel=numel, progress=progress)
    reached = partial(streamed.progress.reach, "first values")
    streamed._begin(FirstValues(streamed.groups, fresh, initialize, reached), weights)
    streamed._watch()
    return streamed


def _check(model: nn.Module, chunk_mb: float, keep: Sequence[str]) -> None:
    if not chunk_mb > 0:
        raise InvalidArgument(f"chunk_mb is {chunk_mb!r}, expected a positive number")
    names = {name for name, _ in model.named_parameters()} | {
        name for name, _ in model.named_modules()
    }
    if unknown := [name for name in keep if name not in names]:
        raise InvalidArgument(
            f"keep has {unknown[0]!r}, expected names of parameters or modules of the model"
        )
    cure = (
        "use a store for the experts alone, by commpress.moe.parallelise(model, store=...), and do "
        "not stream the model"
    )
    refuse_held(
        "commpress.stream", model.named_parameters(), "moves what all ranks hold alike", cure=cure
    )
    for name, parameter in model.named_parameters():
        if parameter.dtype not in FLOATS:
            raise InvalidArgument(
                f"parameter {name!r} is {parameter.dtype}, expected float32, bfloat16 or float16"
            )
        if is_streamed(parameter):
            raise InvalidArgument(
                f"parameter {name!r} is streamed already: call stream once for a model"
            )
