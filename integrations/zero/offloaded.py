"""An optimizer with master weights and moments in a tiered store, from which they pass through
memory chunk by chunk.

    step      read k + 1  |  update k  |  write k − 1

The first chunks stay in the store's host memory, as many as fit: otherwise a sweep over all of them
would evict each just before it is needed. Only the others are read and written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Literal

import torch

from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.integrations.zero.averaging import averaging_check
from commpress.integrations.zero.backward_updates import BackwardUpdates
from commpress.integrations.zero.moments import Moments, check_moments
from commpress.integrations.zero.stored_state import StoredOptimizer, StoredState
from commpress.integrations.zero.streamed import Streamed
from commpress.integrations.zero.streamed_group import StreamedGroup, streamer_of
from commpress.integrations.zero.sweep import Sweep
from commpress.integrations.zero.update_chunk import (
    AHEAD,
    GRADIENT,
    WEIGHT,
    ChunkRange,
    ParameterGradients,
    StoredGradients,
    UpdateChunk,
    chunks,
    threads,
)
from commpress.integrations.zero.wrapper import MASTER, agreed, copied, of_every_rank
from commpress.optim.checkpoint import options_of
from commpress.optim.layout import LocalWeights, held_of, is_cut, refuse_held, version_of
from commpress.tiered_mem import Pending, TieredStore, parse_bytes, show_bytes
from commpress.tiered_mem.arena import padded
from commpress.work import Handed

# chunks in memory besides the resident ones: one is updated, others are read, two are written
UNDER_WAY = AHEAD + 3
# of the memory that resident chunks leave: gradients whose update in backward has not ended
GRADIENTS = 0.25
TIERS = ("device", "host", "disk")
# options of a state in a store, for any optimizer
OF_STORE = ("prefix", "chunk_mb", "commit_every", "resident", "moments")


@dataclass
class Meter:
    """Seconds and bytes of the steps so far."""

    steps: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    written: int = 0


class Offloaded(StoredOptimizer):
    """Keep the state of an optimizer in a store: ``Offloaded(model.parameters(), torch.optim.AdamW,
    store=store, lr=1e-4)``.

    If the store has a committed state of the same parameters under ``prefix``, training continues
    from it: parameters take its weights. Options not listed below are passed to ``optimizer``,
    which must be element-wise, or update each tensor by itself, as ``torch.optim.Muon`` does: then
    every tensor is a chunk. The update runs on the processor, so pass ``fused=True`` if torch
    has it. This optimizer does not communicate: on several ranks average gradients by
    DistributedDataParallel or FSDP, or use ``Partitioned(..., store=store)`` instead.

    - ``gradients``: "parameters" leaves them in ``parameter.grad``; "store" adds them up in the
      store, in float32, during backward, and leaves ``parameter.grad`` None. "backward", of
      streamed parameters: each chunk is updated in backward, as soon as its gradient is whole,
      which then never leaves memory; one backward, or ``streamed.accumulate``, a step, and no
      clipping. "delayed": ``step`` takes them from ``parameter.grad``, and the update runs during
      the next forward and backward, which use weights that are one step old; parameters get the
      new values in the next ``step``, or by ``finish``.
    - ``chunk_mb``: megabytes of float32 weights in a chunk. About five chunks with their moments
      are in memory at a time.
    - ``resident``: bytes of the store's tiers in which the first chunks stay, as in ``{"device":
      "8GiB", "host": "40GiB"}``; by default none on the device, and all host memory that passing
      chunks do not need.
    - ``moments``: "int8" stores moments quantized in blocks of 128; None stores float32.
    - ``max_grad_norm``: clip to this global norm in every step.
    - ``commit_every``: steps between commits; 0: only when ``commit`` is called.
    - ``on_nonfinite``: with ``max_grad_norm``, "skip" (default) leaves out a step with a norm that
      is not finite; "raise" raises.
    """

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        *,
        store: TieredStore,
        gradients: Literal["parameters", "store", "delayed", "backward"] = "parameters",
        prefix: str = "optimizer",
        chunk_mb: float = 64.0,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        commit_every: int = 0,
        resident: Mapping[str, str | int] | None = None,
        moments: Literal["int8"] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(store, TieredStore):
            raise InvalidArgument(
                f"store is {store!r}, expected an open store: commpress.TieredStore.open(folder, "
                "host='8GiB')"
            )
        if gradients not in ("parameters", "store", "delayed", "backward"):
            raise InvalidArgument(
                f"gradients is {gradients!r}, expected 'parameters', 'store', 'delayed' or "
                "'backward'"
            )
        if gradients == "backward" and max_grad_norm is not None:
            raise InvalidArgument(
                "max_grad_norm is given, but gradients='backward' updates before the norm of all "
                "gradients is known: leave one of them out"
            )
        if not isinstance(chunk_mb, int | float) or not 0 < chunk_mb < inf:
            raise InvalidArgument(f"chunk_mb is {chunk_mb!r}, expected a positive number")
        check_moments(moments)
        budgets = {tier: parse_bytes(size) for tier, size in (resident or {}).items()}
        if moments and budgets.get("device"):
            raise InvalidArgument(
                "moments are quantised on the processor: leave 'device' out of resident="
            )
        super().__init__(
            params,
            optimizer,
            options,
            commit_every=commit_every,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
        )
        places = self._places
        if max_grad_norm is not None:
            named = [(name, parameter) for group in places for parameter, name, _ in group]
            refuse_held(
                "Offloaded(max_grad_norm=)", named, "would clip each rank by a factor of its own"
            )
        self.store, self.prefix = store, prefix
        parameters = [p for group in places for p, _, _ in group]
        self.streamed = _streamer(parameters, store)
        elsewhere = self.streamed.group_of if self.streamed is not None else {}
        self._check_whole(parameters)
        numel = max(int(chunk_mb * 1e6 / 4), 1)
        self.chunks = chunks(places, numel, prefix, elsewhere, whole=self.by_tensor)
        self._channels = _channels_of(parameters, clipped=max_grad_norm is not None)
        self._of_values = {chunk.values: chunk for chunk in self.chunks if chunk.values}
        self._group_of = {stored.name: g for g in elsewhere.values() for stored in g.stored}
        self._coded = Moments(store, quantised=moments is not None)
        self._stored = StoredState(
            store, self.chunks, self._moments, self._scalars, self._coded, self._wait
        )
        self.state = self._stored  # type: ignore[assignment]
        self._index = {own.parameter: own.index for chunk in self.chunks for own in chunk.ranges}
        self.delayed = gradients == "delayed"
        if self.delayed and self.streamed is not None:
            raise InvalidArgument(
                "gradients is 'delayed', but streamed parameters have no second copy for the next "
                "forward: expected 'parameters' or 'store'"
            )
        if gradients == "backward" and self.streamed is None:
            raise InvalidArgument(
                "gradients is 'backward', but the parameters are not streamed: backward needs "
                "their present values. Call commpress.stream(model, store=store) first, or pass "
                "'store'"
            )
        self._beside = ThreadPoolExecutor(1, "offloaded") if self.delayed else None
        self._pending: Future[list[Handed[None]]] | None = None
        self._next: dict[int, torch.Tensor] = {}  # new values, not yet copied to parameters
        self._streams = gradients in ("store", "backward") or self.streamed is not None
        self._versions: dict[int, int] = {}
        self._running: Sweep | None = None  # an update behind which the next forward runs
        passing = self._choose_tiers(budgets)
        largest = max(padded(4 * chunk.numel) for chunk in self.chunks)
        waiting = max(int(GRADIENTS * passing) // largest, 1)
        self._pins, self.meter = "host" in budgets, Meter()
        self._disk = any(chunk.passes for chunk in self.chunks)  # the disk is used during a step
        self._gradients = (
            StoredGradients(store, self.chunks, norms=max_grad_norm is not None)
            if self._streams
            else ParameterGradients(store, self.chunks)
        )
        self._early = (
            BackwardUpdates(self._start, self._update_early, waiting)
            if gradients == "backward"
            else None
        )
        with torch.no_grad():
            if self._meta in store:
                self._resume()
            else:
                self._begin()
        agreed(self._every(self.steps_done))
        names = [f"{own.name}+{own.numel}" for chunk in self.chunks for own in chunk.ranges]
        together = self.streamed is not None and self.streamed.transport.size > 1
        self._replicas = None if together else averaging_check("Offloaded", names)
        self._hooks = self._watch(parameters)
        if self.streamed is not None:
            self.streamed.follow(self._renewed)
        if self.delayed:
            self._next = {
                index: torch.empty_like(parameter) for parameter, index in self._index.items()
            }
        self._closed = False
        store.settle_with(self._record)
        self._built = True

    def _check_whole(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ``InvalidArgument`` if the optimizer takes whole tensors and a rank has parts."""
        if not self.by_tensor:
            return
        divided = self.streamed is not None and self.streamed.transport.size > 1
        if divided or any(map(is_cut, parameters)):
            raise InvalidArgument(
                f"optimizer is {self._optimizer.__name__}, which takes whole tensors, but "
                "parameters are divided over ranks: use an element-wise one, such as AdamW, or "
                "commpress.Muon, which brings the rows of a matrix together"
            )
        if self.streamed is not None and self._scalars:
            raise InvalidArgument(
                f"optimizer is {self._optimizer.__name__}, which takes whole tensors and counts "
                f"{min(self._scalars)!r} for each, but streamed parameters are updated by blocks: "
                "use an element-wise one, such as AdamW, or torch.optim.Muon"
            )

    def _choose_tiers(self, budgets: Mapping[str, int]) -> int:
        """Assign the first chunks to the device and the next to host memory, within the budgets;
        return the bytes of host memory that they leave to others.

        They stay there: otherwise a sweep over all chunks would evict each just before it is
        needed.
        """
        beside = self.streamed.room() if self.streamed is not None else 0
        usage, largest = self.store.usage(), max(map(self._needed, self.chunks))
        reserve = UNDER_WAY * largest + beside
        every = sum(self._needed(c) + c.copied * padded(4 * c.numel) for c in self.chunks)
        if not budgets and every + beside <= usage.host_capacity:  # none passes
            reserve = beside
        if usage.host_capacity < reserve:
            raise InvalidArgument(
                f"the store has {usage.host_capacity} bytes of host memory, but {UNDER_WAY} chunks "
                f"with their moments, and streamed parameters, need {reserve}: open it with a "
                f"larger host={'' if self.by_tensor else ', or pass a smaller chunk_mb='}"
            )
        most = {"device": usage.device_capacity, "host": usage.host_capacity - reserve}
        for tier, budget in budgets.items():
            if budget > most.get(tier, -1):
                raise InvalidArgument(
                    f"resident is {budget} bytes of {tier!r}, expected at most {most}: {reserve} "
                    f"of the store's {usage.host_capacity} in host memory are for passing chunks. "
                    "Open it with a larger host= or device="
                )
        room = {"device": 0, "host": most["host"], **budgets}
        for chunk in self.chunks:
            chunk.tier = "disk"
            for tier in ("device", "host"):
                if self._needed(chunk) <= room[tier]:
                    room[tier] -= self._needed(chunk)
                    chunk.tier = tier
                    break
                room[tier] = 0
        held = sum(self._needed(chunk) for chunk in self.chunks if chunk.tier == "host")
        return usage.host_capacity - held

    # ------------------------------------------------------------ weights for local updates

    @property
    def inner_channel(self) -> Channel | None:
        return None if self.streamed is None else self.streamed.channel

    def local_weights(self) -> list[LocalWeights]:
        """Return this rank's parts of parameters, for streamed ones its ranges in the store."""
        found: list[LocalWeights] = []
        seen: set[int] = set()
        for parameter, name, _ in (one for group in self._places for one in group):
            group = None if self.streamed is None else self.streamed.group_of.get(id(parameter))
            if group is None:
                found.append(LocalWeights(name, parameter))
            elif group.number not in seen:
                assert self.streamed is not None
                seen.add(group.number)
                found += self.streamed.local_weights(group)
        return found

    def settle_weights(self) -> None:
        self.finish()

    def weights_written(self) -> None:
        """Do nothing: masters follow in the next step, and those of streamed parameters have done
        so already."""

    # ------------------------------------------------------------ gradients

    def _watch(self, parameters: list[torch.Tensor]) -> list[Any]:
        stored = self._gradients
        if not isinstance(stored, StoredGradients):
            return []
        if self.streamed is not None and self.streamed.transport.size > 1:
            self.streamed.send_gradients(partial(self._take_row, stored))
            parameters = [p for p in parameters if id(p) not in self.streamed.group_of]
        if self.streamed is not None:
            self.streamed.takers.append(stored)
        if self.streamed is not None and self._early is not None:
            stored.whole = self._whole
            self.streamed.on_backward.append(self._early.check)
        return [stored.hook(p) for p in parameters]

    def _take_row(self, into: StoredGradients, group: StreamedGroup, row: torch.Tensor) -> None:
        """Add the mean gradient of this rank's row of a streamed group."""
        for stored in group.stored:
            if chunk := self._of_values.get(stored.name):
                into.add(chunk, {own: own.inside(stored.of(row)) for own in chunk.ranges})

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.streamed is not None:
            self.streamed.drop_aborted()
        self._gradients.clear()

    def _every(self, value: float) -> list[float]:
        """Return the values of all ranks that have other elements of the parameters."""
        if self.streamed is not None:
            return self.streamed.every(value)
        values = [value]
        for channel in self._channels:
            values = of_every_rank(channel, values)
        return values

    def _norm(self) -> torch.Tensor:
        """Return the norm, summed in double where the gradients are, and rounded once."""
        return torch.tensor(
            sum(self._every(self._gradients.square_sum())) ** 0.5, dtype=torch.float32
        )

    # ------------------------------------------------------------ one step

    def _step(self) -> None:
        self._gradients.settle()
        if self._early is not None and self._early.begun:
            self.finish()
        else:
            self._start()
        if self.delayed:
            self._gradients.take()
        factor, finite = self._clipping(self._norm)
        if not finite:
            self._forget()
            self._skip()
            return
        self.meter.steps += 1
        if self._beside is not None:
            self._pending = self._beside.submit(self._step_beside, factor, self._handed())
        else:
            if self._streams:
                self._gradients.take()
            updated = set() if self._early is None else self._early.end()
            self._update_all(factor, [chunk for chunk in self.chunks if chunk not in updated])
            self._forget()
        self._ended()

    def _start(self) -> None:
        """Fix the options of a step before its first update, and after the last of the one
        before."""
        self.finish()
        self._coded.step = self.steps_done
        self._groups = [
            {key: copied(value) for key, value in options_of(group).items()}
            for group in self.param_groups
        ]

    def _whole(self, chunk: UpdateChunk) -> bool:
        """Update a chunk whose gradient is complete, if it will not get another one in this
        step."""
        assert self._early is not None
        group = self._group_of[chunk.values] if chunk.values else None
        if group is None or group.shared or chunk.on == "device" or self._replicas is not None:
            return False
        self._early.add(chunk)
        return True

    @torch.no_grad()
    def _update_early(
        self, chunk: UpdateChunk, later: Sequence[UpdateChunk]
    ) -> list[Pending[None]]:
        for one in later:
            self.store.prefetch(one.names())
        self._update(chunk, None, set())
        self._gradients.forget(chunk)
        return self._leave(chunk, stays=True)

    def _update_all(self, factor: torch.Tensor | None, chunks: Sequence[UpdateChunk]) -> None:
        """Update chunks, those of streamed parameters in a thread if it is of use: then the next
        forward waits for a group when it needs it."""
        if self._replicas is not None and (self.averaged or self._replicas.over):
            self._replicas = None
        first = [chunk for chunk in chunks if not chunk.values]
        later = chunks[len(first) :]
        alone = not self._disk or self._replicas is not None
        alone = alone or any(chunk.on == "device" for chunk in later)
        try:
            self._measured(factor, chunks if alone else first)
        except BaseException:
            self._gradients.put_back()
            raise
        if alone or not later:
            return
        self._running = Sweep(
            (chunk.values for chunk in later),
            lambda done: self._measured(factor, later, done),
        )
        for group in {self._group_of[chunk.values] for chunk in later}:
            group.follow(self._running)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the update of the last step, and copy the values of a delayed one to the
        parameters."""
        self._wait()
        pending, self._pending = self._pending, None
        if pending is not None:
            for each in pending.result():
                each.take()
            for parameter, index in self._index.items():
                parameter.copy_(self._next[index])
            self._versions = self._now()

    def _wait(self) -> None:
        """Wait for updates in other threads. The error of one is raised here each time, since half
        of the parameters are updated."""
        if self._pending is not None:
            self._pending.result()
        if self._early is not None:
            self._early.wait()
        running = self._running
        if running is None:
            return
        if running.alive and (name := self.store.held()) is not None:
            raise InvalidArgument(
                f"{name!r} is borrowed here, and the update of the last step may wait for it: "
                "leave its context first"
            )
        running.finish()
        if self._running is running:
            self._running = None

    def _record(self) -> None:
        if self._closed:
            return
        self._wait()
        if self._early is not None and self._early.begun:
            raise InvalidArgument(
                "the store is committed between backward and step, but gradients='backward' has "
                "updated a part of the parameters: commit after step"
            )
        self._put_numbers([each for c in self.chunks for each in self._floats_of(c)])

    def _handed(self) -> list[Handed[None]]:
        """Record the progress of this thread's streams, for another thread's streams to wait
        for."""
        devices = {parameter.device for parameter in self._index}
        return [Handed(None, device) for device in devices]

    def _step_beside(
        self, factor: torch.Tensor | None, given: list[Handed[None]]
    ) -> list[Handed[None]]:
        """Run a step in a separate thread after the streams in ``given``; return the progress of
        its own streams."""
        for each in given:
            each.take()
        self._measured(factor, self.chunks)
        return self._handed()

    @torch.no_grad()
    def _measured(
        self,
        factor: torch.Tensor | None,
        chunks: Sequence[UpdateChunk],
        done: Callable[[str], None] | None = None,
    ) -> None:
        begin, counters, wear = perf_counter(), self.store.counters, self.store.wear
        stalled, written = counters.stall_seconds, wear.written
        self._sweep(factor, chunks, done)
        self.meter.seconds += perf_counter() - begin
        self.meter.stalled += self.store.counters.stall_seconds - stalled
        self.meter.written += self.store.wear.written - written

    def _forget(self) -> None:
        self._gradients.clear()
        if self.streamed is not None:
            self.streamed.stepped()

    def _sweep(
        self,
        factor: torch.Tensor | None,
        chunks: Sequence[UpdateChunk],
        done: Callable[[str], None] | None,
    ) -> None:
        """Update chunks one after the other. ``done``: called after each with the name of its
        streamed values, which then stay in memory for the forward that waits."""
        leaving = list[list[Pending[None]]]()
        written = {i for i, version in self._now().items() if version != self._versions.get(i)}
        # nothing is being written yet: read all that fits during the update of resident chunks
        if not self._streams:
            for chunk in [c for c in chunks if c.passes][: UNDER_WAY - 1]:
                self.store.prefetch(chunk.names())
        for k, chunk in enumerate(chunks):
            for later in chunks[k + (AHEAD if k else 1) : k + 1 + AHEAD]:
                self.store.prefetch(later.names() + self._gradients.names(later))
            self._update(chunk, factor, written)
            self._gradients.forget(chunk)
            leaving.append(self._leave(chunk, stays=done is not None))
            if done:
                done(chunk.values)
            for pending in leaving.pop(0) if len(leaving) > 2 else ():
                pending.wait()
        for every in leaving:
            for pending in every:
                pending.wait()
        if not done:  # of parameters that are not streamed
            self._versions = self._now()
        if self._replicas is not None:
            self._replicas.compare()

    def _leave(self, chunk: UpdateChunk, *, stays: bool) -> list[Pending[None]]:
        """Begin to write a chunk back. Streamed values may stay in memory for the next forward."""
        if not chunk.passes:
            return []
        here = [name for name in chunk.names() if stays and name == chunk.values]
        gone = self.store.evict(name for name in chunk.names() if name not in here)
        return [gone, self.store.flush(here)] if here else [gone]

    def _settle(self, chunk: UpdateChunk) -> None:
        """Pin a resident chunk with a budget, so that it is never evicted."""
        if chunk.tier == "device" or (self._pins and chunk.tier == "host"):
            for name in chunk.names():
                self.store.pin(name, on=chunk.on)

    def _update(self, chunk: UpdateChunk, factor: torch.Tensor | None, written: set[int]) -> None:
        """Update a chunk. ``written``: parameters changed by others, as by ``load_state_dict``, to
        which the masters are set first."""
        misses, states = self.store.counters.misses, dict[ChunkRange, dict[str, Any]]()
        if self.streamed is not None:
            group = self.streamed.group_of.get(id(chunk.ranges[0].parameter))
            self.streamed.progress.reach(
                "update", chunk.ranges[0].name if group is None else group.name
            )
        with ExitStack() as stack:
            held = stack.enter_context(self._coded.opened(chunk))
            # leave the other cores to the model, or to the disk
            if self.delayed or self.store.counters.misses > misses:
                stack.enter_context(threads(1))
            elif self._disk:
                stack.enter_context(threads(max(torch.get_num_threads() - 1, 1)))
            gradients = self._gradients.ready(chunk, factor, stack)
            for own in chunk.ranges:
                if own.index in written:
                    own.inside(held[WEIGHT]).copy_(own.of(own.parameter))
                    self._count(chunk, own, down=True)
            if self._replicas is not None:
                for own, gradient in zip(chunk.ranges, gradients, strict=True):
                    if held_of(own.parameter) is None:
                        self._replicas.note(own.inside(held[WEIGHT]), gradient)
            if any(gradient is not None for gradient in gradients):
                states = chunk.step(self._make, gradients, held, self._groups)
            self._publish(chunk, held[WEIGHT])
        if states and self._stepped(chunk, states):
            self._settle(chunk)

    def _publish(self, chunk: UpdateChunk, weights: torch.Tensor) -> None:
        """Copy the new values to the parameters, or to the stored values of streamed ones."""
        if chunk.copied:
            with self.store.borrow(chunk.values) as values:
                values.copy_(weights)
        elif not chunk.values:
            for own in chunk.ranges:
                into = own.of(self._next.get(own.index, own.parameter))
                into.copy_(own.inside(weights), non_blocking=True)
                self.store.used_on(chunk.master, into.device)
                self._count(chunk, own)

    def _count(self, chunk: UpdateChunk, own: ChunkRange, *, down: bool = False) -> None:
        """Count the bytes of a range that cross between host memory and its parameter."""
        if chunk.on == "host":
            nbytes = own.numel * own.parameter.dtype.itemsize
            self.store.crossing.down += nbytes * down
            self.store.crossing.up += nbytes * (not down)

    def _needed(self, chunk: UpdateChunk) -> int:
        """Return the bytes of memory that a chunk needs."""
        moments = len(self._moments) * padded(self._coded.nbytes(chunk.numel))
        return padded(4 * chunk.numel) * (1 + self._streams) + moments

    def _now(self) -> dict[int, int]:
        """Return the version of each parameter, which rises when it is written."""
        return {
            r.index: version_of(r.parameter) for c in self.chunks for r in c.ranges if not c.values
        }

    # ------------------------------------------------------------ checkpoints

    def _places_of_parts(self) -> list[str]:
        return [
            f"{c.number}.{r.group}:{r.name}@{r.start}+{r.numel}"
            for c in self.chunks
            for r in c.ranges
        ]

    def _begin(self) -> None:
        for chunk in self.chunks:
            if chunk.master != chunk.values:
                self.store.put(chunk.master, self._first(chunk))
            self._settle(chunk)
            if chunk.passes:
                self.store.evict(chunk.names()).wait()
        self._versions = self._now()

    def _first(self, chunk: UpdateChunk) -> torch.Tensor:
        flat = self._gradients.buffer(chunk)
        if chunk.values:
            with self.store.borrow(chunk.values, write=False) as values:
                return flat.copy_(values)
        for own in chunk.ranges:
            own.inside(flat).copy_(own.of(own.parameter))
            self._count(chunk, own, down=True)
        return flat

    def _resume(self) -> None:
        numbers = self._committed()
        for chunk in self.chunks:
            self._restore(chunk, numbers)
            if not chunk.values:
                with self.store.borrow(chunk.master, on=chunk.on, write=False) as weight:
                    self._publish(chunk, weight)
            self._settle(chunk)
        self._versions = self._now()

    def _loaded(self, found: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        for parameter, index in self._index.items():
            if MASTER not in found[parameter]:
                self._versions.pop(index, None)

    def report(self) -> str:
        """Return a table of the sizes in each tier and the time of steps:
        ``print(optimizer.report())``."""
        self.finish()
        rows: dict[str, dict[str, int]] = {}
        for chunk in self.chunks:
            names = {"master weights": chunk.name(WEIGHT) if chunk.master != chunk.values else ""}
            names |= {"streamed parameters": chunk.values, "gradients": chunk.name(GRADIENT)}
            names |= {key: chunk.name(key) for key in chunk.keys}
            for kind, name in names.items():
                if name and name in self.store:
                    info = self.store.info(name)
                    row = rows.setdefault(kind, dict.fromkeys(TIERS, 0))
                    row[info.tier] += info.nbytes
        lines = [f"{'':20}" + "".join(f"{tier:>12}" for tier in TIERS)]
        lines += [
            f"{kind:20}" + "".join(f"{show_bytes(row[tier]):>12}" for tier in TIERS)
            for kind, row in rows.items()
        ]
        total = [sum(row[tier] for row in rows.values()) for tier in TIERS]
        lines.append(f"{'together':20}" + "".join(f"{show_bytes(one):>12}" for one in total))
        if self.meter.steps:
            each = self.meter.seconds / self.meter.steps
            rate = self.meter.written / max(self.meter.seconds, 1e-9) / 1e9
            lines.append(
                f"update {each:.3f} s, of which {self.meter.stalled / self.meter.steps:.3f} s "
                f"waiting for reads; {show_bytes(self.meter.written // self.meter.steps)} written, "
                f"{rate:.2f} GB/s"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Remove the hooks from the parameters. The store, which belongs to the caller, stays
        open."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        if self._running is not None:
            self._running.join()
        if self._early is not None:
            self._early.close()
        if self._beside is not None:
            self.finish()
            self._beside.shutdown()


def _channels_of(parameters: Iterable[Any], *, clipped: bool) -> list[Channel]:
    """Return channels among the ranks over which ``parameters`` are already sharded, as by FSDP2;
    collective. With clipping all must be sharded in the same way."""
    found = dict.fromkeys((p.device_mesh, p.placements) if is_cut(p) else None for p in parameters)
    if clipped and len(found) > 1:
        raise InvalidArgument(
            "max_grad_norm is given, but parameters are sharded over ranks in different ways: "
            "leave it out and clip with torch.nn.utils.clip_grad_norm_"
        )
    return [
        Channel.among(mesh.get_group(number))
        for mesh, placements in filter(None, found)
        for number, placement in enumerate(placements)
        # FSDP2 under tensor parallelism uses _StridedShard, for which is_shard() is False
        if not placement.is_replicate()
    ]


def _streamer(parameters: list[torch.Tensor], store: TieredStore) -> Streamed | None:
    """Return the ``Streamed`` of the parameters, None if they are not streamed."""
    found: set[Streamed] = {
        streamer for p in parameters if (streamer := streamer_of(p)) is not None
    }
    if other := [streamer for streamer in found if not isinstance(streamer, Streamed)]:
        raise InvalidArgument(
            f"params are in a {type(other[0]).__name__}: use its own optimizer, "
            "commpress.moe.ExpertOptimizer, for the model"
        )
    if len(found) > 1:
        raise InvalidArgument(
            "params belong to several streamed models: make one Offloaded for each"
        )
    if any(streamer.store is not store for streamer in found):
        raise InvalidArgument(
            "the parameters are streamed from another store: pass that store as store="
        )
    return found.pop() if found else None
