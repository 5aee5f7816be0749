"""A model whose parameters live in a store and are in memory only while a block computes with them (ZeRO-3, Infinity).

    forward    fetch block | compute | release            the next block is read from the disk meanwhile
    backward   fetch block | compute | gradients to the optimizer's store | release

Over several ranks each one's store has a row of every unit; rows are gathered when a block is fetched, and gradients are
averaged and scattered to the rows' owners.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from commpress.collectives.scalars import gathered
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.loopback import Loopback, Recorded
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero import whole_values
from commpress.integrations.zero.allocation import return_large_blocks
from commpress.integrations.zero.blocks import parts_of, tensors_in
from commpress.integrations.zero.first_values import FirstValues, on_memory
from commpress.integrations.zero.gradients import Channel, Gradients
from commpress.integrations.zero.module_state import ModuleState, NotCopied
from commpress.integrations.zero.options import Place
from commpress.integrations.zero.scratch import Scratch
from commpress.integrations.zero.unit import Home, Unit
from commpress.optim.parameters import DTYPES
from commpress.tiered_mem import TieredStore
from commpress.work import Worker, run

AHEAD = 2  # units that are read from the disk ahead of need


@dataclass(eq=False)
class Call:
    """One forward of a block: how many of its inputs still wait for their gradient."""

    inputs: int


class Block:
    """A module and its units. It holds them while a forward is in it, and from its outputs' gradient to its inputs'."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.units = module, list[Unit]()
        self.forwards = 0
        self.graph: int | None = None  # backward that has come here and not yet gone
        self.calls: set[Call] = set()
        self.missing: set[int] = set()  # own parameters whose gradient has not come
        self.held = False


class Streamed(NotCopied):
    """What ``commpress.stream`` returns: the hooks of a model, and its parameters in ``store``."""

    def __init__(
        self,
        model: nn.Module,
        store: TieredStore,
        *,
        blocks: Iterable[type[nn.Module]],
        keep: Sequence[str],
        prefix: str,
        chunk_mb: float,
        process_group: Any,
        timeout: timedelta | None,
    ) -> None:
        _check(model, chunk_mb, keep)
        return_large_blocks()
        self.model, self.store, self.prefix = model, store, prefix
        transport = own_transport(process_group, timeout=timeout) or Loopback(1).transport(0)
        self.transport = Recorded(transport)
        rank, ranks = transport.rank, transport.size
        fresh = on_memory(model)
        parts = parts_of(model, blocks, keep)
        self.units = [
            Unit(
                i, part.name, part.places, rank=rank, ranks=ranks, prefix=prefix,
                numel=max(int(chunk_mb * 1e6 / 4), 1),
            )
            for i, part in enumerate(parts)
        ]  # fmt: skip
        self.channel = Channel(self.transport, Scratch(), Worker("commpress", limit=1, device=self.units[0].device))
        self.blocks: dict[nn.Module, Block] = {}
        for part, unit in zip(parts, self.units, strict=True):
            unit.kept, unit.shared = part.kept, len(part.modules) > 1
            for module in part.modules:
                self.blocks.setdefault(module, Block(module)).units.append(unit)
            for parameter, _, _ in part.places:
                parameter.home = Home(self, unit)  # type: ignore[attr-defined]
        self._begin(fresh)
        ModuleState(self)
        self._stale = True  # what is kept in memory is not what the store has
        self._order: list[Unit] = []  # as they were fetched since the last step, and in the step before
        self._before: list[Unit] = []
        self._graphs: set[int] = set()
        self._gradients: Gradients | None = None
        self._followers: list[Callable[[str], None]] = []
        self._hooks = [model.register_forward_pre_hook(self._start, prepend=True)]
        for block in self.blocks.values():
            self._hooks += self._watch(block)

    def _watch(self, block: Block) -> list[Any]:
        enter, leave = partial(self._enter, block), partial(self._leave, block)  # a copy of them is one of this object: refused
        hooks: list[Any] = [
            block.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            block.module.register_forward_hook(leave, always_call=True, with_kwargs=True),
        ]
        for unit in block.units:
            for member in unit.members:
                if member.parameter.requires_grad:
                    hooks.append(member.parameter.register_post_accumulate_grad_hook(self._came(block)))
        return hooks

    # ------------------------------------------------------------ who needs what

    def _enter(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        block.forwards += 1
        self._update(block)

    def _leave(self, block: Block, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        block.forwards -= 1
        if torch.is_grad_enabled() and result is not None:
            self._expect(block, (args, kwargs), result)
        self._update(block)

    def _expect(self, block: Block, arguments: Any, result: Any) -> None:
        """Hooks at both ends of this forward's part of the graph."""
        results = [t for t in tensors_in(result) if t.requires_grad]
        if not results:
            return
        ids = {id(t) for t in results}
        inputs = [t for t in tensors_in(arguments) if t.requires_grad and id(t) not in ids]
        call = Call(len(inputs))

        def arrived(gradient: torch.Tensor) -> None:
            call.inputs -= 1
            if call.inputs == 0:
                block.calls.discard(call)
                self._update(block)

        def needed(gradient: torch.Tensor) -> None:
            self._enter_backward(block, call)

        for tensor in inputs:
            tensor.register_hook(arrived)
        for tensor in results:
            tensor.register_hook(needed)

    def _enter_backward(self, block: Block, call: Call) -> None:
        graph = torch._C._current_graph_task_id()
        if graph not in self._graphs:
            self._graphs.add(graph)
            Variable._execution_engine.queue_callback(lambda: self._end_backward(graph))
        if block.graph is None:
            block.graph = graph
            block.missing = {
                id(m.parameter) for u in block.units if not u.shared for m in u.members if m.parameter.requires_grad
            }
        if call.inputs > 0:
            block.calls.add(call)
        self._update(block)

    def _came(self, block: Block) -> Any:
        def came(parameter: torch.Tensor) -> None:
            block.missing.discard(id(parameter))
            self._update(block)

        return came

    def _end_backward(self, graph: int) -> None:
        """Parameters that got no gradient, and inputs outside of what was asked for, keep nothing any longer."""
        self._graphs.discard(graph)
        for block in self.blocks.values():
            if block.graph == graph:
                block.graph = None
                block.calls.clear()
                block.missing.clear()
                self._update(block)

    def _update(self, block: Block) -> None:
        """Fetch or release what the block's state asks for."""
        if block.graph is not None and not block.calls and not block.missing:
            block.graph = None
        wants = block.forwards > 0 or block.graph is not None
        if wants and not block.held:
            block.held = True
            for unit in block.units:
                unit.holders += 1
                if not unit.present:
                    self._fetch(unit)
        elif block.held and not wants:
            block.held = False
            for unit in block.units:
                unit.holders -= 1
                if not unit.holders and not unit.kept:
                    unit.vanish()

    # ------------------------------------------------------------ moving

    @torch.no_grad()
    def _fetch(self, unit: Unit) -> None:
        place = len(self._order)
        self._order.append(unit)
        if self._before[place : place + 1] == [unit]:
            ahead = [piece.name for one in self._before[place + 1 : place + 1 + AHEAD] for piece in one.pieces]
            self.store.prefetch(ahead)
        unit.appear()
        if self.transport.size == 1:
            unit.load(self.store, unit.flat)
            return
        sequence = self.channel.take(len(unit.gather_plan))
        self.channel.worker.submit(unit.gather(self.store, self.channel, sequence)).wait()

    def _start(self, *_: Any) -> None:
        """Before the model's forward: what is kept in memory is as the last step left it."""
        if self._stale:
            self._stale = False
            for unit in self.units:
                if unit.kept:
                    self._fetch(unit)

    def stepped(self) -> None:
        """The optimizer has changed what the store holds."""
        self._before, self._order, self._stale = self._order, [], True

    def send_gradients(self, sink: Callable[[Unit, torch.Tensor], None]) -> None:
        """Hand the mean gradients of this rank's rows to ``sink`` in every backward, on the worker's thread."""
        if self._gradients is not None:
            raise InvalidArgument("the streamed model has an optimizer already: pass all its parameters to one")
        units = [u for u in reversed(self.units) if u.members[0].parameter.requires_grad]
        self._gradients = Gradients(units, self.channel, stage=2, sink=sink)

    def follow(self, follower: Callable[[str], None]) -> None:
        """Call it with the names of pieces in the store whose values somebody has loaded."""
        self._followers.append(follower)

    def loaded(self, unit: Unit) -> None:
        for follower in self._followers:
            for piece in unit.pieces:
                follower(piece.name)

    def room(self) -> int:
        """Bytes of the store's host memory that a fetch and what is read ahead of it need."""
        return (1 + AHEAD) * max(unit.width * unit.dtype.itemsize for unit in self.units)

    def every(self, value: float) -> list[float]:
        """Each rank's."""
        if self.transport.size == 1:
            return [value]
        every = run(gathered([value], transport=self.transport, sequence=self.channel.take(1)))
        return [float(one) for one in every[:, 0]]

    # ------------------------------------------------------------ values as a whole

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """A unit in memory; collective."""
        unit.holders += 1
        if not unit.present:
            self._fetch(unit)
        try:
            yield
        finally:
            unit.holders -= 1
            if not unit.holders and not unit.kept:
                unit.vanish()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the plain model's ``state_dict`` would be in memory, all of it; collective."""
        return whole_values.state_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """That as a safetensors file, which plain PyTorch loads; never in memory as a whole. Collective, rank 0 writes."""
        whole_values.save(self, path)

    @torch.no_grad()
    def load(self, path: str | os.PathLike[str]) -> None:
        """From such a file, on any number of ranks."""
        whole_values.load(self, path)

    # ------------------------------------------------------------ first values

    def _begin(self, fresh: set[int]) -> None:
        meta = f"{self.prefix}/meta"
        mine = torch.tensor([float(self._layout())], dtype=torch.float64)
        if meta not in self.store:
            FirstValues(self.units, fresh).write(self.model, self.store)
            self.store.put(meta, mine)
            return
        with self.store.borrow(meta, write=False) as held:
            if held.tolist() != mine.tolist():
                raise StateMismatch(
                    f"the store holds parameters {self.prefix!r} of another model, chunk_mb or number of ranks: open it with "
                    "those it was made with, or pass another prefix="
                )
        for unit in self.units:
            unit.vanish()

    def _layout(self) -> int:
        """A digest of what lies where."""
        rows = [
            f"{m.name}@{u.number}+{m.first}:{tuple(m.parameter.shape)}:{u.dtype}" for u in self.units for m in u.members
        ]
        pieces = [f"{p.name}+{p.numel}" for u in self.units for p in u.pieces]
        return zlib.crc32(";".join([f"{self.transport.rank} of {self.transport.size}", *rows, *pieces]).encode())

    def close(self) -> None:
        """Stop fetching. Parameters stay in the store, which is the caller's; ``state_dict`` of the model still reads them."""
        for hook in self._hooks:
            hook.remove()
        if self._gradients is not None:
            self._gradients.close()
        self.channel.worker.close()


def stream(
    model: nn.Module,
    *,
    store: TieredStore,
    blocks: Iterable[type[nn.Module]] = (),
    keep: Sequence[str] = (),
    prefix: str = "parameters",
    chunk_mb: float = 64.0,
    process_group: Any = None,
    timeout: timedelta | None = None,
) -> Streamed:
    """Move the parameters of ``model`` into ``store``; each block's are in memory only while it computes.

    Train it with ``Offloaded`` of the same store. A store that holds committed parameters of the same model keeps them: the
    model takes these. Parameters on the meta device get their first values block by block from ``reset_parameters``.

    - ``blocks``: classes of modules that are fetched as one; by default the elements of the outermost module lists, and
      every module that owns parameters outside of these.
    - ``keep``: names of parameters, or of modules, that stay in memory; for what other modules read directly.
    - ``process_group``: each rank's store has 1/P of everything; by default all ranks, if torch.distributed is initialised.
    """
    return Streamed(
        model,
        store,
        blocks=blocks,
        keep=keep,
        prefix=prefix,
        chunk_mb=chunk_mb,
        process_group=process_group,
        timeout=timeout,
    )


def _check(model: nn.Module, chunk_mb: float, keep: Sequence[str]) -> None:
    if not chunk_mb > 0:
        raise InvalidArgument(f"chunk_mb is {chunk_mb!r}, expected a positive number")
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_modules()}
    if unknown := [name for name in keep if name not in names]:
        raise InvalidArgument(f"keep names {unknown[0]!r}, which is neither a parameter nor a module of the model")
    for name, parameter in model.named_parameters():
        if parameter.dtype not in DTYPES:
            raise InvalidArgument(f"parameter {name!r} is {parameter.dtype}, expected float32, bfloat16 or float16")
        if hasattr(parameter, "home"):
            raise InvalidArgument(f"parameter {name!r} is streamed already: call stream once for a model")


def owner_of(groups: list[list[Place]], store: TieredStore) -> Streamed | None:
    """Who streams the parameters, if they are."""
    homes = [getattr(p, "home", None) for group in groups for p, _, _ in group]
    owners = {home.owner for home in homes if isinstance(home, Home)}
    if len(owners) > 1:
        raise InvalidArgument("params are of several streamed models: make one Offloaded for each")
    owner = owners.pop() if owners else None
    if isinstance(owner, Streamed) and owner.store is not store:
        raise InvalidArgument("the parameters are streamed from another store: pass that one as store=")
    return owner if isinstance(owner, Streamed) else None
