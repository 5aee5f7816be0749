"""Micro-batches that pass through each block of a streamed model together: weights are read twice
a step, in forward and in backward, however many micro-batches there are (the vertical schedule of
GreedySnake).

    forward    block k: micro-batch 1, 2 … M  |  block k + 1 …          inputs of blocks are kept
    tail       after the last block: rest of the forward, loss and backward, one after the other
    backward   block k: forward again and backward, 1, 2 … M  |  gradients leave  |  block k − 1 …

A model need not be a sequence of blocks. Each forward is a thread, one of which runs at a time: it
gives way where it needs parameters that are not in memory. The graph is cut at blocks: that of a
block's first forward is dropped, its results begin a new one, and what is between blocks keeps its
graph.
In the backward a block's inputs get the sum of the gradients of all who used them, before the graph
in which they were computed goes backward.
"""

import contextvars
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from commpress.errors import InvalidArgument
from commpress.integrations.zero.streamed_module import StreamedModule, tensors_in
from commpress.integrations.zero.tiling import Tile
from commpress.logs import warn_on_first

if TYPE_CHECKING:
    from commpress.integrations.zero.streamed import Streamed

# between a block's results in forward and in backward, against their norm: some kernels of devices
# add in any order
TOLERANCE = {"cpu": 1e-5}
OF_DEVICES = 1e-3
OF_CODES = 0.3  # where boundaries return changed: dropout that differs changes more


# ---------------------------------------------------------------- turns


class Abandoned(Exception):
    """Ends a thread because another has failed; torch's hooks that must run then see it."""


class Turns:
    """Threads of which one runs at a time. A thread calls ``wait_for`` a unit, ``give`` lets one
    run until it waits again or has ended."""

    def __init__(self, bodies: Sequence[Callable[[], None]], devices: Iterable[torch.device]):
        self._devices = [device for device in devices if device.type != "cpu"]
        self.waiting: dict[int, StreamedModule] = {}
        self._go = [threading.Semaphore(0) for _ in bodies]
        self._back, self.left = threading.Semaphore(0), False
        self._failure: BaseException | None = None
        self._numbers: dict[int, int] = {}  # of threads
        seeds = torch.randint(2**62, (len(bodies),)).tolist()
        mine = self.random()
        self._random = []
        for seed in seeds:
            torch.manual_seed(seed)
            self._random.append(self.random())
        self.set_random(mine)
        self._threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run, number, body),
                name=f"micro-batch {number}",
                daemon=True,
            )
            for number, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def number(self) -> int | None:
        """Return the number of the calling thread, None for any other."""
        return self._numbers.get(threading.get_ident())

    def random(self) -> list[torch.Tensor]:
        """Return the states of all generators."""
        return [torch.get_rng_state()] + [
            torch.get_device_module(device).get_rng_state(device) for device in self._devices
        ]

    def set_random(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def give(self, number: int) -> None:
        """Let a thread run until it waits for a unit or has ended; raise its error."""
        mine = self.random()
        self.set_random(self._random[number])
        self.waiting.pop(number, None)
        self._go[number].release()
        self._back.acquire()
        self.set_random(mine)
        if self._failure is not None:
            raise self._failure

    def wait_for(self, unit: StreamedModule) -> None:
        """Wait, in a thread, until ``give`` calls it."""
        number = self.number()
        assert number is not None
        self._random[number] = self.random()
        self.waiting[number] = unit
        self._back.release()
        self._pause(number)

    def _pause(self, number: int) -> None:
        self._go[number].acquire()
        if self.left:
            raise Abandoned

    def _run(self, number: int, body: Callable[[], None]) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            self._pause(number)
            body()
        except Abandoned:
            return
        except BaseException as error:
            self._failure = error
        self._back.release()

    def leave(self) -> None:
        """End threads that have not ended."""
        self.left = True
        for go in self._go:
            go.release()
        for thread in self._threads:
            thread.join()


# ---------------------------------------------------------------- calls of blocks


@dataclass(frozen=True)
class Hole:
    """Place of a tensor among a call's arguments."""

    number: int


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each instance of ``kind`` in it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, one in value.items():
            result[key] = mapped(one, kind, change)
        return result
    if isinstance(value, (tuple, list)):
        every = [mapped(one, kind, change) for one in value]
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    if is_dataclass(value) and not isinstance(value, type):
        named = {one.name: mapped(getattr(value, one.name), kind, change) for one in fields(value)}
        return replace(value, **named)
    return value


class Keep(torch.autograd.Function):
    """A node that saves one tensor, so that torch's hooks of saved tensors apply to it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise AssertionError("nothing depends on this node")


class Input:
    """A tensor given to a block, kept for its backward, and its place in the graph before."""

    def __init__(self, tensor: torch.Tensor, tier: AbstractContextManager[Any] | None) -> None:
        self.edge = get_gradient_edge(tensor) if tensor.requires_grad else None
        self._values, self._version = tensor.detach(), tensor._version
        self._node: Any = None
        self.moved = 0  # bytes given to the tier
        if tier is not None and tensor.is_floating_point():
            self.moved = tensor.nbytes
            with tier, torch.enable_grad():
                self._node = Keep.apply(self._values.requires_grad_()).grad_fn
            del self._values

    def take(self, block: str) -> torch.Tensor:
        """Return the tensor, a leaf of a new graph if it had a graph."""
        if self._node is None:
            values = self._values
            if values._version != self._version:
                raise InvalidArgument(
                    f"an input of block {block!r} was changed in place after the block began, so "
                    "its backward cannot compute it again: change a copy, or call backward() for "
                    "each micro-batch"
                )
        else:
            (values,) = self._node.saved_tensors
            self._node = None
        return values.detach().requires_grad_(self.edge is not None)


class Cut(torch.autograd.Function):
    """Results of a block as the beginning of a new graph; their gradients are added to its call."""

    @staticmethod
    def forward(ctx: Any, call: "BlockCall", results: list[torch.Tensor], anchor: Any) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.add(gradients)
        return None, None, None


@dataclass(eq=False)
class BlockCall:
    """One forward of a block for micro-batch ``number``."""

    number: int
    unit: StreamedModule
    arguments: Any  # with holes in place of tensors
    inputs: list[Input]
    random: list[torch.Tensor]
    autocast: list[tuple[str, bool, torch.dtype]]
    caches: bool  # whether autocast keeps copies
    buffers: dict[str, torch.Tensor]  # as they were before, if it changes them
    given: list[Any] = field(default_factory=list)  # contents of the arguments
    looks: list[torch.Tensor] = field(default_factory=list)  # at its results
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # of results

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self.gradients = [
            new if old is None else old if new is None else old + new
            for old, new in zip(self.gradients, gradients, strict=True)
        ]


def contents(value: Any, depth: int = 8) -> Iterator[Any]:
    """Yield all that a block could write into its arguments: addresses of tensors, keys, lengths,
    numbers and text, in containers and attributes of objects such as a cache of keys."""
    if isinstance(value, torch.Tensor):
        yield value.data_ptr(), value._version
    elif isinstance(value, (int, float, complex, str, bytes, type(None))):
        yield repr(value)
    elif isinstance(value, (dict, tuple, list)) and depth > 0:
        yield len(value)
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield key
            yield from contents(one, depth - 1)
    else:
        yield id(value)
        if depth > 0 and not isinstance(value, (nn.Module, type)):
            yield from contents(getattr(value, "__dict__", {}), depth - 1)


def with_graph(value: Any, depth: int = 3) -> bool:
    """Return whether a tensor with a graph is in a container or in attributes of an object."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if isinstance(value, (nn.Module, type)) or depth == 0:
        return False
    inner = value if isinstance(value, (dict, tuple, list)) else getattr(value, "__dict__", {})
    every = inner.values() if isinstance(inner, dict) else inner
    return any(with_graph(one, depth - 1) for one in every)


def stored(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names of submodules and of their attributes that hold a tensor with a graph."""
    for name, each in module.named_modules():
        for attribute, value in vars(each).items():
            if not attribute.startswith("_") and with_graph(value):
                yield name, attribute


def trained_results(result: Any) -> list[torch.Tensor]:
    """Return the tensors with a graph, each once."""
    every = {id(one): one for one in tensors_in(result) if one.requires_grad}
    return list(every.values())


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@contextmanager
def with_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module compute with copies of these buffers; its own are the same afterwards."""
    places = [(name.rpartition("."), value) for name, value in values.items()]
    owners = [(module.get_submodule(inside)._buffers, own) for (inside, _, own), _ in places]
    before = [buffers[own] for buffers, own in owners]
    try:
        for (buffers, own), (_, value) in zip(owners, places, strict=True):
            buffers[own] = value.clone()
        yield
    finally:
        for (buffers, own), buffer in zip(owners, before, strict=True):
            buffers[own] = buffer


# ---------------------------------------------------------------- a step


class Vertical:
    """Forward and backward of the micro-batches of one step."""

    def __init__(
        self,
        streamed: "Streamed",
        loss_of: Callable[[Any], torch.Tensor],
        batches: Sequence[Any],
        tier: AbstractContextManager[Any] | None,
    ) -> None:
        self._streamed, self._tier = streamed, tier
        self._names = {module: name for name, module in streamed.model.named_modules()}
        self.losses: list[torch.Tensor | None] = [None] * len(batches)
        self._calls: list[list[BlockCall]] = [[] for _ in batches]  # by micro-batch, in order
        self._open: list[list[BlockCall | None]] = [[] for _ in batches]  # blocks that run
        self._checked: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        # by micro-batch and place in the graph: gradient of a block's input, and the first call
        self._wanted: dict[tuple[int, Any, int], list[Any]] = {}
        self._weights: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._around: Counter[tuple[int, StreamedModule]] = Counter()  # calls outside of blocks
        devices = dict.fromkeys(group.device for group in streamed.groups)
        self._cores = torch.get_num_threads()
        self._kinds = dict.fromkeys(["cpu", *(device.type for device in devices)])
        self._loss_of, self._batches = loss_of, batches
        self._autocast, self._default = self._casts(), torch.get_default_device()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        # the first forward of a model looks for parameters that other modules read, alone
        self._alone = streamed._unread is not None
        self._turns = Turns([self._body(number) for number in range(len(batches))], devices)

    def run(self) -> list[torch.Tensor]:
        blocks = [unit for unit in self._streamed.modules.values() if unit.block]
        inside = {module for unit in blocks for module in unit.module.modules()}
        around = [
            unit
            for unit in self._streamed.modules.values()
            if any(one.module in set(unit.module.modules()) for one in blocks)
            and unit.module not in inside
        ]
        hooks = []
        try:
            for unit in self._streamed.modules.values():
                if unit.block or (unit.module not in inside and not isinstance(unit.module, Tile)):
                    hooks.append(
                        unit.module.register_forward_pre_hook(
                            self._arriving(unit), prepend=True, with_kwargs=True
                        )
                    )
                if unit.block:
                    hooks.append(
                        unit.module.register_forward_hook(
                            self._computed, always_call=True, with_kwargs=True
                        )
                    )
            with ExitStack() as stack:
                for unit in around:  # the graph between blocks may need their parameters
                    for group in unit.groups:
                        stack.enter_context(self._streamed.whole(group))
                self._forward()
                if self._alone and self._tier is not None:
                    self._advise()
                for hook in hooks:
                    hook.remove()
                self._backward()
        finally:
            self._turns.leave()
            for hook in hooks:
                hook.remove()
        self._compare()
        return [loss for loss in self.losses if loss is not None]

    def _advise(self) -> None:
        """Name blocks of which the tier moves more bytes than reading parameters for each
        micro-batch would."""
        moved: Counter[StreamedModule] = Counter()
        for call in (call for calls in self._calls for call in calls):
            moved[call.unit] += 2 * sum(one.moved for one in call.inputs)
        for unit, nbytes in moved.items():
            read = (len(self._batches) - 1) * sum(
                group.width * group.dtype.itemsize for group in unit.groups
            )
            if nbytes > read:
                warn_on_first(
                    self._streamed.channel.rank,
                    "inputs of block %r cross to activations= and back with %.1f MB a step, more "
                    "than the %.1f MB that taking micro-batches together saves: name larger blocks "
                    "in stream(..., blocks=[...])",
                    self._names[unit.module],
                    nbytes / 1e6,
                    read / 1e6,
                )

    def _casts(self) -> list[tuple[str, bool, torch.dtype]]:
        return [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self._kinds
        ]

    def _body(self, number: int) -> Callable[[], None]:
        def body() -> None:
            if torch.get_num_threads() != self._cores:  # an update uses fewer at the time
                torch.set_num_threads(self._cores)
            with torch.enable_grad(), casting(self._autocast), self._settings():
                loss = self._loss_of(self._batches[number])
                if (
                    not isinstance(loss, torch.Tensor)
                    or loss.numel() != 1
                    or not loss.requires_grad
                ):
                    raise InvalidArgument(
                        f"loss_of returned {_shown(loss)}, expected the loss, a tensor of one "
                        "element that depends on the model's parameters"
                    )
            self.losses[number] = loss.detach()
            # a module that computes twice may get gradients from further back, too
            more = number < len(self._batches) - 1 or any(n > 1 for n in self._around.values())
            with self._streamed.holding_gradients(more):
                torch.autograd.backward(loss, retain_graph=True)

        return body

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Give a thread the caller's device and stream."""
        with ExitStack() as stack:
            if self._default.type != "cpu":
                stack.enter_context(self._default)
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    # ------------------------------------------------------------ forward

    def _forward(self) -> None:
        """Let all micro-batches compute up to the last block, and each the rest with its
        backward."""
        turns = self._turns
        for number in range(len(self._batches)):
            turns.give(number)
        while turns.waiting:
            unit = turns.waiting[min(turns.waiting)]
            with self._streamed.staying(unit):
                for number in [n for n, one in sorted(turns.waiting.items()) if one is unit]:
                    turns.give(number)

    def _arriving(self, unit: StreamedModule) -> Callable[..., Any]:
        def arriving(module: nn.Module, args: Any, kwargs: Any) -> Any:
            number = self._turns.number()
            if number is None:
                return None
            if self._turns.left:
                raise Abandoned
            if torch._C._current_graph_task_id() >= 0:
                raise InvalidArgument(
                    f"activation checkpointing computes block {self._names[module]!r} again in "
                    "the backward: accumulate does this itself, so turn checkpointing off"
                )
            alone = self._alone and number == 0
            if not alone and any(not group.present for group in unit.groups):
                self._turns.wait_for(unit)
            if unit.block:
                return self._begin(number, unit, (args, kwargs))
            self._around[number, unit] += 1
            return None

        return arriving

    def _begin(self, number: int, unit: StreamedModule, arguments: Any) -> Any:
        """Record a call of a block, and return arguments without their graph."""
        if not torch.is_grad_enabled():
            self._open[number].append(None)
            return None
        tensors = list(tensors_in(arguments))
        numbers = iter(range(len(tensors)))
        call = BlockCall(
            number,
            unit,
            mapped(arguments, torch.Tensor, lambda _: Hole(next(numbers))),
            [Input(one, self._tier) for one in tensors],
            self._turns.random(),
            self._casts(),
            torch.is_autocast_cache_enabled(),
            buffers_of(unit.module),
        )
        arguments = mapped(arguments, torch.Tensor, partial(self._leaf, unit))
        call.given = [*contents(arguments)]
        self._open[number].append(call)
        NOTHING_SAVED.__enter__()
        # autocast would keep a copy of each weight to the end of its context
        torch.set_autocast_cache_enabled(False)
        return arguments

    def _failed(self, call: BlockCall, arguments: Any, result: Any) -> bool:
        """Return whether the block has no result; raise if it has changed its arguments."""
        if [*contents(arguments)] != call.given:
            raise InvalidArgument(
                f"block {self._names[call.unit.module]!r} changes its arguments, as models of "
                f"transformers do with a cache: {CURE}"
            )
        return result is None

    def _leaf(self, unit: StreamedModule, tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument without its graph; a gradient that comes to it would be lost."""
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        if leaf.requires_grad:
            leaf.register_hook(partial(_leaked, f"block {self._names[unit.module]!r}"))
        return leaf

    def _computed(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the results of a block without their graph, as the beginning of a new one."""
        number = self._turns.number()
        if number is None or not self._open[number]:
            return None
        call = self._open[number].pop()
        if call is None:
            return None
        NOTHING_SAVED.__exit__()
        torch.set_autocast_cache_enabled(call.caches)
        if self._failed(call, (args, kwargs), result):
            return None
        results = trained_results(result)
        if not results:  # the block is frozen
            return None
        for buffer, value in module.named_buffers():
            if torch.equal(value, call.buffers[buffer]):
                del call.buffers[buffer]
        for name, attribute in stored(module):
            raise InvalidArgument(
                f"block {self._names[module]!r} stores a tensor with a graph in {attribute!r} of "
                f"its module {name or 'itself'!r}, which a loss would get without one: {CURE}"
            )
        call.looks, call.gradients = self._look(results), [None] * len(results)
        self._calls[number].append(call)
        for one in call.inputs:
            if one.edge is not None:
                self._wanted.setdefault(self._key(call, one.edge), [None, call])
        anchor = torch.empty(0, requires_grad=True)
        fresh = dict(zip(map(id, results), Cut.apply(call, results, anchor), strict=True))
        return mapped(result, torch.Tensor, lambda one: fresh.get(id(one), one))

    # ------------------------------------------------------------ backward

    def _backward(self) -> None:
        """Go backward through the blocks, all micro-batches through one before the next."""
        left = self._calls
        waiting = Counter(call.unit for calls in left for call in calls)
        while any(left):
            unit = max(left, key=len)[-1].unit
            with self._streamed.staying(unit):
                for calls in left:
                    if calls and calls[-1].unit is unit:
                        waiting[unit] -= 1
                        call = calls.pop()
                        with self._streamed.holding_gradients(waiting[unit] > 0):
                            self._backward_of(call)
                        # parameters between blocks may get more, from calls further back
                        with self._streamed.holding_gradients(True):
                            self._before(call)

    def _backward_of(self, call: BlockCall) -> None:
        name = self._names[call.unit.module]
        if any(gradient is not None for gradient in call.gradients):
            leaves = [one.take(name) for one in call.inputs]
            args, kwargs = mapped(call.arguments, Hole, lambda hole: leaves[hole.number])
            module, before = call.unit.module, self._turns.random()
            self._turns.set_random(call.random)
            with (
                torch.enable_grad(),
                casting(call.autocast),
                with_buffers(module, call.buffers),  # running statistics count a batch once
            ):
                results = trained_results(module(*args, **kwargs))
            self._turns.set_random(before)
            self._check(name, call, results)
            pairs = [
                (one, given)
                for one, given in zip(results, call.gradients, strict=True)
                if given is not None
            ]
            torch.autograd.backward([one for one, _ in pairs], [given for _, given in pairs])
            for one, leaf in zip(call.inputs, leaves, strict=True):
                if one.edge is not None and leaf.grad is not None:
                    wanted = self._wanted[self._key(call, one.edge)]
                    wanted[0] = leaf.grad if wanted[0] is None else wanted[0] + leaf.grad

    def _before(self, call: BlockCall) -> None:
        """Go backward through the graph that computed inputs of which this call was the first to
        use."""
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        for edge in dict.fromkeys(one.edge for one in call.inputs if one.edge is not None):
            gradient, first = self._wanted[self._key(call, edge)]
            if first is call:
                del self._wanted[self._key(call, edge)]
                if gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients, retain_graph=True)

    @staticmethod
    def _key(call: BlockCall, edge: GradientEdge) -> tuple[int, Any, int]:
        return call.number, edge.node, edge.output_nr

    @torch.no_grad()
    def _look(self, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each tensor a sum with random weights, which depends on every element and its
        place, and its deviation: the norm."""
        found = []
        for one in results:
            flat = (torch.view_as_real(one) if one.is_complex() else one).float().reshape(-1)
            if (key := (flat.numel(), flat.device)) not in self._weights:
                draw = torch.Generator(flat.device).manual_seed(1)
                drawn = torch.randn(flat.numel(), generator=draw, device=flat.device)
                self._weights[key] = drawn
            found.append(torch.stack([self._weights[key].dot(flat), flat.norm()]))
        return found

    def _check(self, name: str, call: BlockCall, results: Sequence[torch.Tensor]) -> None:
        if len(results) != len(call.looks):
            raise InvalidArgument(
                f"block {name!r} returned {len(call.looks)} tensors in forward and {len(results)} "
                f"when it was computed again: {CURE}"
            )
        for before, after in zip(call.looks, self._look(results), strict=True):
            self._checked.append((name, before, after))

    def _compare(self) -> None:
        """Raise unless blocks have computed in backward what they had in forward."""
        for name, before, after in self._checked:
            (a, size), (b, _) = before.tolist(), after.tolist()
            most = TOLERANCE.get(before.device.type, OF_DEVICES)
            if abs(a - b) > (OF_CODES if getattr(self._tier, "lossy", False) else most) * size:
                raise InvalidArgument(
                    f"block {name!r} did not return the same when it was computed again (a sum is "
                    f"{b:.6g} in place of {a:.6g}): {CURE}"
                )


def _leaked(block: str, _: object) -> torch.Tensor:
    raise InvalidArgument(f"{block} passes on a tensor that is not among its results: {CURE}")


NOTHING_SAVED = saved_tensors_hooks(lambda _: None, partial(_leaked, "a block of the model"))
CURE = (
    "a block must compute its results from arguments, parameters and torch's random numbers, and "
    "pass on nothing else (use_cache=False for transformers). Call zero_grad(), and backward() for "
    "each micro-batch"
)


@contextmanager
def casting(states: Iterable[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """Set autocast for each kind of device, without copies of weights that outlive an
    operation."""
    with ExitStack() as stack:
        for kind, enabled, dtype in states:
            if enabled or torch.is_autocast_enabled(kind):
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                stack.enter_context(cast)
        yield


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"a {type(value).__name__}"
