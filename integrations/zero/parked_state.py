"""Training state in storages and, in a store, as a checkpoint.

    parked/index                       JSON: tensors by name, each a view of a storage
    parked/parameters/0.weight/7@3     a piece of a storage, which has the name of its first tensor,
                                       as the third commit wrote it

A half-precision parameter that is a float32 tensor of the state, rounded, is not written: its index
entry names that tensor.
"""

import ctypes
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commpress.checksum import checksum_of
from commpress.errors import Damaged, InvalidArgument, StateMismatch
from commpress.integrations.zero.activation_tier import HostBuffers
from commpress.integrations.zero.safetensors_file import outline_of, state_of
from commpress.integrations.zero.streamed_group import is_streamed
from commpress.optim.layout import local
from commpress.tiered_mem import TieredStore
from commpress.tiered_mem.blocks import Pending
from commpress.tiered_mem.manifest import DTYPES

PREFIX = "parked/"
INDEX = PREFIX + "index"
FORMAT = 1
LARGEST_INDEX = 256 << 20
PIECE = 16 << 20
HUGE = 2 << 20  # a huge page
HALF = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------- memory


@cache
def _madvise() -> Callable[..., int]:
    return ctypes.CDLL(None).madvise


def advise(storage: torch.UntypedStorage, advice: int, unit: int) -> bool:
    """Give the kernel advice on the whole units of memory inside a storage of the processor."""
    begin = -(-storage.data_ptr() // unit) * unit
    end = (storage.data_ptr() + storage.nbytes()) // unit * unit
    return begin >= end or not _madvise()(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice
    )


@dataclass(eq=False)
class StateStorage:
    """A storage with some of the state. ``lasting``: its tensors live on; ``first``: a forward or
    backward needs it; ``master``: the name of the tensor that it is, rounded."""

    name: str
    storage: torch.UntypedStorage
    nbytes: int
    lasting: bool = False
    first: bool = False
    master: str | None = None
    digests: list[int | None] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return self.storage.device.type == "cpu"

    @property
    def pinned(self) -> bool:
        """Return whether CUDA may use the memory by its physical address."""
        return self.on_cpu and torch.cuda.is_initialized() and self.bytes().is_pinned()

    def bytes(self) -> torch.Tensor:
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage)

    def pieces(self, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names in the store and bytes."""
        whole = self.bytes()
        for i, at in enumerate(range(0, self.nbytes, size)):
            yield f"{PREFIX}{self.name}/{i}", whole[at : at + size]

    def leave(self) -> bool:
        """Free the memory; return False if it is pinned or locked. On the processor the addresses
        stay, because kernels, numpy and buckets of DDP know them; reading them gives zeros."""
        if self.pinned:
            return False
        if self.on_cpu:
            return advise(self.storage, mmap.MADV_DONTNEED, mmap.PAGESIZE)
        self.storage.resize_(0)
        return True

    def return_empty(self) -> None:
        """Have memory again, with any content. Filling huge pages takes a third of the time."""
        if not self.on_cpu:
            self.storage.resize_(self.nbytes)
        elif self.nbytes >= 2 * HUGE:
            advise(self.storage, mmap.MADV_HUGEPAGE, HUGE)


# ---------------------------------------------------------------- what there is


def parameters_of(model: nn.Module, others: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the model's parameters, and those of optimizers that are not the model's, such as
    float32 masters."""
    found: dict[str, torch.Tensor] = dict(plain(model).named_parameters())
    known = {id(p) for p in found.values()}
    for i, optimizer in enumerate(others):
        for j, p in enumerate(parameters_in(optimizer)):
            if id(p) not in known:
                known.add(id(p))
                found[f"optimizer/{i}/{j}"] = p
    return found


def parameters_in(optimizer: Any) -> list[torch.Tensor]:
    """Return an optimizer's parameters; none of another object."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def taken(place: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; refuse tensors whose memory cannot be freed."""
    part = local(tensor)
    if (
        type(part) not in (torch.Tensor, nn.Parameter, nn.Buffer)
        or part.layout != torch.strided
        or part.device.type not in ("cpu", "cuda")
        or dtype_of(part) not in DTYPES
        or part.is_conj()
        or part.is_neg()
    ):
        raise InvalidArgument(
            f"{place} is a {type(part).__name__} of {part.dtype} and {part.layout} on "
            f"{part.device}, expected a dense tensor on the processor or a CUDA device: it cannot "
            "be parked"
        )
    storage = part.untyped_storage()
    if is_streamed(tensor) or (part.numel() and not storage.nbytes()):
        raise InvalidArgument(
            f"{place} has no bytes in memory: it is streamed from a store, sharded by FSDP1 or "
            "parked already, and cannot be parked"
        )
    if part.device.type == "cpu" and storage.is_shared():
        raise InvalidArgument(
            f"{place} is in memory shared with other processes, which parking would not free: park "
            "a model that is not shared"
        )
    return part


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class TrainingState:
    """The state of a model and of others, optimizers among them: named tensors and the storages
    that contain them."""

    def __init__(self, model: nn.Module, others: Sequence[Any]) -> None:
        parameters = parameters_of(model, others)
        self.tensors: dict[str, torch.Tensor] = {}
        self._storages: dict[int, StateStorage] = {}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        buffers = dict(plain(model).named_buffers())
        named = {"parameters": parameters, "gradients": gradients, "buffers": buffers}
        for kind, each in named.items():
            for name, tensor in each.items():
                part = self.tensors[f"{kind}/{name}"] = taken(name, tensor)
                self._add(f"{kind}/{name}", part, lasting=True, first=True)
        self.outline = outline_of([o.state_dict() for o in others], "state", self.tensors, taken)
        for name, tensor in self.tensors.items():
            self._add(name, tensor)
        states = [o.state for o in others if isinstance(o, torch.optim.Optimizer)]
        for i, tensor in enumerate(tensors_in([list(state.values()) for state in states])):
            self._add(
                f"unsaved/{i}", taken(f"a tensor of optimizer.state, {i}", tensor), lasting=True
            )
        self._find_masters()

    @property
    def storages(self) -> list[StateStorage]:
        return list(self._storages.values())

    def storage_of(self, tensor: torch.Tensor) -> StateStorage:
        return self._storages[tensor.untyped_storage()._cdata]

    def _add(
        self, name: str, tensor: torch.Tensor, *, lasting: bool = False, first: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.setdefault(
            storage._cdata, StateStorage(name, storage, storage.nbytes())
        )
        known.lasting, known.first = known.lasting or lasting, known.first or first

    def _find_masters(self) -> None:
        """Find parameters in half precision that are float32 tensors of the state, rounded."""
        masters: dict[torch.Size, list[str]] = {}
        for name, tensor in self.tensors.items():
            lasts = self.storage_of(tensor).lasting and tensor.is_contiguous()
            if lasts and tensor.dtype == torch.float32 and not name.startswith("gradients/"):
                masters.setdefault(tensor.shape, []).append(name)
        for name, tensor in self.tensors.items():
            own = self.storage_of(tensor)
            if tensor.dtype not in HALF or own.name != name or not name.startswith("parameters/"):
                continue
            whole = tensor.is_contiguous() and tensor.nbytes == own.nbytes
            for master in masters.get(tensor.shape, ()) if whole else ():
                if rounds_to(self.tensors[master], tensor):
                    own.master = master
                    self.storage_of(self.tensors[master]).first = True
                    break

    def index(self, piece: int, places: Mapping[str, int]) -> bytes:
        tensors = {
            name: [
                self.storage_of(t).name,
                dtype_of(t),
                int(t.storage_offset()),
                t.shape,
                t.stride(),
            ]
            for name, t in self.tensors.items()
        }
        storages = {s.name: [s.nbytes, s.master, s.digests] for s in self.storages}
        document = {"format": FORMAT, "piece": piece, "outline": self.outline}
        document |= {"tensors": tensors, "storages": storages, "places": dict(places)}
        return json.dumps(document, separators=(",", ":")).encode()


@torch.no_grad()
def rounds_to(master: torch.Tensor, half: torch.Tensor) -> bool:
    """Compare every bit; the first elements decide most cases."""
    if master.device != half.device:
        return False
    master, half = master.view(-1), half.view(-1)
    starts = (0, *range(256, half.numel(), PIECE // 4))
    ends = (*starts[1:], half.numel())
    return all(
        torch.equal(master[a:b].to(half.dtype).view(torch.int16), half[a:b].view(torch.int16))
        for a, b in zip(starts, ends, strict=True)
    )


# ---------------------------------------------------------------- where it goes


class HostShelf(HostBuffers):
    """Host memory, pinned for a CUDA device, which is used again the next time."""

    piece = 64 << 20
    places: Mapping[str, int] = {}

    def digests(self) -> dict[str, int]:
        return {}

    def ahead(self, name: str) -> None:
        pass

    def commit(self, names: Iterable[str], index: bytes) -> None:
        for stale in self.buffers.keys() - set(names):
            self.delete(stale)

    def close(self) -> None:
        pass


class StoreShelf:
    """A store. Pieces are on their way to the disk as soon as they are put."""

    def __init__(self, store: TieredStore, *, own: bool) -> None:
        self.store, self._own = store, own
        self.piece = max(min(PIECE, store.usage().host_capacity // 8), 64 << 10)
        self._leaving: list[Pending[None]] = []
        self.places: dict[str, int] = {}  # number of the commit that wrote a piece
        self._commit = 1

    def digests(self) -> dict[str, int]:
        """Return the checksums of the pieces in the store, which stay until the next commit."""
        if INDEX not in self.store:
            return {}
        try:
            index = ParkedIndex(self.store)
        except (StateMismatch, Damaged):  # of another version: all is written anew
            return {}
        self.places = index.places
        self._commit = max(self.places.values(), default=0) + 1
        return index.digests()

    def put(self, name: str, values: torch.Tensor) -> None:
        self.places[name] = self._commit
        name = self._key(name)
        self.store.put(name, values)
        if values.nbytes >= self.store.pack_below:
            self._leaving.append(self.store.flush([name]))
        if len(self._leaving) > 8:
            self._leaving.pop(0).wait()

    def read(self, name: str, into: torch.Tensor) -> None:
        with self.store.borrow(self._key(name), write=False) as values:
            into.copy_(values)

    def ahead(self, name: str) -> None:
        self.store.prefetch(self._key(name))

    def _key(self, name: str) -> str:
        return f"{name}@{self.places[name]}"

    def commit(self, names: Iterable[str], index: bytes) -> None:
        while self._leaving:
            self._leaving.pop(0).wait()
        self.store.put(INDEX, torch.frombuffer(bytearray(index), dtype=torch.uint8))
        wanted = {INDEX, *map(self._key, names)}
        for name in list(self.store):
            if name.startswith(PREFIX) and name not in wanted:
                self.store.delete(name)
        self.store.commit()

    def close(self) -> None:
        if self._own:
            self.store.close()


Shelf = HostShelf | StoreShelf


def digest_of(piece: torch.Tensor) -> int | None:
    """Return the checksum of bytes on the processor, not through numpy, after whose look a storage
    can never be resized."""
    if piece.device.type != "cpu":
        return None
    return checksum_of((ctypes.c_char * piece.numel()).from_address(piece.data_ptr()))


# ---------------------------------------------------------------- the index


class ParkedIndex:
    """The index of a checkpoint, with every number checked."""

    def __init__(self, store: TieredStore) -> None:
        if INDEX not in store:
            raise StateMismatch(
                "store has no training state: expected the folder or store of commpress.parked, "
                "after its block was entered"
            )
        if (nbytes := store.info(INDEX).nbytes) > LARGEST_INDEX:
            raise StateMismatch(f"the index of the training state has {nbytes} bytes, too many")
        with store.borrow(INDEX, write=False) as values:
            content = values.numpy().tobytes()
        self._store, self._read = store, dict[str, torch.Tensor]()
        try:
            document = json.loads(content)
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}, expected {FORMAT}")
            self.piece, self.outline = natural(document["piece"]), document["outline"]
            self.places = {str(name): natural(at) for name, at in document["places"].items()}
            self.storages = {
                str(name): (natural(nbytes), master, list(digests))
                for name, (nbytes, master, digests) in document["storages"].items()
            }
            self.tensors = {name: self._view(*at) for name, at in document["tensors"].items()}
            for name, (nbytes, master, _) in self.storages.items():
                self._check(name, nbytes, master)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StateMismatch(
                f"the index of the training state cannot be read: {error!r}"
            ) from error

    def _view(
        self, storage: str, dtype: str, offset: int, shape: list[int], stride: list[int]
    ) -> tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
        sizes, steps = tuple(map(natural, shape)), tuple(map(natural, stride))
        last = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
        end = natural(offset) + last + 1 if 0 not in sizes else 0
        if end * DTYPES[dtype].itemsize > self.storages[storage][0]:
            raise ValueError(f"a tensor reaches beyond {storage!r}")
        return storage, DTYPES[dtype], offset, sizes, steps

    def _check(self, name: str, nbytes: int, master: str | None) -> None:
        """Check that the bytes are there, before memory is allocated for them."""
        if master is not None:
            source, dtype, _, shape, _ = self.tensors[master]
            whole = 2 * math.prod(shape) == nbytes
            if not whole or dtype != torch.float32 or self.storages[source][1] is not None:
                raise ValueError(f"{name!r} is rounded from {master!r}, which is no master")
            return
        there = sum(self._store.info(self._key(piece)).nbytes for piece in self.pieces(name))
        if there != nbytes:
            raise ValueError(f"{name!r} has {there} bytes, expected {nbytes}")

    def states(self, count: int, read: Callable[[str], torch.Tensor]) -> list[Any]:
        """Return the states of ``count`` other objects, with what ``read`` returns for a name."""
        match self.outline:
            case {"list": list(found)} if len(found) == count:
                names = [name for name in self.tensors if name.startswith("state/")]
                states: list[Any] = state_of(self.outline, {name: read(name) for name in names})
                return states
            case {"list": list(found)}:
                raise StateMismatch(
                    f"others are {count}, but the checkpoint has the states of {len(found)}: pass "
                    "those that were given to commpress.parked, in the same order"
                )
        raise StateMismatch("the index of the training state has no list of states")

    def pieces(self, name: str) -> list[str]:
        count = -(-self.storages[name][0] // max(self.piece, 1))
        return [f"{PREFIX}{name}/{i}" for i in range(count)]

    def _key(self, piece: str) -> str:
        return f"{piece}@{self.places[piece]}"

    def digests(self) -> dict[str, int]:
        return {
            piece: digest
            for name, (_, master, digests) in self.storages.items()
            for piece, digest in zip(self.pieces(name), digests, strict=False)
            if master is None and isinstance(digest, int)
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the processor. Tensors of one storage share memory until
        ``forget``."""
        storage, dtype, offset, shape, stride = self.tensors[name]
        master = self.storages[storage][1]
        if master is not None:
            return self.read(master).to(dtype).view(shape)
        if storage not in self._read:
            whole, at = torch.empty(self.storages[storage][0], dtype=torch.uint8), 0
            for piece in self.pieces(storage):
                with self._store.borrow(self._key(piece), write=False) as values:
                    whole[at : at + values.numel()].copy_(values)
                    at += values.numel()
            self._read[storage] = whole
        shared = self._read[storage].untyped_storage()
        return torch.empty(0, dtype=dtype).set_(shared, offset, shape, stride)

    def forget(self) -> None:
        self._read.clear()


def natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.50} is no size")
    return value
