"""A card made of host memory: tensors that say they are on CUDA, streams, events and pinned memory.

Everything is computed at once, in the order of the calls. What a real card may do later is kept as
clocks: each stream and the host know how far they have seen the others. Who reads or writes memory
that another still writes or reads, as far as it can know, raises ``EarlyUse``. Waits of the host,
launches and copies are counted.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from commpress.collectives import frame
from commpress.kernels import devices
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.cuda import row_codec as cuda

CARD = torch.device("cuda", 0)
# bytes of pageable memory that the driver takes at once, on their way to a card
STAGED = 64 << 10
Clock = dict[str, int]


class EarlyUse(AssertionError):
    """Memory was used before a stream, or the host, had finished with it."""


class OnCard(torch.Tensor):
    """A tensor in the card's memory."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def numpy(self, *_: Any) -> Any:  # type: ignore[override]
        raise TypeError("the tensor is on a card: call .cpu() first")

    def cpu(self, *_: Any) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype).copy_(self)

    def to(self, *given: Any, **named: Any) -> torch.Tensor:
        return moved(self, *given, **named)

    def record_stream(self, stream: Any) -> None:
        """The memory of a twin is never given back."""


_to = torch.Tensor.to


def moved(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """``tensor.to`` of either side."""
    copy = named.pop("copy", False)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*given, **named)
    here = device is None or device.type == tensor.device.type
    result = tensor if dtype in (None, tensor.dtype) else _to(tensor, dtype)
    if here:
        return result.clone() if copy and result is tensor else result
    target = torch.empty(result.shape, dtype=result.dtype, device=device)
    return target.copy_(result, non_blocking=non_blocking)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        self.device, self.name = CARD, name or f"stream {id(self):x}"
        self.clock: Clock = {}

    def wait_event(self, event: "Event") -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        merge(self.clock, other.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.clock = dict(self.clock)
        return event

    def query(self) -> bool:
        return known(self.clock, here().host)

    def synchronize(self) -> None:
        here().wait(self.clock)

    def __enter__(self) -> "Stream":
        here().entered.append(current())
        here().local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        here().local.stream = here().entered.pop()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: "Stream | None" = None) -> None:
        self.clock = dict((stream or current()).clock)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return known(self.clock, here().host)

    def synchronize(self) -> None:
        here().wait(self.clock)


def merge(clock: Clock, other: Clock) -> None:
    for who, time in other.items():
        clock[who] = max(clock.get(who, 0), time)


def known(clock: Clock, to: Clock) -> bool:
    return all(to.get(who, 0) >= time for who, time in clock.items())


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return here().run(func, args, kwargs or {})


class CardTwin:
    """Clocks of streams and of the host, uses of memory, and counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.host: Clock = {"host": 0}
        self.default = Stream(name="default stream")
        self.local = threading.local()
        self.used: list[tuple[int, int, str, int, bool]] = []  # first, end, who, when, written
        self.pinned: list[tuple[int, int]] = []
        self.kept: list[torch.Tensor] = []  # so that no address means two things
        self.lock = threading.RLock()
        self.caller = threading.current_thread()

    @property
    def entered(self) -> list[Stream]:
        if not hasattr(self.local, "entered"):
            self.local.entered = []
        found: list[Stream] = self.local.entered
        return found

    # ------------------------------------------------------------ counted

    def wait(self, clock: Clock) -> None:
        """The host waits until a stream has come so far."""
        with self.lock:
            if known(clock, self.host):
                return
            who = "caller" if threading.current_thread() is self.caller else "worker"
            self.counts[f"waits of the {who}"] += 1
            merge(self.host, clock)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        first, end = reach(tensor)
        return any(begin <= first and end <= stop for begin, stop in self.pinned)

    # ------------------------------------------------------------ who uses what

    def step(self, who: str, clock: Clock) -> None:
        clock[who] = clock.get(who, 0) + 1

    def use(self, tensor: torch.Tensor, who: str, clock: Clock, *, write: bool) -> None:
        first, end = reach(tensor)
        if first == end:
            return
        with self.lock:
            kept = []
            for begin, stop, other, time, written in self.used:
                if begin < end and first < stop and (write or written):
                    if clock.get(other, 0) < time:
                        verb = "writes" if write else "reads"
                        other_verb = "writes" if written else "reads"
                        raise EarlyUse(
                            f"{who} {verb} {end - first} bytes that {other} still {other_verb}"
                        )
                    if write and first <= begin and stop <= end:
                        continue
                kept.append((begin, stop, other, time, written))
            kept.append((first, end, who, clock[who], write))
            self.used = kept

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        made = device is not None and torch.device(device).type == "cuda"
        pinned = kwargs.get("pin_memory")
        if made:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_card = made or any(isinstance(t, OnCard) for t in tensors)
        result = func(*args, **kwargs)
        if pinned:
            self.pin(result)
        if not on_card:
            self.by_host(func, args, kwargs, result)
            return result
        crossing = func is torch.ops.aten.copy_.default and (
            isinstance(args[0], OnCard) != isinstance(args[1], OnCard)
        )
        if crossing:
            self.cross(
                args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
            return result
        self.on_stream(func, args, kwargs, result)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.wait(current().clock)
        return tree_map(wrapped, result)

    def pin(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)
        self.pinned.append(reach(tensor))
        self.counts["pinned bytes allocated"] += tensor.nbytes

    def cross(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        host = source if isinstance(into, OnCard) else into
        pinned, stream = self.is_pinned(host), current()
        staged = isinstance(into, OnCard) and non_blocking and host.nbytes <= STAGED
        self.counts["copies"] += 1
        if pinned:
            self.counts["bytes by pinned memory"] += host.nbytes
        elif not staged:
            self.counts["bytes by pageable memory"] += host.nbytes
        self.launched(stream, reads=[source], writes=[into])
        if not (staged or (non_blocking and pinned)):
            self.wait(stream.clock)

    def launched(
        self, stream: Stream, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        """A launch: after all that the host knows of, and what the stream has waited for."""
        merge(stream.clock, self.host)
        self.step(stream.name, stream.clock)
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.kept.append(tensor)
                self.use(tensor, stream.name, stream.clock, write=write)

    def on_stream(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        reads, writes = touched(func, args, kwargs, result)
        if reads or writes:
            self.counts["launches"] += not is_empty(func)
            if not is_empty(func):
                self.launched(current(), reads, writes)

    def by_host(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self.used or is_empty(func):
            return
        reads, writes = touched(func, args, kwargs, result)
        with self.lock:
            self.step("host", self.host)
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if self.shared(tensor):
                        self.use(tensor, "host", self.host, write=write)

    def shared(self, tensor: torch.Tensor) -> bool:
        """True if a stream has used it."""
        first, end = reach(tensor)
        return any(begin < end and first < stop for begin, stop, *_ in self.used)


def is_empty(func: Any) -> bool:
    return "empty" in str(func)


def touched(
    func: Any, args: Any, kwargs: Any, result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes; none if it makes a view."""
    reads, writes, views = list[torch.Tensor](), list[torch.Tensor](), False
    for given, declared in zip(args, func._schema.arguments, strict=False):
        named = declared.alias_info
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor):
                (writes if named is not None and named.is_write else reads).append(tensor)
                views = views or (named is not None and not named.is_write)
    for declared in func._schema.arguments:
        if declared.name in kwargs and declared.name not in ("device",):
            for tensor in tree_leaves(kwargs[declared.name]):
                if isinstance(tensor, torch.Tensor):
                    named = declared.alias_info
                    (writes if named is not None and named.is_write else reads).append(tensor)
    if views and not writes:
        return [], []
    if not writes:
        writes += [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return reads, writes


def reach(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and end of the elements."""
    if tensor.numel() == 0:
        return 0, 0
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def wrapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, OnCard):
        return torch.Tensor._make_subclass(OnCard, value)
    return value


def plain(tensor: Any) -> Any:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnCard) else tensor


class Kernels:
    """The kernels of codecs: launches as CUDA plans them, bytes as the processor makes them."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        planned, computed = getattr(cuda, name).__wrapped__, getattr(cpu, name)
        written = {"encode": (1, 2), "serve": (1, 2), "decode": (1,), "decode_mean": (1,)}

        def call(*args: Any, **kwargs: Any) -> None:
            twin = here()
            count = sum(1 for launch in planned(*args, **kwargs) if launch.grid)
            twin.counts["launches"] += count
            with _disable_current_modes():
                computed(*map(plain, args), **{key: plain(v) for key, v in kwargs.items()})
            writes = [args[i] for i in written.get(name, (0,))]
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            new = [
                kwargs[key] for key in ("new_residual", "new_scale") if kwargs.get(key) is not None
            ]
            twin.launched(current(), reads=tensors, writes=[*writes, *new])

        return call


class Headers:
    """The kernels of headers: one launch each, bytes as the processor makes them."""

    @staticmethod
    def stamp(message: torch.Tensor, header: torch.Tensor, flags: torch.Tensor) -> None:
        with _disable_current_modes():
            frame.stamp(plain(message), header, plain(flags))
        Headers._launched([flags], [message])

    @staticmethod
    def compare(message: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            found: torch.Tensor = wrapped(frame.compared(plain(message), header))
        Headers._launched([message], [found])
        return found

    @staticmethod
    def _launched(reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        here().counts["launches"] += 1
        here().launched(current(), reads=reads, writes=writes)


_HERE: list[CardTwin] = []


def here() -> CardTwin:
    return _HERE[-1]


def current(device: Any = None) -> Stream:
    return getattr(here().local, "stream", None) or here().default


def _set_stream(stream: Stream) -> None:
    here().local.stream = stream


@contextmanager
def card_twin() -> Iterator[CardTwin]:
    """A card in place of CUDA, in this thread and in those that begin meanwhile."""
    twin, run = CardTwin(), threading.Thread.run

    def in_thread(thread: threading.Thread) -> None:
        with _Mode():
            run(thread)

    def registered(address: int, nbytes: int, _: int) -> int:
        twin.pinned.append((address, address + nbytes))
        twin.counts["pinned bytes allocated"] += nbytes
        return 0

    cudart = SimpleNamespace(cudaHostRegister=registered, cudaHostUnregister=lambda _: 0)
    instead: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "default_stream": lambda device=None: twin.default,
        "set_stream": _set_stream,
        "stream": lambda stream: stream,
        "synchronize": lambda device=None: twin.wait(current().clock),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: cudart,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
    }
    _HERE.append(twin)
    try:
        with (
            mock.patch.multiple(torch.cuda, **instead),
            # torch 2.15's optimizers ask the driver whether it captures
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
            mock.patch.object(threading.Thread, "run", in_thread),
            mock.patch.object(torch.Tensor, "to", moved),
            mock.patch.object(devices, "cuda", Kernels()),
            mock.patch.object(frame, "on_card", Headers),
            _Mode(),
        ):
            yield twin
    finally:
        _HERE.pop()


class CardGroup:
    """NCCL of several ranks in this process, that take their steps in turn (``simulate``)."""

    def __init__(self, size: int) -> None:
        self.size, self.stream = size, Stream(name="NCCL")
        self.posted: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def transports(self) -> list[Any]:
        return [CardTransport(self, rank) for rank in range(self.size)]


class CardTransport:
    """Moves rows where they lie; headers are compared elsewhere."""

    ordered, checks = True, False

    def __init__(self, group: CardGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def announce(self, header: torch.Tensor, length: int) -> None:
        """All ranks are of one process."""

    def until(self, done: Any) -> None:
        done.__self__.synchronize()

    def abandon(self, reason: str) -> None:
        """All ranks are of one process."""

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> "_Work":
        return self._post(out, inp, tag, lambda inp, r: inp[r])

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> "_Work":
        return self._post(out, inp, tag, lambda inp, r: inp[0])

    def _post(self, out: torch.Tensor, inp: torch.Tensor, tag: int, row: Any) -> "_Work":
        self.group.stream.wait_stream(current())
        posted = self.group.posted.setdefault(tag, {})
        posted[self.rank] = out, inp
        for r in range(self.size):
            sent = row(inp, r)
            off = any(reach(t)[0] % 16 for t in (sent, out[r]))
            here().counts["bytes of rows"] += sent.nbytes
            here().counts["bytes of rows off 16"] += sent.nbytes if off else 0
        if len(posted) == self.size:
            with self.group.stream:
                for to, (inbox, _) in posted.items():
                    for r, (_, outbox) in posted.items():
                        inbox[r].copy_(row(outbox, to))
            del self.group.posted[tag]
        return _Work(self.group.stream)


class _Work:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def wait(self) -> None:
        current().wait_stream(self.stream)
