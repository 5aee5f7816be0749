"""Tensors that a forward saves for its backward, on another tier meanwhile.

    forward   saved tensors | the newest stay in memory | older ones leave, in the background
    backward  used in reverse order | those in memory, or still on their way out, are used at once |
              the ones before them return, in the background

A saved tensor is a view of a storage. The storage leaves once, whichever tensors of it are saved,
and is deleted from its tier when the last node of the graph that needs it has run or has died.
"""

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Literal, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from commpress.codecs import Codec
from commpress.errors import CommpressError, InvalidArgument
from commpress.integrations.zero.saved_codec import ExactSaved, SavedCodec, saved_codec
from commpress.integrations.zero.streamed_group import return_large_blocks
from commpress.tiered_mem import TieredStore
from commpress.torch_private import untraced
from commpress.units import parse_bytes
from commpress.work import Handed

NAME = "activation/"  # how names in a store begin
RUN = secrets.token_hex(8)  # of this process
AHEAD = 64  # storages before the used one that are looked at


class Tier(Protocol):
    """Bytes by name. One thread writes and deletes, several read."""

    def put(self, name: str, values: torch.Tensor) -> None: ...

    def read(self, name: str, into: torch.Tensor) -> None: ...

    def delete(self, name: str) -> None: ...


class HostBuffers:
    """Buffers in host memory, pinned for values of a CUDA device."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def put(self, name: str, values: torch.Tensor) -> None:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() != values.numel():
            buffer = torch.empty(values.numel(), dtype=values.dtype, pin_memory=values.is_cuda)
        self.buffers[name] = buffer.copy_(values)

    def read(self, name: str, into: torch.Tensor) -> None:
        into.copy_(self.buffers[name])

    def delete(self, name: str) -> None:
        del self.buffers[name]


class StoreTier:
    """A tiered store, without what a killed run may have committed."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self.put, self.delete = store.put, store.delete
        for name in list(store):
            if name.startswith(NAME) and not name.startswith(NAME + RUN):
                store.delete(name)

    def read(self, name: str, into: torch.Tensor) -> None:
        with self._store.borrow(name, write=False) as values:
            into.copy_(values)


@dataclass
class ActivationCounters:
    """Counters in bytes: ``saved`` for backward, each storage once; ``written`` to the tier,
    ``read`` from it; used ``at_once``, because they had not left or were back already; ``peak`` of
    those in memory. ``wait_seconds``: time in which forward and backward waited for the tier."""

    saved: int = 0
    written: int = 0
    read: int = 0
    at_once: int = 0
    peak: int = 0
    wait_seconds: float = 0.0


@dataclass(eq=False)
class Kept:
    """A storage, in memory (``values``), on the tier (``stored``) or both. The lock of
    ``Activations`` guards all fields, except that ``dead`` is set without it."""

    number: int
    name: str
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    values: Handed[torch.Tensor] | None
    coded: int = 0  # bytes on the tier, if they are a code
    stored: bool = False
    counted: bool = True  # among the bytes in memory
    coming: bool = False  # its read is due
    reading: bool = False
    used: bool = False  # by a backward
    dead: bool = False
    failure: BaseException | None = None  # of a read in advance


class Storage:
    """A storage in the graph, for all saved tensors that are views of it. Its address is not given
    to another storage while this object lives."""

    def __init__(self, tensor: torch.Tensor, kept: Kept, died: Callable[[Kept], None]) -> None:
        self.kept, self._died = kept, died
        self._reference = StorageWeakRef(tensor.untyped_storage())

    def __del__(self) -> None:
        # may run anywhere, also while this thread has the lock: only take note
        self.kept.dead, self.kept.values = True, None
        self._died(self.kept)


@dataclass(eq=False, slots=True)
class Saved:
    """A saved tensor in the graph: ``witness`` shares its version counter, and its values, too, if
    ``storage`` is None."""

    witness: torch.Tensor
    version: int
    storage: Storage | None
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def check(self) -> None:
        """Refuse a tensor that has changed since, as autograd does without hooks."""
        if (version := self.witness._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of {self.witness.dtype} and shape "
                f"{tuple(self.shape)} is at version {version}, expected version {self.version}"
            )


class Activations:
    """Context manager under which saved tensors go to a tier; see ``activations``. It may be
    entered again, and in several threads."""

    def __init__(
        self,
        tier: Tier,
        budget: int,
        min_bytes: int,
        devices: Iterable[str],
        keep: Iterable[torch.Tensor] = (),
        codec: SavedCodec | None = None,
    ) -> None:
        self.counters = ActivationCounters()
        self._codec = codec
        self._tier, self._budget, self._min_bytes = tier, budget, min_bytes
        self._devices = frozenset(devices)
        self._keep = [StorageWeakRef(tensor.untyped_storage()) for tensor in keep]
        self._kept_addresses = {reference.cdata for reference in self._keep}
        self._changed = threading.Condition()
        self._storages = weakref.WeakValueDictionary[tuple[object, ...], Storage]()
        self._alive: dict[int, Kept] = {}  # by number, in the order of saving
        self._newest = deque[Kept]()  # in memory, and not due to leave
        self._newest_bytes = self._bytes = self._number = self._due = 0
        self._returned: dict[int, Kept] = {}  # read from the tier, oldest first
        self._error: BaseException | None = None
        self._prefix = f"{NAME}{RUN}/{secrets.token_hex(4)}/"
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the thread
        self._jobs = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=_serve, args=(self._jobs,), name="activations", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def __enter__(self) -> "Activations":
        if torch.compiler.is_compiling():
            raise InvalidArgument(
                "commpress.activations was entered in a function that torch.compile compiles, "
                "where saved tensors stay in the graph: enter it outside, around the call"
            )
        self._hooks().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks().__exit__(*error)

    def _hooks(self) -> saved_tensors_hooks:
        """Return torch's context, which has no state of its own; as an attribute it would be a
        circle."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def settle(self) -> None:
        """Wait until every write and deletion that is due has ended, and raise the tier's error, if
        there is one."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()
        with self._changed:
            self._raise()

    # ---------------------------------------------------------------- forward

    @untraced
    def _pack(self, tensor: torch.Tensor) -> Saved:
        version, at = tensor._version, (0, tensor.shape, tensor.stride() if _dense(tensor) else ())
        if not self._takes(tensor):
            # an alias, because a node that refers to its own output is never freed
            alias = tensor if tensor.is_leaf else tensor.detach()
            return Saved(alias, version, None, *at)
        key = (tensor.untyped_storage()._cdata, version, tensor.dtype)
        storage = self._storages.get(key) or self._keep_storage(tensor, key)
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return Saved(witness, version, storage, int(tensor.storage_offset()), *at[1:])

    def _takes(self, tensor: torch.Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        return (
            type(tensor) is torch.Tensor  # and neither a parameter nor a subclass
            and not isinstance(base, nn.Parameter)
            and tensor.device.type in self._devices
            and _dense(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and tensor.untyped_storage()._cdata not in self._kept_addresses
            and torch._C._current_graph_task_id() < 0  # what a backward saves is used in it, too
        )

    def _keep_storage(self, tensor: torch.Tensor, key: tuple[object, ...]) -> Storage:
        values = _bytes_of(tensor)
        with self._changed:
            self._raise()
            number = self._number = self._number + 1
            kept = Kept(
                number,
                f"{self._prefix}{number}",
                values.numel(),
                tensor.dtype,
                tensor.device,
                Handed(values, tensor.device),
            )
            self._storages[key] = storage = Storage(tensor, kept, self._on_death())
            self._alive[number] = kept
            self._count(kept.nbytes)
            self.counters.saved += kept.nbytes
            self._newest.append(kept)
            self._newest_bytes += kept.nbytes
            while self._newest_bytes > self._budget // 2:
                oldest = self._newest.popleft()
                self._newest_bytes -= oldest.nbytes
                if not oldest.dead:
                    self._due += 1
                    self._jobs.put(partial(self._write, oldest))
            begin = perf_counter()
            while self._bytes > self._budget and self._due:
                self._changed.wait()
            self.counters.wait_seconds += perf_counter() - begin
            self._raise()
        return storage

    def _on_death(self) -> Callable[[Kept], None]:
        jobs, forget = self._jobs, self._forget
        return lambda kept: jobs.put(partial(forget, kept))

    # ---------------------------------------------------------------- backward

    @untraced
    def _unpack(self, saved: Saved) -> torch.Tensor:
        saved.check()
        if saved.storage is None:
            return saved.witness
        kept = saved.storage.kept
        with torch.no_grad():
            values = self._values(kept)
            whole = torch.empty(0, dtype=saved.witness.dtype, device=kept.device)
            return whole.set_(values.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def _values(self, kept: Kept) -> torch.Tensor:
        with self._changed:
            self._raise()
            begin = perf_counter()
            while kept.reading:
                self._changed.wait()
            if kept.failure is not None:
                raise kept.failure
            kept.used, values = True, kept.values
            if values is None:
                kept.reading = True
            else:
                self.counters.at_once += kept.nbytes
            self._read_ahead(kept)
        if values is None:
            values = self._read(kept)
        with self._changed:
            self.counters.wait_seconds += perf_counter() - begin
        return values.take()

    def _read_ahead(self, kept: Kept) -> None:
        """Begin to read the storages that were saved before this one, up to half of the budget."""
        nbytes = 0
        for number in range(kept.number - 1, max(0, kept.number - 1 - AHEAD), -1):
            before = self._alive.get(number)
            if before is None or before.dead:
                continue
            nbytes += before.nbytes
            if nbytes > self._budget // 2:
                break
            if before.values is None and not before.coming and not before.reading:
                before.coming = True
                self._jobs.put(partial(self._read_early, before))

    def _read(self, kept: Kept) -> Handed[torch.Tensor]:
        """Read a storage that is marked as being read; needs no lock."""
        values: Handed[torch.Tensor] | None = None
        try:
            into = torch.empty(kept.nbytes, dtype=torch.uint8, device=kept.device)
            if kept.coded and self._codec is not None:
                code = torch.empty(kept.coded, dtype=torch.uint8, device=kept.device)
                self._tier.read(kept.name, code)
                self._codec.decode(code, into.view(kept.dtype))
            else:
                self._tier.read(kept.name, into)
            values = Handed(into, kept.device)
        finally:
            with self._changed:
                kept.reading = kept.coming = False
                self._changed.notify_all()
                if values is not None and not kept.dead:
                    kept.values, kept.counted = values, True
                    self._count(kept.nbytes)
                    self.counters.read += kept.coded or kept.nbytes
                    self._returned[kept.number] = kept
                    self._leave_memory()
        return values

    def _leave_memory(self) -> None:
        """Free values on the tier, too, that a retained graph may need again."""
        for kept in [kept for kept in self._returned.values() if kept.used]:
            if self._bytes <= self._budget:
                break
            self._uncount(self._returned.pop(kept.number))

    # ---------------------------------------------------------------- in the background

    def _write(self, kept: Kept) -> None:
        values, error = kept.values, None
        if values is not None:
            try:
                with self._side_stream(kept.device):
                    self._put(kept, values.take())
            except BaseException as caught:  # raised in the next pack or unpack
                error = caught
        with self._changed:
            self._due -= 1
            if error is not None:
                self._error = self._error or error
            elif values is not None:
                kept.stored = True
                self.counters.written += kept.coded or kept.nbytes
                self._uncount(kept)
            self._changed.notify_all()

    def _put(self, kept: Kept, values: torch.Tensor) -> None:
        """Write a storage, in the codec if it takes such numbers."""
        code = None
        if self._codec is not None and values.numel() % kept.dtype.itemsize == 0:
            code = self._codec.encode(values.view(kept.dtype))
        self._tier.put(kept.name, values if code is None else code)
        kept.coded = 0 if code is None else code.numel()

    @property
    def lossy(self) -> bool:
        """True if values return changed."""
        return self._codec is not None and self._codec.lossy

    def _read_early(self, kept: Kept) -> None:
        with self._changed:
            if kept.dead or kept.reading or kept.values is not None or not kept.stored:
                kept.coming = False
                return
            kept.reading = True
        try:
            with self._side_stream(kept.device):
                self._read(kept)
        except BaseException as error:  # raised where the values are needed
            kept.failure = error

    def _forget(self, kept: Kept) -> None:
        with self._changed:
            del self._alive[kept.number]
            self._returned.pop(kept.number, None)
            self._uncount(kept)
            self._changed.notify_all()
        if kept.stored:
            try:
                self._tier.delete(kept.name)
            except CommpressError as error:  # such as a store that has been closed
                with self._changed:
                    self._error = self._error or error

    # ---------------------------------------------------------------- counting, with the lock

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self.counters.peak = max(self.counters.peak, self._bytes)

    def _uncount(self, kept: Kept) -> None:
        kept.values = None
        if kept.counted:
            kept.counted = False
            self._bytes -= kept.nbytes

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _side_stream(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])


def activations(
    where: TieredStore | Literal["host"],
    *,
    budget: str | int = "256MiB",
    min_bytes: str | int = "256KiB",
    keep: nn.Module | None = None,
    codec: str | Codec | None = None,
) -> Activations:
    """Return a context manager under which tensors that the forward saves for the backward leave
    memory. The gradients are those without it, bit for bit, unless a codec changes values.

    ``where`` is a store, or "host": buffers in host memory for tensors on a CUDA device; tensors of
    the CPU stay where they are.

    - ``budget``: bytes of saved tensors in memory, besides those in use. The newest half stays; the
      rest leaves in the background, and the forward waits for it if it does not leave in time. Half
      of it is read in advance in the backward.
    - ``min_bytes``: smaller storages stay in memory.
    - ``keep``: a module whose buffers stay where they are; parameters always do.
    - ``codec``: of floats on the tier. "exact" loses nothing and takes some 0.7 of the bytes of
      bfloat16, 0.87 of float32, on the CPU. "int8", "fp8" and other codecs of three bits or more
      change what the backward computes with; tensors with numbers that are not finite stay as they
      are.

    Enter it around the forward; the backward may run outside. With torch.utils.checkpoint only the
    inputs of checkpointed parts leave. Tensors that a backward itself saves, for a second
    derivative or by a checkpoint that runs again, stay in memory, and so do subclasses such as
    DTensor. An in-place change of a saved tensor is refused in the backward, as without it. The
    tier's errors are raised in the forward or backward that meets them. A store should be used for
    nothing else: a commit in between would write these tensors, too.
    """
    if keep is not None and not isinstance(keep, nn.Module):
        raise InvalidArgument(f"keep is {keep!r:.100}, expected a module, whose buffers stay")
    coded = saved_codec(codec)
    if where == "host" and isinstance(coded, ExactSaved):
        raise InvalidArgument(
            "codec is 'exact' with 'host', but values of a device are coded by rows only: pass "
            "codec=None, 'int8' or a store"
        )
    if where == "host":
        tier: Tier = HostBuffers()
    elif isinstance(where, TieredStore):
        tier = StoreTier(where)
        return_large_blocks()
    else:
        raise InvalidArgument(f"where is {where!r:.100}, expected a TieredStore or 'host'")
    return Activations(
        tier,
        parse_bytes(budget),
        parse_bytes(min_bytes),
        ("cuda",) if where == "host" else ("cpu", "cuda"),
        () if keep is None else keep.buffers(),
        coded,
    )


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _serve(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Run jobs one after the other, without a reference to ``Activations`` in between."""
    while job := jobs.get():
        job()
        del job
