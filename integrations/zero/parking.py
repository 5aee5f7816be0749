"""Training state that steps aside while something else needs its memory.

    park   pieces of all storages are written | commit | their memory is freed
    wake   parameters, gradients and buffers are read, which a forward needs | the rest in the
           background: whoever uses the optimizer waits for it

Tensors and storages stay the same objects, and so do views, flat buffers and buckets of DDP that
share them; only the bytes go. Nothing is freed before all is committed, so an error while parking
changes nothing.
"""

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commpress.collectives.state import Stateful
from commpress.errors import Damaged, InvalidArgument, StateMismatch, StorageError
from commpress.integrations.zero.parked_state import (
    HostShelf,
    ParkedIndex,
    Shelf,
    StateStorage,
    StoreShelf,
    TrainingState,
    digest_of,
    parameters_in,
    parameters_of,
    plain,
    taken,
)
from commpress.integrations.zero.streamed_group import return_holes
from commpress.integrations.zero.wrapper import Wrapper
from commpress.optim.checkpoint import check_groups
from commpress.optim.layout import alike, local
from commpress.optim.local_updates import LocalUpdates
from commpress.tiered_mem import TieredStore

Streams = AbstractContextManager[Any]
Where = str | os.PathLike[str] | TieredStore
LEAST, MOST = 16 << 20, 128 << 20  # memory of a store that is opened for a folder
SHARE = 32  # of the state: 1/32
AHEAD = 4  # pieces that are read in advance

_AWAY: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules without parameters in memory
_PARKED: "weakref.WeakSet[Parked]" = weakref.WeakSet()  # of which something is not in memory


@dataclass
class ParkedCounters:
    """Bytes of the last time: ``freed``, ``written``, ``unchanged`` since the time before and not
    written again, ``recomputed`` from masters, and those that ``stayed``, because their memory is
    pinned or locked."""

    freed: int = 0
    written: int = 0
    unchanged: int = 0
    recomputed: int = 0
    stayed: int = 0


class Absent:
    """The ``state`` of an optimizer whose state is not in memory: its use is refused or waits."""

    def __init__(self, reach: Callable[[], Any]) -> None:
        self.reach = reach

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.reach(), name)

    def __copy__(self) -> Any:
        return copy.copy(self.reach())

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        return copy.deepcopy(self.reach(), known)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reach().__reduce_ex__(protocol)

    def __getitem__(self, key: Any) -> Any:
        return self.reach()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.reach()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.reach()[key]

    def __contains__(self, key: object) -> bool:
        return key in self.reach()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.reach())

    def __len__(self) -> int:
        return len(self.reach())


@cache
def _watch_steps() -> None:
    """Let steps of all optimizers wait for a state that is not in memory."""

    def arrive(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer.state, Absent):
            optimizer.state.reach()

    register_optimizer_step_pre_hook(arrive)


class Parked:
    """Training state that can be parked; see ``parked``. As a context manager it may be entered
    again and again."""

    def __init__(
        self,
        model: nn.Module,
        others: Sequence[Any],
        where: Where | Literal["host"],
        devices: Sequence[str],
    ) -> None:
        self.counters = ParkedCounters()
        self._model, self._others, self._where = model, list(map(_inner, others)), where
        self._devices = frozenset(devices)
        self._host = HostShelf() if where == "host" else None
        self._shelf: Shelf | None = None
        self._storages: list[StateStorage] = []
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []  # half precision, float32
        self._absent: list[tuple[Any, Any, Absent]] = []  # optimizer, its state, and in its place
        self._hooks: list[Any] = []
        self._memory: dict[str, int] = {}  # storages of parameters and buffers, by name
        self._away = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Parked":
        self.park()
        return self

    def __exit__(self, *error: object) -> None:
        self.wake()

    # ---------------------------------------------------------------- going

    @torch.no_grad()
    def park(self) -> None:
        """Write the state, commit it and free its memory; without an effect if that fails."""
        if any(module in _AWAY for module in self._model.modules()):
            raise InvalidArgument(
                "model is parked already: leave the first commpress.parked before another one"
            )
        self.settle()
        for module in self._model.modules():
            if any(each.__name__ == "FSDPModule" for each in type(module).__mro__):
                module.reshard()  # type: ignore[operator]
        state = TrainingState(self._model, self._others)
        self._check_others(state)
        shelf = self._open(sum(s.nbytes for s in state.storages))
        try:
            self._write(state, shelf)
        except BaseException:
            shelf.close()
            raise
        self._shelf, self._away, self._memory = shelf, True, self._memory_now()
        _PARKED.add(self)
        self._masters = [
            (state.tensors[s.name].data, state.tensors[s.master].data)
            for s in self._storages
            if s.master is not None
        ]
        self._refuse()
        self._free()

    def _check_others(self, state: TrainingState) -> None:
        """Refuse a store and tensors of others of which something is not in memory."""
        mine = {each.storage._cdata for each in state.storages}
        for other in _PARKED:
            if isinstance(self._where, TieredStore) and other._where is self._where:
                raise InvalidArgument(
                    "store has the state of another commpress.parked, which is not back in memory: "
                    "call its settle() first, or pass a store of its own"
                )
            if shared := [s.name for s in other._storages if s.storage._cdata in mine]:
                raise InvalidArgument(
                    f"{shared[0]!r} is parked already, with another model that has the same "
                    "tensor: leave the first commpress.parked before another one"
                )

    def _open(self, nbytes: int) -> Shelf:
        if self._host is not None:
            return self._host
        if isinstance(self._where, TieredStore):
            return StoreShelf(self._where, own=False)
        memory = min(max(nbytes // SHARE, LEAST), MOST)
        opened = TieredStore.open(self._where, host=memory, engine="threads")
        return StoreShelf(opened, own=True)

    def _write(self, state: TrainingState, shelf: Shelf) -> None:
        """Write all pieces that have changed, and commit."""
        self.counters = count = ParkedCounters()
        before, names = shelf.digests(), list[str]()
        # what does not last, such as copies that state_dict made, is in a checkpoint alone
        storages = [s for s in state.storages if self._host is None or self._leaves(s)]
        for each in storages:
            if each.master is not None:
                count.recomputed += each.nbytes
                continue
            for name, piece in each.pieces(shelf.piece):
                names.append(name)
                digest = None if self._host else digest_of(piece)
                each.digests.append(digest)
                if name in before and before[name] == digest:
                    count.unchanged += piece.numel()
                else:
                    shelf.put(name, piece)
                    count.written += piece.numel()
        shelf.commit(names, b"" if self._host else state.index(shelf.piece, shelf.places))
        self._storages = [s for s in storages if self._leaves(s)]

    def _leaves(self, each: StateStorage) -> bool:
        return each.lasting and each.storage.device.type in self._devices

    def _refuse(self) -> None:
        """Refuse the use of modules and optimizers."""
        _watch_steps()
        for module in self._model.modules():
            _AWAY.add(module)
            self._hooks.append(module.register_forward_pre_hook(self._check))
            self._hooks.append(module.register_state_dict_pre_hook(self._check))
            self._hooks.append(module.register_load_state_dict_pre_hook(self._check))
        for other in self._others:
            if isinstance(other, torch.optim.Optimizer):
                optimizer: Any = other
                absent = Absent(partial(self._reach, optimizer.state))
                self._absent.append((optimizer, optimizer.state, absent))
                optimizer.state = absent

    def _free(self) -> None:
        for each in self._storages:
            left = each.leave()
            self.counters.freed += each.nbytes * left
            self.counters.stayed += each.nbytes * (not left)
        return_holes()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------- returning

    def wake(self) -> None:
        """Return when parameters, gradients and buffers are in memory, with the bits that they had;
        the rest follows. If that fails, free memory or repair the disk and call it again."""
        if not self._away:
            return
        for each in self._storages:
            each.return_empty()
        self._fill([s for s in self._storages if s.first and s.master is None])
        for half, master in self._masters:
            half.copy_(master)
        self._away = False
        for module in self._model.modules():
            _AWAY.discard(module)
        while self._hooks:
            self._hooks.pop().remove()
        rest = partial(self._return_rest, [s for s in self._storages if not s.first])
        self._thread = threading.Thread(target=rest, args=(self._streams(),), name="parked")
        self._thread.start()
        if not self._absent:  # nobody would wait
            self.settle()
        self._check_memory()

    def _memory_now(self) -> dict[str, int]:
        every = parameters_of(self._model, self._others) | dict(plain(self._model).named_buffers())
        return {name: local(each).untyped_storage()._cdata for name, each in every.items()}

    def _check_memory(self) -> None:
        """Refuse a model that was converted while its values were not in memory."""
        for name, now in self._memory_now().items():
            if self._memory.get(name, now) != now:
                raise StateMismatch(
                    f"{name!r} was replaced while it was parked, as by model.to(), when it had no "
                    "values: convert a model before it is parked, and load this checkpoint into a "
                    "new one"
                )

    def settle(self) -> None:
        """Wait until everything is in memory; raise the error if something could not return. Steps
        and readers of an optimizer's state do it by themselves."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        if self._thread is None:
            return
        self._thread = None
        for optimizer, state, absent in self._absent:
            if optimizer.state is absent:  # unless a state was loaded in between
                optimizer.state = state
        self._absent, self._storages, self._masters, self._shelf = [], [], [], None
        _PARKED.discard(self)

    def _fill(self, storages: Sequence[StateStorage]) -> None:
        shelf = self._shelf
        assert shelf is not None
        pieces = [piece for each in storages for piece in each.pieces(shelf.piece)]
        try:
            for name, _ in pieces[:AHEAD]:
                shelf.ahead(name)
            for i, (name, piece) in enumerate(pieces):
                shelf.read(name, piece)
                if i + AHEAD < len(pieces):
                    shelf.ahead(pieces[i + AHEAD][0])
        except StorageError as error:
            damage = error if isinstance(error, Damaged) else Damaged("")
            raise Damaged(
                f"training state cannot return: {error}. Its tensors are without values: start "
                "again from an earlier checkpoint",
                names=damage.names,
                file=damage.file,
                offset=damage.offset,
            ) from error

    def _return_rest(self, storages: Sequence[StateStorage], streams: Streams) -> None:
        try:
            with torch.no_grad(), streams:
                self._fill(storages)
            if self._shelf is not None:
                self._shelf.close()
        except BaseException as error:  # raised in settle
            self._error = error

    def _streams(self) -> Streams:
        """Return a context in which copies to a device run beside the computation."""
        if not any(not s.on_cpu for s in self._storages):
            return nullcontext()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())  # which may still use the memory
        return torch.cuda.stream(side)

    def _check(self, *_: Any, **__: Any) -> None:
        if self._away:
            raise InvalidArgument(
                "training state is parked and its values are not in memory: leave "
                "commpress.parked, or call wake(), before model or optimizer are used"
            )

    def _reach(self, state: Any) -> Any:
        self._check()
        self.settle()
        return state


def parked(model: nn.Module, *others: Any, store: Where | Literal["host"]) -> Parked:
    """Return a context manager in which the training state is not in memory: parameters, gradients,
    buffers and the state of optimizers. Training goes on afterwards with the same tensors, bit for
    bit.

    ``others``: optimizers, and other objects with a ``state_dict`` that the checkpoint should have,
    such as schedules; these stay in memory.

    ``store`` is a folder on a disk, or a ``TieredStore`` that is used for nothing else. Entering
    commits the state there as a checkpoint for ``load_parked``, and only then frees memory; pieces
    that have not changed since the last time are not written again. "host" copies from CUDA devices
    to pinned host memory, keeps that memory for the next time, and leaves no checkpoint; it is
    refused if the model is on the processor, where it would free nothing.

    Leaving returns as soon as parameters, gradients and buffers are in memory. The optimizers'
    state follows in the background; ``step``, ``state_dict`` and whoever reads ``optimizer.state``
    wait for it, ``settle`` too. While parked, calls of modules and optimizers are refused. Direct
    reads of a parameter are not noticed: on the processor they give zeros.

    A half-precision parameter that is a float32 tensor of the state, rounded, is not stored but
    rounded again. Under FSDP2 each rank parks its shards in a folder of its own. Residuals of
    compressed optimizers and hooks, and DDP's buckets without gradients, stay in memory. Enter it
    between steps.
    """
    _check_model(model)
    for i, other in enumerate(others):
        _check_other(i, _inner(other))
    if store == "host":
        if not any(local(p).is_cuda for p in parameters_of(model, others).values()):
            raise InvalidArgument(
                "store is 'host', but all parameters are in host memory, so nothing would be "
                "freed: pass a folder on a disk"
            )
    elif not isinstance(store, str | os.PathLike | TieredStore):
        raise InvalidArgument(
            f"store is {store!r:.100}, expected a folder, a TieredStore or 'host'"
        )
    for name, p in parameters_of(model, list(map(_inner, others))).items():
        taken(name, p)
    devices = ("cuda",) if store == "host" else ("cpu", "cuda")
    return Parked(model, others, store, devices)


@torch.no_grad()
def load_parked(model: nn.Module, *others: Any, store: Where) -> None:
    """Load the last checkpoint of ``parked`` into a model and ``others``, given in the same order:
    in another process, too, and after this one was killed while parked. A model that does not fit
    is refused before anything is changed."""
    _check_model(model)
    if not isinstance(store, TieredStore):
        with TieredStore.open(store, host=MOST, engine="threads") as opened:
            return load_parked(model, *others, store=opened)
    objects = list(map(_inner, others))
    index = ParkedIndex(store)
    parameters = parameters_of(model, objects)
    own = {f"parameters/{name}": local(p) for name, p in parameters.items()}
    own |= {f"buffers/{name}": b for name, b in plain(model).named_buffers()}
    saved = {n for n in index.tensors if n.startswith(("parameters/", "buffers/"))}
    for name in sorted(saved ^ own.keys()):
        where = "not in the checkpoint" if name in own else "in the checkpoint alone"
        raise StateMismatch(f"{name!r} is {where}: load it into the model that was parked")
    for name, tensor in own.items():
        _, dtype, _, shape, _ = index.tensors[name]
        if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            raise StateMismatch(
                f"{name!r} is {dtype} of shape {shape} in the checkpoint, expected {tensor.dtype} "
                f"of shape {tuple(tensor.shape)}"
            )
    outlines = index.states(len(objects), lambda name: torch.empty(0, device="meta"))
    for i, (other, outline) in enumerate(zip(objects, outlines, strict=True)):
        if not isinstance(other, torch.optim.Optimizer):
            continue
        if "param_groups" in outline:
            check_groups(other, outline["param_groups"], f"the state of others[{i}]")
        elif not isinstance(other, Stateful):
            raise StateMismatch(
                f"the state of others[{i}] is not an optimizer's: pass those that were given to "
                "commpress.parked, in the same order"
            )
    last = ""
    for name, tensor in own.items():
        if index.tensors[name][0] != last:
            index.forget()
        last = index.tensors[name][0]
        tensor.copy_(index.read(name))
    index.forget()
    for name, p in parameters.items():
        gradient = f"gradients/{name}"
        found = index.read(gradient).to(p.device) if gradient in index.tensors else None
        p.grad = None if found is None else alike(found, p)
    for other, state in zip(objects, index.states(len(objects), index.read), strict=True):
        _cut(other, state)
        other.load_state_dict(state)


def _cut(optimizer: Any, state: Any) -> None:
    """Make shards of the state DTensors, as their parameters are."""
    for i, p in enumerate(parameters_in(optimizer)):
        entries = state.get("state", {}).get(i, {})
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == local(p).shape:
                entries[name] = alike(value.to(p.device), p)


def _inner(other: Any) -> Any:
    """Return the optimizer inside of one that only forwards, as Accelerate's does."""
    inner = getattr(other, "optimizer", None)
    both = isinstance(other, torch.optim.Optimizer) and isinstance(inner, torch.optim.Optimizer)
    return inner if both and not isinstance(other, Stateful | Wrapper) else other


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {model!r:.100}, expected a module")


def _check_other(i: int, other: Any) -> None:
    if isinstance(other, Wrapper):
        raise InvalidArgument(
            f"others[{i}] is a {type(other).__name__}, whose state is divided or in a store "
            "already: park the model alone"
        )
    if isinstance(other, LocalUpdates):
        raise InvalidArgument(
            f"others[{i}] is LocalUpdates, whose rounds change weights in the background: training "
            "with it cannot be parked"
        )
    if isinstance(other, Stateful) and any(local(p).is_cuda for p in parameters_in(other)):
        raise InvalidArgument(
            f"others[{i}] is a {type(other).__name__} on a CUDA device, whose kernels keep "
            "addresses, and memory of a device returns at others: park an optimizer of torch, or "
            "the model alone"
        )
    if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
        raise InvalidArgument(
            f"others[{i}] is {other!r:.100}, expected an optimizer or another object with "
            "state_dict and load_state_dict"
        )
