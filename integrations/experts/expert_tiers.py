"""Experts with weights, gradients and moments in a tiered store, in memory only while they are
used.

    forward   read experts with tokens | compute
              evict others for them, in the order of ``TierPlan``
    backward  read evicted experts again | compute | write the gradient to the store
    update    read weights, gradients and moments | step
              only of experts with a gradient

Weights are used in the store's memory, without a copy. Note: saved tensors. Views of weights that
autograd saves in forward, such as a transpose, would refer to other bytes in backward; so only
their place in the weights is saved, and the weights are fetched again on use.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from commpress.collectives.buckets import FLOATS
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument, StateMismatch, check_counts
from commpress.integrations.experts.tier_plan import Block, Kind, Moves, TierPlan
from commpress.integrations.zero.streamed_group import (
    StreamedGroup,
    return_holes,
    return_large_blocks,
    set_streamer,
    streamers,
)
from commpress.integrations.zero.streamed_module import ModuleState, NotCopied
from commpress.tiered_mem import Pending, TieredStore
from commpress.tiered_mem.arena import padded
from commpress.tiered_mem.layer import PAGE

VALUES, GRADIENT = "values", "gradient"
# bytes: blocks larger than this and than gradients are returned to the system, so that they leave
# no holes in a heap
LARGE = 1 << 20
WHOLE = 1 << 62  # elements in a range of the store: an expert is never divided


class ExpertTiers(NotCopied):
    """Keep the experts of one or several layers in ``store``, ``resident`` of them in memory.

    ``resident``: use memory for this many of the largest expert with weights, gradient and moments
    (by default all of the store's host memory). It is shared by all layers and by all phases: a
    forward needs weights alone, so under AdamW memory has room for four times as many.

    If the store has committed experts under ``prefix``, layers take these.
    """

    def __init__(
        self,
        store: TieredStore,
        resident: int | None = None,
        *,
        prefix: str = "experts",
    ) -> None:
        check_counts(1, resident=1 if resident is None else resident)
        others = [other for other in streamers() if isinstance(other, ExpertTiers)]
        if any(other.store is store and other.prefix == prefix for other in others):
            raise InvalidArgument(
                f"the store has experts of another layer under prefix {prefix!r}: make one "
                "ExpertTiers(store, resident) and pass it as store= to all layers, or pass another "
                "prefix="
            )
        return_large_blocks(LARGE)
        self.store: TieredStore = store
        self.prefix: str = prefix
        self.resident = resident
        self.groups: list[StreamedGroup] = []  # one for each expert
        self.group_of: dict[int, StreamedGroup] = {}  # by the id of a parameter
        self.layers: list[TieredLayer] = []
        # square of each gradient's norm, if the optimizer clips
        self.squares: dict[int, float] | None = None
        # expert → names in the store of its master weights and moments
        self.kept: dict[int, dict[str, str]] = {}
        self._state: tuple[str, ...] = ()
        self.graded: dict[int, set[int]] = {}  # expert → its members with a gradient
        self.plan = TierPlan(0, self._needs, self._ends, self._size)
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._leaving: list[Pending[None]] = []
        self._moving: list[Future[None]] = []
        self._entering: dict[Block, Future[None]] = {}
        self._call: ExpertCall | None = None  # its backward is running
        self._held: dict[tuple[ExpertCall, int], tuple[Any, torch.Tensor]] = {}
        self._stale = False

    # ------------------------------------------------------------ experts

    def add(self, modules: Iterable[nn.Module], name: str = "") -> "TieredLayer":
        """Move the experts of one layer into the store, one after the other."""
        layer = TieredLayer(self, len(self.groups), len(self.layers))
        leaving: list[Pending[None]] = []
        meta = f"{self.prefix}/{layer.number:04d}/meta"
        known, outline = meta in self.store, list[str]()
        for i, module in enumerate(modules):
            group = self._take(module, f"{name or f'layer {layer.number}'}, expert {i}")
            outline.append(f"{group.dtype} {[tuple(m.parameter.shape) for m in group.members]}")
            if group.stored[0].name not in self.store:
                group.fill()
                group.save(self.store)
                leaving.append(self.store.evict(group.stored[0].name))
                if len(leaving) > 1:
                    leaving.pop(0).wait()
            group.vanish()
            return_holes()
            layer.modules.append(module)
        for pending in leaving:
            pending.wait()
        mine = torch.tensor([float(zlib.crc32(";".join(outline).encode()))], dtype=torch.float64)
        if known:
            with self.store.borrow(meta, write=False) as held:
                if not torch.equal(held, mine):
                    raise StateMismatch(
                        f"the store has other experts under prefix {self.prefix!r}: use the model "
                        "that it was made with, or pass another prefix="
                    )
        else:
            self.store.put(meta, mine)
        self.layers.append(layer)
        self._resize()
        ModuleState(
            layer.modules,
            {
                id(m.parameter): self.groups[e]
                for e in layer.experts
                for m in self.groups[e].members
            },
            self.store,
            lambda group: self.forget_places(),
        )
        return layer

    def _take(self, module: nn.Module, name: str) -> StreamedGroup:
        members = [(p, f"{name}.{n}", i) for i, (n, p) in enumerate(module.named_parameters())]
        if not members:
            raise InvalidArgument(
                f"{name}, a {type(module).__name__}, has no parameters: leave store= out"
            )
        first = members[0][0]
        for parameter, called, _ in members:
            alike = (parameter.dtype, parameter.device) == (first.dtype, first.device)
            if not alike or parameter.dtype not in FLOATS:
                raise InvalidArgument(
                    f"parameter {called} is {parameter.dtype} on {parameter.device}, expected "
                    "float32, bfloat16 or float16, the same for all parameters of an expert, on "
                    "one device"
                )
        group = StreamedGroup(
            len(self.groups), name, members, rank=0, ranks=1, prefix=self.prefix, numel=WHOLE
        )
        if group.nbytes < self.store.pack_below:
            raise InvalidArgument(
                f"{name} has {group.nbytes} bytes, but the store packs tensors below "
                f"{self.store.pack_below} together, which would move experts together: open it "
                "with options=commpress.tiered_mem.Options(pack_below=0)"
            )
        self.groups.append(group)
        for parameter, _, _ in members:
            self.group_of[id(parameter)] = group
            set_streamer(parameter, self)
        self.plan.stored.add((group.number, VALUES))
        return group

    def attach(self, kept: dict[int, dict[str, str]], state: Sequence[str], clips: bool) -> None:
        """Register an optimizer that stores the tensors ``kept`` of each expert; ``state`` are
        their keys."""
        if self.kept:
            raise InvalidArgument(
                "the experts have an optimizer already: pass all parameters to one ExpertOptimizer"
            )
        self.kept, self._state, self.squares = kept, tuple(state), {} if clips else None
        whole = max(group.nbytes for group in self.groups)
        part = max(m.parameter.nbytes for group in self.groups for m in group.members)
        # new gradients reuse the memory of earlier ones
        return_large_blocks(max(part + PAGE, LARGE), spare=2 * whole)
        self.plan.stored |= {
            (e, key)
            for e, names in kept.items()
            for key, name in names.items()
            if name in self.store
        }
        for group in self.groups:  # left by an unfinished step
            if (name := self.name((group.number, GRADIENT))) in self.store:
                self.store.delete(name)
        self._resize()

    def _resize(self) -> None:
        """Set the memory for ``resident`` experts of their present size."""
        largest = max(self.nbytes(group.number) for group in self.groups)
        capacity = self.store.usage().host_capacity
        resident = max(capacity // largest, 1) if self.resident is None else self.resident
        if resident * largest > capacity:
            raise InvalidArgument(
                f"resident={resident} experts with their "
                f"gradients{' and moments' * bool(self._state)} take {resident * largest} bytes, "
                f"but the store has {capacity} of host memory: open it with a larger host=, or "
                "pass a smaller resident="
            )
        self.plan.capacity = resident * largest
        self.forget_places()

    def nbytes(self, expert: int) -> int:
        """Return the bytes of an expert with its gradient and moments."""
        return sum(map(self._size, self._needs("update", expert)))

    # ------------------------------------------------------------ questions of the plan

    def _needs(self, kind: Kind, expert: int) -> list[Block]:
        if kind == "forward" or not self._trained(expert):
            return [(expert, VALUES)]
        keys = (VALUES, GRADIENT) if kind == "backward" else (VALUES, GRADIENT, *self._state)
        return [(expert, key) for key in keys]

    def _ends(self, kind: Kind, expert: int) -> list[Block]:
        return [(expert, GRADIENT)] if kind == "update" else []

    def _size(self, block: Block) -> int:
        group = self.groups[block[0]]
        return int(padded(group.numel * (group.dtype.itemsize if block[1] == VALUES else 4)))

    def _trained(self, expert: int) -> bool:
        return any(m.parameter.requires_grad for m in self.groups[expert].members)

    def name(self, block: Block) -> str:
        """Return a block's name in the store."""
        expert, key = block
        values = self.groups[expert].stored[0].name
        known = {VALUES: values, GRADIENT: f"{values}/{GRADIENT}"}
        return known[key] if key in known else self.kept[expert][key]

    # ------------------------------------------------------------ turns

    @contextmanager
    def turn(self, kind: Kind, expert: int) -> Iterator[None]:
        self.begin(kind, expert)
        try:
            yield
        finally:
            self.end(kind, expert)

    def begin(self, kind: Kind, expert: int) -> None:
        """Make room for the blocks of a turn and read them, and start reading for later turns."""
        moves = self.plan.begin(kind, expert)
        self._move(Moves(moves.leave))
        needed = self._needs(kind, expert)
        if moves.enter:
            for pending in self._leaving:
                pending.wait()
            self._leaving.clear()
        for block in needed:
            if block in self._entering:
                self._entering.pop(block).result()
        self._ahead()

    def end(self, kind: Kind, expert: int) -> None:
        self.plan.end(kind, expert)
        self._ahead()

    def _ahead(self) -> None:
        while self._moving and self._moving[0].done():
            self._moving.pop(0).result()
        self._move(self.plan.ahead())

    def _move(self, moves: Moves) -> None:
        if leave := [name for name in map(self.name, moves.leave) if name in self.store]:
            self._leaving = [
                pending
                for pending in self._leaving
                if not pending.done() or pending.future.exception()
            ]
            self._leaving.append(self.store.evict(leave))
        for block in moves.leave:
            self._entering.pop(block, None)
        if moves.enter:
            read = [self.name(block) for block in moves.enter if block in self.plan.stored]
            moving = self._mover.submit(self._enter, list(self._leaving), read)
            self._moving.append(moving)
            self._entering |= dict.fromkeys(moves.enter, moving)

    def _enter(self, leaving: list[Pending[None]], names: list[str]) -> None:
        """Read blocks in the background when there is room."""
        for pending in leaving:
            pending.wait()
        if names:
            self.store.prefetch(names)

    def forget_places(self) -> None:
        """Look up the places of all blocks before the next step, because others have used the
        store."""
        self._stale = True

    def look(self) -> None:
        if self._stale and not self._held:
            self._stale = False
            for moving in self._moving:
                moving.result()
            self._moving.clear()
            self._entering.clear()
            for block in list(self.plan.resident):
                self.plan.drop(block)
            for group in self.groups:
                for key in (VALUES, GRADIENT, *self._state):
                    block = (group.number, key)
                    if (key in (VALUES, GRADIENT) or group.number in self.kept) and (
                        name := self.name(block)
                    ) in self.store:
                        self.plan.add(block, resident=self.store.info(name).tier == "host")

    # ------------------------------------------------------------ forward and backward

    def begin_forward(self, layer: "TieredLayer", counts: Sequence[int]) -> "ExpertCall":
        """Start a forward, as soon as the number of tokens of each expert of the layer is known."""
        if torch._C._current_graph_task_id() == -1:
            self._release()  # left by an aborted backward
        self.look()
        experts = [layer.first + i for i, count in enumerate(counts) if count]
        order = self.plan.phase(
            "forward", layer.number, experts, differentiable=torch.is_grad_enabled()
        )
        call, self._call = ExpertCall(self, layer, order), None
        self._ahead()
        return call

    def hold(self, call: "ExpertCall", expert: int) -> torch.Tensor:
        """Return an expert's weights in backward, and keep them in memory until its gradient is
        complete."""
        held = self._held.get((call, expert))
        if held is None:
            if self._call is not call:
                self._call = call
                self.plan.phase("backward", call.layer.number, call.order[::-1])
                Variable._execution_engine.queue_callback(self._release)
            self.begin("backward", expert)
            borrow = self.store.borrow(self.name((expert, VALUES)), write=False)
            held = self._held[call, expert] = borrow, self._to_model(expert, borrow.__enter__())
        return held[1]

    def _to_model(self, expert: int, flat: torch.Tensor) -> torch.Tensor:
        self.store.crossing.up += flat.nbytes
        return flat.to(self.groups[expert].device)

    def _release(self) -> None:
        """Release, at the end of a backward, experts without a requested gradient."""
        for (_, expert), (borrow, _) in self._held.items():
            borrow.__exit__(None, None, None)
            self.plan.end("backward", expert)
            self.forget_places()
        self._held.clear()
        self._call = None

    @torch.no_grad()
    def take_gradients(
        self, call: "ExpertCall", expert: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """End an expert's backward: add its gradient in the store, in float32."""
        self.hold(call, expert)
        group = self.groups[expert]
        came = [
            (m, g)
            for m, g in zip(group.members, gradients, strict=True)
            if g is not None and m.parameter.requires_grad
        ]
        if came and not self.kept:
            raise InvalidArgument(
                "experts in a store have no optimizer, so their gradients would be lost: make "
                "commpress.moe.ExpertOptimizer(model.parameters(), torch.optim.AdamW, ...) before "
                "backward"
            )
        name, there = self.name((expert, GRADIENT)), self.graded.get(expert, set())
        if came:
            if not there:
                self.graded[expert] = there
                self.store.put(name, torch.zeros(()).expand(group.numel))
            with self.store.borrow(name) as flat:
                for member, gradient in came:
                    gradient = gradient if call.layer.ranks == 1 else gradient / call.layer.ranks
                    mine = member.view(flat)
                    mine.add_(gradient) if member.index in there else mine.copy_(gradient)
                    self.store.crossing.down += gradient.nbytes
                    there.add(member.index)
                if self.squares is not None:
                    self.squares[expert] = (
                        float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
                    )
        borrow, _ = self._held.pop((call, expert))
        borrow.__exit__(None, None, None)
        self.plan.end("backward", expert)
        if not there:
            self.plan.drop((expert, GRADIENT))
        self._ahead()

    # ------------------------------------------------------------ update

    def begin_update(self) -> list[int]:
        """Return the experts with a gradient, in the order of updates."""
        self._release()
        self.look()
        return self.plan.phase("update", -1, sorted(self.graded))

    def forget_gradient(self, expert: int) -> None:
        """Delete an expert's gradient, which was used or is not wanted, without writing it."""
        if self.graded.pop(expert, None) is not None:
            self.store.delete(self.name((expert, GRADIENT)))
        if self.squares is not None:
            self.squares.pop(expert, None)

    def drop_gradients(self) -> None:
        """Delete all gradients and end the step without an update."""
        self._release()
        for expert in list(self.graded):
            self.forget_gradient(expert)
            self.plan.drop((expert, GRADIENT))
        self.plan.over()

    def close(self) -> None:
        """End the thread. Experts stay in the store, which belongs to the caller; ``state_dict`` of
        the model still reads them."""
        self._mover.shutdown()


class TieredLayer:
    """One layer's experts: modules with parameters that show NaN, and their numbers among all
    experts in tiers."""

    def __init__(self, tiers: ExpertTiers, first: int, number: int) -> None:
        self.tiers, self.first, self.number = tiers, first, number
        self.channel: Channel | None = None  # to the ranks with the layer's other experts
        self.modules = nn.ModuleList()
        self.ranks = 1  # divisor of their gradients
        # makes autograd compute gradients of weights
        self._anchor = torch.zeros((), requires_grad=True)
        self._coming: ExpertCall | None = None

    @property
    def experts(self) -> range:
        return range(self.first, self.first + len(self.modules))

    def expect(self, counts: Sequence[int]) -> None:
        """Begin to read for ``counts`` rows of each expert while the rows are on their way."""
        self._coming = self.tiers.begin_forward(self, counts)

    def apply(self, parts: Sequence[torch.Tensor], arguments: Any = tuple) -> list[torch.Tensor]:
        """Return the results of experts with rows, in their order. ``arguments(rows)``: further
        arguments of an expert."""
        call, self._coming = self._coming, None
        counts = [len(part) for part in parts]
        if call is None or sorted(call.order) != [
            self.first + i for i, count in enumerate(counts) if count
        ]:
            call = self.tiers.begin_forward(self, counts)
        made: dict[int, torch.Tensor] = {}
        for expert in call.order:
            rows = parts[expert - self.first]
            with self.tiers.turn("forward", expert):
                made[expert] = call.forward(expert, rows, arguments(rows))
        return [made[expert] for expert in sorted(made)]


@dataclass(eq=False)
class ExpertCall:
    """One forward of a layer, with its experts in order."""

    tiers: ExpertTiers
    layer: TieredLayer
    order: list[int]

    def forward(self, expert: int, rows: torch.Tensor, more: tuple[Any, ...]) -> torch.Tensor:
        tiers, group = self.tiers, self.tiers.groups[expert]
        module = self.layer.modules[expert - self.layer.first]
        group.check()
        with tiers.store.borrow(tiers.name((expert, VALUES)), write=False) as held:
            flat = tiers._to_model(expert, held)
            weights = [member.view(flat) for member in group.members]
            trained = tiers._trained(expert)
            if torch.is_grad_enabled() and (trained or rows.requires_grad):
                given = rows if rows.requires_grad else None
                found = _Turn.apply(
                    given, self.layer._anchor if trained else None, self, expert, *weights
                )
                rows, weights = rows if given is None else found[0], list(found[1:])
            first, behind = flat.data_ptr(), flat.data_ptr() + flat.nbytes
            with saved_tensors_hooks(partial(self._pack, expert, first, behind), self._unpack):
                names = [name for name, _ in module.named_parameters()]
                result: torch.Tensor = functional_call(
                    module, dict(zip(names, weights, strict=True)), (rows, *more)
                )
        return result

    def _pack(self, expert: int, first: int, behind: int, tensor: torch.Tensor) -> Any:
        """Save only the place of a view of weights; save other tensors as usual."""
        if not tensor.numel() or not first <= tensor.data_ptr() < behind:
            return tensor
        return (
            expert,
            (tensor.data_ptr() - first) // tensor.dtype.itemsize,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        expert, start, shape, stride, dtype = packed
        flat = self.tiers.hold(self, expert).view(dtype)
        return flat.as_strided(shape, stride, flat.storage_offset() + start)


class _Turn(torch.autograd.Function):
    """Identity on rows and weights at the input of an expert; in backward it runs last, when all
    gradients of the expert are complete."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor | None,
        anchor: torch.Tensor | None,
        call: ExpertCall,
        expert: int,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.call, ctx.expert = call, expert
        ctx.set_materialize_grads(False)
        if anchor is None:
            ctx.mark_non_differentiable(*weights)
        return (None if rows is None else rows.view_as(rows), *weights)

    @staticmethod
    def backward(
        ctx: Any, rows: torch.Tensor | None, *gradients: torch.Tensor | None
    ) -> tuple[Any, ...]:
        ctx.call.tiers.take_gradients(ctx.call, ctx.expert, gradients)
        return (rows, None, None, None, *(None for _ in gradients))
