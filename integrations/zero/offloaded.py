"""An optimizer whose master weights and moments live in a tiered store and pass through memory chunk by chunk.

    step      read k + 1  |  update k  |  write k − 1

Chunks that fit into the store's host memory stay there, the first ones, in every step the same: a sweep over all of them
would otherwise evict each just before it is needed. Only the others are read and written.
"""

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from time import perf_counter
from typing import Any, Literal

import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero.chunk import WEIGHT, Chunk, Run, chunks
from commpress.integrations.zero.chunk_gradients import ChunkGradients
from commpress.integrations.zero.chunk_step import ChunkStep, threads
from commpress.integrations.zero.elementwise import check_elementwise
from commpress.integrations.zero.moments import Moments
from commpress.integrations.zero.options import trainable
from commpress.integrations.zero.placement import AHEAD, UNDER_WAY, Meter, choose, report
from commpress.integrations.zero.quantised import bits_of
from commpress.integrations.zero.shards import Cut, local
from commpress.integrations.zero.state import MASTER, agreed, check_groups, like, probe, take_options
from commpress.integrations.zero.stored_gradients import StoredGradients
from commpress.integrations.zero.stored_state import StoredState
from commpress.integrations.zero.streamed import owner_of
from commpress.integrations.zero.unit import Unit
from commpress.integrations.zero.wrapper import Wrapper, clip_factor, loss_of
from commpress.tiered_mem import Pending, TieredStore, parse_bytes
from commpress.tiered_mem.arena import padded

FORMAT = 1.0


class Offloaded(Wrapper):
    """``Offloaded(model.parameters(), torch.optim.AdamW, store=store, lr=1e-4)``: its state lies in ``store``.

    If the store holds a committed state of the same parameters under ``prefix``, training goes on from there: parameters
    take its weights. What is not named below goes to ``optimizer``, which must treat every element by itself; the update
    runs on the processor, so pass ``fused=True`` where torch has it.

    - ``gradients``: "parameters" leaves them in ``parameter.grad``; "store" adds them up in the store, in float32, as backward
      makes them, and leaves ``parameter.grad`` None.
    - ``chunk_mb``: megabytes of float32 weights in a chunk. About five chunks with their moments are in memory at a time.
    - ``device_budget``, ``host_budget``: bytes of the store's tiers in which the first chunks stay; by default none on the
      device, and all of host memory but for what passes through.
    - ``moments``: "int8" or "int4" keeps moments quantised in blocks of 128 in the store; None in float32.
    - ``delayed``: a step's update runs beside the next forward and backward, whose gradients are then of weights that are one
      step old; parameters get its values in the next ``step``, or by ``finish``.
    - ``max_grad_norm``: clip to this global norm in every step.
    - ``commit_every``: steps between commits; 0: only when ``commit`` is called.
    - ``on_nonfinite``: with ``max_grad_norm``, "skip" (default) leaves a step out whose norm is not finite; "raise" raises.
    """

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        *,
        store: TieredStore,
        gradients: Literal["parameters", "store"] = "parameters",
        prefix: str = "optimizer",
        chunk_mb: float = 64.0,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        commit_every: int = 0,
        device_budget: str | int = 0,
        host_budget: str | int | None = None,
        moments: Literal["int8", "int4"] | None = None,
        delayed: bool = False,
        **options: Any,
    ) -> None:
        if gradients not in ("parameters", "store"):
            raise InvalidArgument(f"gradients is {gradients!r}, expected 'parameters' or 'store'")
        if not chunk_mb > 0:
            raise InvalidArgument(f"chunk_mb is {chunk_mb!r}, expected a positive number")
        if moments and parse_bytes(device_budget):
            raise InvalidArgument("moments are quantised on the processor: leave device_budget= out")
        super().__init__(params, optimizer, options, max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite)
        places, _ = trainable(self.param_groups, cut=True)
        check_elementwise(optimizer, options, self.param_groups, device=torch.device("cpu"), in_place=True)
        self.store, self.prefix, self.commit_every = store, prefix, commit_every
        self.chunks = chunks(places, max(int(chunk_mb * 1e6 / 4), 1), prefix)
        self.streamed = owner_of(places, store)
        self._cut = Cut([p for group in places for p, _, _ in group], clipped=max_grad_norm is not None)
        self._of_piece = {chunk.piece: chunk for chunk in self.chunks if chunk.piece}
        self._optimizer, self._chunk_step = optimizer, ChunkStep(optimizer, options)
        self._moments, self._scalars = probe(optimizer, options)
        self._coded = Moments(store, bits_of(moments))
        self.state = StoredState(store, self.chunks, self._moments, self._scalars, self._coded)  # type: ignore[assignment]
        self._index = {run.parameter: run.index for chunk in self.chunks for run in chunk.runs}
        if delayed and (gradients == "store" or self.streamed is not None):
            raise InvalidArgument("delayed=True needs gradients='parameters' and parameters that are not streamed")
        self.delayed = delayed
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="offloaded") if delayed else None
        self._pending: Future[None] | None = None
        self._gradients = ChunkGradients(store, self.chunks, {} if delayed else None)
        self._next: dict[int, torch.Tensor] = {}  # new values that parameters do not have yet
        self._streams = gradients == "store" or self.streamed is not None
        self._versions: dict[int, int] = {}
        beside = self.streamed.room() if self.streamed is not None else 0
        choose(self.chunks, store, self._needed, beside=beside, device=device_budget, host=host_budget)
        self._pins, self.meter = host_budget is not None, Meter()
        self._disk = any(map(self._passes, self.chunks))  # it is at work during a step
        with torch.no_grad():
            if self._meta in store:
                self._resume()
            else:
                self._begin()
        agreed(self._every(self.steps_done))
        self._stored = StoredGradients(store, self.chunks, self._passes) if self._streams else None
        self._gradients.stored = self._stored
        self._hooks = self._watch([p for group in places for p, _, _ in group]) if self._streams else []
        if self.streamed is not None:
            self.streamed.follow(self._take_loaded)
        if delayed:
            self._next = {index: torch.empty_like(parameter) for parameter, index in self._index.items()}
        self._built = True

    # ------------------------------------------------------------ gradients

    def _watch(self, parameters: list[torch.Tensor]) -> list[Any]:
        assert self._stored is not None
        if self.streamed is not None and self.streamed.transport.size > 1:
            self.streamed.send_gradients(self._take_row)
            parameters = [p for p in parameters if not hasattr(p, "home")]
        return [self._stored.hook(p) for p in parameters]

    @torch.no_grad()
    def _take_loaded(self, piece: str) -> None:
        """Streamed values were loaded: a master beside them follows."""
        if (chunk := self._of_piece.get(piece)) and chunk.copied:
            with self.store.borrow(chunk.master) as master, self.store.borrow(piece, write=False) as values:
                master.copy_(values)

    def _take_row(self, unit: Unit, row: torch.Tensor) -> None:
        """The mean gradient of what this rank owns of a unit."""
        assert self._stored is not None
        for piece in unit.pieces:
            if chunk := self._of_piece.get(piece.name):
                self._stored.add(chunk, {run: run.inside(piece.of(row)) for run in chunk.runs})

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._stored is not None:
            self._stored.clear()

    def _every(self, value: float) -> list[float]:
        """Of each rank that has other elements of the parameters."""
        return self.streamed.every(value) if self.streamed is not None else self._cut.every(value)

    def _norm(self) -> torch.Tensor:
        """Summed in double, where the gradients lie, and rounded once."""
        return torch.tensor(sum(self._every(self._gradients.square_sum())) ** 0.5, dtype=torch.float32)

    # ------------------------------------------------------------ one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, factor = loss_of(closure), None
        if self._stored is not None:
            self._stored.settle()
        if self.delayed:
            self.finish()
            for parameter, index in self._index.items():
                self._gradients.take(parameter, index)
        if self.max_grad_norm is not None:
            norm = self._norm()
            if not torch.isfinite(norm):
                self._forget()
                self._skip()
                return loss
            factor = clip_factor(self.max_grad_norm, norm)
        self._coded.turn = self.steps_done
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        if self._beside is not None:
            self._pending = self._beside.submit(self._measured, factor)
        else:
            self._measured(factor)
            self._forget()
        self.steps_done += 1
        if self.commit_every and self.steps_done % self.commit_every == 0:
            self.commit()
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """With ``delayed``: wait for the update under way and give parameters its values."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            for parameter, index in self._index.items():
                parameter.copy_(self._next[index])
            self._versions = self._now()

    @torch.no_grad()
    def _measured(self, factor: torch.Tensor | None) -> None:
        begin, stalled, written = perf_counter(), self.store.counters.stall_seconds, self.store.wear.written
        self._sweep(factor)
        stalled = self.store.counters.stall_seconds - stalled
        self.meter.count(perf_counter() - begin, stalled, self.store.wear.written - written)

    def _forget(self) -> None:
        if self._stored is not None:
            self._stored.clear()
        if self.streamed is not None:
            self.streamed.stepped()

    def _sweep(self, factor: torch.Tensor | None) -> None:
        leaving = list[Pending[None]]()
        written = {i for i, version in self._now().items() if version != self._versions.get(i)}
        if self._stored is None:  # nothing is on its way out yet: all there is room for, while those that stay are updated
            for chunk in islice(filter(self._passes, self.chunks), UNDER_WAY - 1):
                self.store.prefetch(chunk.names())
        for k, chunk in enumerate(self.chunks):
            for later in self.chunks[k + (AHEAD if k else 1) : k + 1 + AHEAD]:
                self.store.prefetch(self._read(later))
            self._update(chunk, factor, written)
            if self._stored is not None:
                self._stored.forget(chunk)
            if self._passes(chunk):
                leaving.append(self.store.evict(chunk.names()))
            if len(leaving) > 2:
                leaving.pop(0).wait()
        for pending in leaving:
            pending.wait()
        self._versions = self._now()

    def _read(self, chunk: Chunk) -> list[str]:
        """What an update of a chunk needs."""
        return chunk.names() + (self._stored.name(chunk) if self._stored is not None else [])

    def _passes(self, chunk: Chunk) -> bool:
        """It is on disk between steps."""
        return chunk.tier == "disk"

    def _settle(self, chunk: Chunk) -> None:
        """A chunk with a budget of its own is never evicted."""
        if chunk.tier == "device" or (self._pins and chunk.tier == "host"):
            for name in chunk.names():
                self.store.pin(name, on=chunk.on)

    def _update(self, chunk: Chunk, factor: torch.Tensor | None, written: set[int]) -> None:
        """``written``: parameters that somebody else has changed, such as ``load_state_dict``; their masters follow."""
        misses = self.store.counters.misses
        with ExitStack() as stack:
            held = stack.enter_context(self._coded.opened(chunk))
            if self.delayed or self.store.counters.misses > misses:  # leave the other cores to the model, or to the disk
                stack.enter_context(threads(1))
            elif self._disk:
                stack.enter_context(threads(max(torch.get_num_threads() - 1, 1)))
            gradients = self._gradients.ready(chunk, factor)
            for run in chunk.runs:
                if run.index in written:
                    run.inside(held[WEIGHT]).copy_(run.of(run.parameter))
                    self._count(chunk, run, down=True)
            states = self._chunk_step.step(chunk, gradients, held, self._groups)
            self._publish(chunk, held[WEIGHT])
        chunk.scalars = {key: value for key, value in states[0].items() if key in self._scalars}
        if not chunk.keys:
            for key in self._moments:
                flat = torch.zeros(chunk.numel)
                for run, state in zip(chunk.runs, states, strict=True):
                    run.inside(flat).copy_(state[key])
                self._coded.put(chunk, key, flat)
            chunk.keys = list(self._moments)
            self._settle(chunk)

    def _publish(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """The new values to the parameters, or to where streamed ones lie."""
        if chunk.copied:
            with self.store.borrow(chunk.piece) as values:
                values.copy_(weights)
        elif not chunk.piece:
            for run in chunk.runs:
                run.of(self._next.get(run.index, run.parameter)).copy_(run.inside(weights))
                self._count(chunk, run)

    def _count(self, chunk: Chunk, run: Run, *, down: bool = False) -> None:
        """A run's values cross between host memory and its parameter."""
        if chunk.on == "host":
            nbytes, crossing = run.numel * run.parameter.dtype.itemsize, self.store.crossing
            crossing.down, crossing.up = crossing.down + nbytes * down, crossing.up + nbytes * (not down)

    def _needed(self, chunk: Chunk) -> int:
        """Bytes of memory."""
        moments = len(self._moments) * padded(self._coded.nbytes(chunk.numel))
        return padded(4 * chunk.numel) * (1 + self._streams) + moments

    def _now(self) -> dict[int, int]:
        return {r.index: local(r.parameter)._version for c in self.chunks for r in c.runs if not c.piece}

    # ------------------------------------------------------------ what outlives the process

    def state_dict(self) -> dict[str, Any]:
        """The whole state in memory, as ``optimizer`` itself would save it. A delayed update is finished before."""
        self.finish()
        return super().state_dict()

    @property
    def _meta(self) -> str:
        return f"{self.prefix}/meta"

    def commit(self) -> int:
        """After this returns, a process that is killed goes on from this step. A delayed update is finished before."""
        self.finish()
        numbers = [FORMAT, float(self._layout()), float(self.steps_done)]
        for chunk in self.chunks:
            numbers += [float(chunk.scalars.get(key, -1.0)) for key in self._scalars]
        self.store.put(self._meta, torch.tensor(numbers, dtype=torch.float64))
        return self.store.commit()

    def _layout(self) -> int:
        """A digest of what lies where."""
        bits = [f"{self._coded.bits} bits"] if self._coded.bits else []
        runs = [f"{c.number}.{r.group}:{r.name}@{r.start}+{r.numel}" for c in self.chunks for r in c.runs]
        return zlib.crc32(";".join([self._optimizer.__name__, *bits, *self._moments, *self._scalars, *runs]).encode())

    def _begin(self) -> None:
        for chunk in self.chunks:
            if chunk.master != chunk.piece:
                self.store.put(chunk.master, self._first(chunk))
            self._settle(chunk)
            if self._passes(chunk):
                self.store.evict(chunk.names()).wait()
        self._versions = self._now()

    def _first(self, chunk: Chunk) -> torch.Tensor:
        flat = self._gradients.buffer(chunk)
        if chunk.piece:
            with self.store.borrow(chunk.piece, write=False) as values:
                return flat.copy_(values)
        for run in chunk.runs:
            run.inside(flat).copy_(run.of(run.parameter))
            self._count(chunk, run, down=True)
        return flat

    def _resume(self) -> None:
        with self.store.borrow(self._meta, write=False) as meta:
            numbers = meta.tolist()
        if len(numbers) != 3 + len(self._scalars) * len(self.chunks) or numbers[:2] != [FORMAT, float(self._layout())]:
            raise StateMismatch(
                f"the store holds a state {self.prefix!r} of other parameters, chunk_mb or optimizer: open it with those it "
                "was made with, or pass another prefix="
            )
        self.steps_done = int(numbers[2])
        values = iter(numbers[3:])
        for chunk in self.chunks:
            found = {key: next(values) for key in self._scalars}
            if self.steps_done:
                chunk.scalars = {key: like(self._scalars[key], value) for key, value in found.items()}
                chunk.keys, chunk.stepped = list(self._moments), True
            if not chunk.piece:
                with self.store.borrow(chunk.master, on=chunk.on, write=False) as weight:
                    self._publish(chunk, weight)
            self._settle(chunk)
        self._versions = self._now()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From ``state_dict``, or that of the plain optimizer, into the store. Load the model's weights before."""
        self.finish()
        groups, states = state_dict["param_groups"], state_dict["state"]
        check_groups(self.param_groups, groups)
        numbers = [number for group in groups for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not any(states.values()):
            self.state.clear()
        for number, parameter in zip(numbers, parameters, strict=True):
            if states.get(number):
                self.state[parameter] = states[number]
                if MASTER not in states[number]:
                    self._versions.pop(self._index[parameter], None)
        take_options(self.param_groups, groups)
        self.steps_done = max((int(c.scalars.get("step", self.steps_done)) for c in self.chunks), default=0)

    def report(self) -> str:
        """A table of what lies where, and how long steps took: ``print(optimizer.report())``."""
        self.finish()
        return report(self.chunks, self.store, self.meter)

    def close(self) -> None:
        """Remove the hooks from the parameters. The store stays open: it is the caller's."""
        for hook in self._hooks:
            hook.remove()
        if self._beside is not None:
            self.finish()
            self._beside.shutdown()
