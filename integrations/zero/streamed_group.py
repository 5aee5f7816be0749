"""Parameters of a streamed model that are fetched and released together.

    store   ranges of this rank's row        in the parameters' dtype
    flat    [ P · width ]      allocated only while the group is in use; parameters are views of it

Note: one lasting storage. Views that autograd saves of a parameter, such as its transpose, share
the storage of ``flat``. So its bytes are freed and allocated again, while the storage object stays:
views saved in forward are valid again in backward. In between, a parameter is one NaN expanded to
its shape, so that reading it outside of its block gives NaN instead of a crash.
"""

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from commpress.collectives.allreduce import Call
from commpress.collectives.reduce_scatter import gather_rows
from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import ALIGN, FlatGroup, Member, Numbered
from commpress.integrations.zero.sweep import Sweep
from commpress.optim.layout import LocalWeights
from commpress.tiered_mem import TieredStore
from commpress.work import Steps


@dataclass(frozen=True)
class StoredRange:
    """A range of this rank's row of a group: one tensor of the store."""

    name: str
    start: int
    numel: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.start : self.start + self.numel]


class StreamedGroup(FlatGroup):
    """A group of streamed parameters. ``holders`` counts the present users of its values."""

    def __init__(
        self,
        number: int,
        name: str,
        members: Sequence[Numbered],
        *,
        rank: int,
        ranks: int,
        prefix: str,
        numel: int,
    ) -> None:
        super().__init__(number, members, rank=rank, ranks=ranks)
        self.name, self.holders = name, 0
        self._sweeps: list[Sweep] = []  # updates of its stored values
        self.kept, self.shared = False, False
        numel = max(numel // ALIGN, 1) * ALIGN
        owned = -(-self.owned // ALIGN) * ALIGN
        self.pieces = max(-(-self.width // numel), 1)  # ranges of the longest row
        self.stored = [
            StoredRange(
                f"{prefix}/{number:05d}/{start // numel:04d}", start, min(numel, owned - start)
            )
            for start in range(0, owned, numel)
        ]
        self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self._nothing = [nan.expand(m.parameter.shape) for m in self.members]
        self.resize(0)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def present(self) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    def follow(self, sweep: Sweep) -> None:
        """Wait for this update of stored values before they are used."""
        names = [one.name for one in self.stored]
        self._sweeps = [sweep, *(one for one in self._sweeps if not one.has(names))]

    def up_to_date(self) -> bool:
        """Return whether no update of its stored values is running."""
        return all(sweep.has(one.name for one in self.stored) for sweep in self._sweeps)

    def settle(self) -> None:
        """Wait until none is."""
        for sweep in self._sweeps:
            sweep.wait([one.name for one in self.stored])

    @property
    def row(self) -> torch.Tensor:
        return self.flat[self.first : self.first + self.width]

    def resize(self, nbytes: int) -> None:
        self.flat.untyped_storage().resize_(nbytes)

    def check(self) -> None:
        """Raise ``InvalidArgument`` if the parameters were given other values, another dtype or
        device, which would be lost silently."""
        for member, nothing in zip(self.members, self._nothing, strict=True):
            here = (
                self.flat.data_ptr() + member.first * self.dtype.itemsize
                if self.present
                else nothing.data_ptr()
            )
            parameter = member.parameter
            if parameter.numel() and (
                parameter.data_ptr() != here or parameter.dtype != self.dtype
            ):
                raise InvalidArgument(
                    f"parameter {member.name!r}, now {parameter.dtype} on {parameter.device}, was "
                    f"replaced after commpress.stream, which made it {self.dtype} on "
                    f"{self.device}: convert and move the model before stream, and set values by "
                    "load_state_dict"
                )

    def appear(self) -> None:
        """Make parameters views of ``flat``, with allocated but uninitialized bytes."""
        self.check()
        if not self.present:
            self.resize(self.nbytes)
            for member in self.members:
                member.parameter.data = member.view(self.flat)

    def vanish(self) -> None:
        for member, nothing in zip(self.members, self._nothing, strict=True):
            member.parameter.data = nothing
        self.resize(0)

    def release(self) -> None:
        """End one use of the values, and free them after the last."""
        self.holders -= 1
        if not self.holders and not self.kept and self.present:
            self.vanish()

    def fill(self) -> None:
        """Copy the parameters, wherever they are, into ``flat``, and make them views of it."""
        self.resize(self.nbytes)
        self.flat.zero_()
        for member in self.members:
            view = member.view(self.flat)
            view.copy_(member.parameter)
            member.parameter.data = view

    def save(self, store: TieredStore) -> None:
        self.settle()
        for stored in self.stored:
            store.put(stored.name, stored.of(self.row))
            store.crossing.down += stored.numel * self.dtype.itemsize

    def load(self, store: TieredStore, row: torch.Tensor) -> None:
        """Read this rank's row, which is up to date, from the store."""
        for stored in self.stored:
            with store.borrow(stored.name, write=False) as held:
                stored.of(row).copy_(held, non_blocking=True)
                store.used_on(stored.name, row.device)
            store.crossing.up += stored.numel * self.dtype.itemsize

    @torch.no_grad()
    def read(self, store: TieredStore, member: Member) -> torch.Tensor:
        """Return a parameter with the values of this rank's row, and zeros elsewhere."""
        self.settle()
        values = torch.zeros(member.parameter.shape, dtype=self.dtype, device=self.device)
        for stored, here, there in self._of(member):
            with store.borrow(stored.name, write=False) as held:
                values.view(-1)[there].copy_(held[here])
        return values

    def write(self, store: TieredStore, member: Member) -> None:
        """Write a parameter's present values in this rank's row to the store."""
        self.settle()
        for stored, here, there in self._of(member):
            with store.borrow(stored.name) as held:
                held[here].copy_(member.view(self.flat).view(-1)[there])

    def _of(self, member: Member) -> Iterator[tuple[StoredRange, slice, slice]]:
        """Yield (stored range, its elements, elements of the parameter) for this rank's row."""
        for stored in self.stored:
            for other, first, place in self.overlaps(stored.start, stored.numel):
                if other is member:
                    yield stored, place, slice(first, first + place.stop - place.start)

    def gather(self, store: TieredStore, call: Call) -> Steps[None]:
        """Gather the rows of all ranks, through scratch memory, because arrays that kernels see
        would fix the size of the storage."""
        row = call.workspace.lend(self.width, torch.float32, self.device)
        flat = call.workspace.lend(self.numel, torch.float32, self.device)
        self.load(store, row)
        yield from gather_rows(row, flat, self.gather_plan, call)
        self.flat.copy_(flat)
        call.workspace.take_back(row, flat)


class StreamedWeights(LocalWeights):
    """One stored range for local updates. ``written`` is called with its name after a change."""

    def __init__(
        self,
        stored: StoredRange,
        group: StreamedGroup,
        store: TieredStore,
        written: Callable[[str], None],
    ) -> None:
        self.name, self._store, self._written = stored.name, store, written
        self._group = group
        self.parameter = self.source = torch.empty(stored.numel, dtype=group.dtype, device="meta")
        self.shape, self.dtype, self.device = self.source.shape, group.dtype, group.device

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[torch.Tensor]:
        nbytes = self.numel * self.dtype.itemsize
        self._group.settle()
        with self._store.borrow(self.name, write=write) as held:
            yield held
        if write:
            self._store.crossing.up += nbytes
            self._written(self.name)
        else:
            self._store.crossing.down += nbytes


# ---------------------------------------------------------------- streamers of parameters

# Streamed parameter → weak reference to its ``Streamed``, for other objects that are given the
# parameter. A global table, so that no attribute is set on the parameter.
_STREAMERS: Any = WeakIdKeyDictionary()


def is_streamed(parameter: torch.Tensor) -> bool:
    return streamer_of(parameter) is not None


def streamer_of(parameter: torch.Tensor) -> Any:
    """Return the ``Streamed`` of a parameter, or None."""
    found = _STREAMERS.get(parameter)
    return None if found is None else found()


def streamers() -> set[object]:
    """Return all present ``Streamed``."""
    return {streamer for found in _STREAMERS.values() if (streamer := found()) is not None}


def set_streamer(parameter: torch.Tensor, streamer: object) -> None:
    _STREAMERS[parameter] = weakref.ref(streamer)


# ---------------------------------------------------------------- first values


# modules that were on the meta device, by id, and which of their buffers
Fresh = dict[int, list[str]]
UNSET = 0xA5  # every byte of an uninitialized buffer


def on_memory(model: nn.Module) -> Fresh:
    """Move parameters (without their bytes) and buffers from the meta device to memory; return
    which ones need values."""
    made: dict[int, nn.Parameter] = {}
    fresh: Fresh = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                fresh.setdefault(id(module), [])
                if id(parameter) not in made:
                    nothing = torch.full((), float("nan"), dtype=parameter.dtype).expand(
                        parameter.shape
                    )
                    made[id(parameter)] = nn.Parameter(nothing, parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                fresh.setdefault(id(module), []).append(name)
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return fresh


class FirstValues:
    """Write first values into a store: those of the parameters or, for parameters from the meta
    device, those of the model's own functions.

    Modules are initialized in the order in which a constructor registers them, so that a seed gives
    the values of a model built in memory. A group is in memory until all its modules are
    initialized.
    """

    def __init__(
        self,
        groups: list[StreamedGroup],
        fresh: Fresh,
        initialize: Callable[[nn.Module], object] | None = None,
        written: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``written`` is called with the name of each group."""
        self._written = written
        self._groups = {id(m.parameter): group for group in groups for m in group.members}
        self._fresh, self._initialize = fresh, initialize
        # module's id → its model's function
        self._models: dict[int, Callable[[nn.Module], object]] = {}

    @torch.no_grad()
    def write(self, model: nn.Module, store: TieredStore) -> None:
        """Write all groups to the store and release them."""
        self._find_functions(model)
        visits = Counter(
            id(p) for module in model.modules() for p in module.parameters(recurse=False)
        )
        left = {
            group: sum(visits[id(m.parameter)] for m in group.members)
            for group in self._groups.values()
        }
        done: set[int] = set()
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            for group in dict.fromkeys(self._groups[id(p)] for p in own):
                if not group.present:
                    group.fill()
            if id(module) in self._fresh:
                self._reset(name, module, {id(p) for p in own} & done)
            done |= {id(p) for p in own}
            for p in own:
                group = self._groups[id(p)]
                left[group] -= 1
                if not left[group]:
                    group.save(store)
                    self._written(group.name)
                    group.vanish()

    @torch.no_grad()
    def only_buffers(self, model: nn.Module) -> None:
        """Initialize buffers, which no store has; parameters stay out of memory."""
        self._find_functions(model)
        for name, module in model.named_modules():
            if self._fresh.get(id(module)):
                groups = {self._groups[id(p)] for p in module.parameters(recurse=False)}
                for group in groups:
                    group.fill()
                with torch.random.fork_rng(devices=[]):
                    self._reset(name, module, set())
                for group in groups:
                    group.vanish()

    def _find_functions(self, model: nn.Module) -> None:
        """Find the functions by which models of transformers initialize one module at a time, an
        inner model its own part."""
        for part in model.modules() if self._initialize is None else ():
            if callable(function := getattr(part, "_init_weights", None)):
                self._models |= {id(module): function for module in part.modules()}

    def _reset(self, name: str, module: nn.Module, done: set[int]) -> None:
        """Initialize a module, except parameters that another module has initialized."""
        function = self._initialize or self._models.get(id(module))
        reset = getattr(module, "reset_parameters", None)
        if function is None and not callable(reset):
            raise InvalidArgument(
                f"module {name!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters: give it one, pass initialize= or weights=, or build it in memory"
            )
        before = {p: p.clone() for p in module.parameters(recurse=False) if id(p) in done}
        buffers = {one: module.get_buffer(one) for one in self._fresh[id(module)]}
        for buffer in buffers.values():
            _bytes(buffer).fill_(UNSET)
        unset = {} if function is None else self._unset(module)
        if function is not None:
            function(module)
        elif reset is not None:
            reset()
        for own, parameter in unset.items():
            if bool((_bytes(parameter) == UNSET).all()):
                raise InvalidArgument(
                    f"parameter {own!r} of module {name!r} ({type(module).__name__}) is on the "
                    "meta device, and the function that initializes it gives it no values: pass "
                    "another initialize=, or weights="
                )
        for one, buffer in buffers.items():
            if (
                module.get_buffer(one) is buffer
                and buffer.numel()
                and bool((_bytes(buffer) == UNSET).all())
            ):
                who = "reset_parameters" if function is None else "the function that initializes it"
                raise InvalidArgument(
                    f"buffer {one!r} of module {name!r} ({type(module).__name__}) is on the meta "
                    f"device and {who} gives it no values: let it do so, or build the module in "
                    "memory"
                )
        for parameter, value in before.items():
            parameter.copy_(value)

    @staticmethod
    def _unset(module: nn.Module) -> dict[str, nn.Parameter]:
        """Fill the module's own parameters with bytes that no initialization gives, and return
        them."""
        own = dict(module.named_parameters(recurse=False))
        for parameter in own.values():
            _bytes(parameter.data).fill_(UNSET)
        return {name: parameter for name, parameter in own.items() if parameter.numel()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- memory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 4 << 20
LARGEST = 32 << 20  # glibc always maps larger blocks by themselves
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # the user's settings take precedence


@cache
def return_large_blocks(large: int = LARGE, *, spare: int = 0) -> bool:
    """Make the allocator return freed blocks of ``large`` bytes to the system at once, and the free
    end of the heap beyond ``spare`` bytes (at least 2 · ``large``). Return False if the allocator
    is not glibc's or was tuned by the environment.

    glibc maps a large block by itself and unmaps it when it is freed, but it raises the threshold
    up to 32 MiB as such blocks are freed. From then on gradients and temporaries come from one heap
    for each thread, where small lasting objects keep freed memory between them from being returned:
    memory then grows with the number of layers, though only a few are ever in use.
    """
    if not _glibc() or any(name in os.environ for name in CHOSEN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(
        mallopt(M_MMAP_THRESHOLD, min(large, LARGEST))
        and mallopt(M_TRIM_THRESHOLD, max(2 * large, spare))
    )


def return_holes() -> bool:
    """Return pages of freed memory between lasting objects to the system; return False if the
    allocator is not glibc's."""
    return _glibc() and bool(ctypes.CDLL(None).malloc_trim(0))


@cache
def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # another system, another C library
        return False
