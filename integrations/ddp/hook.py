"""DistributedDataParallel: the hook, its state, and the one-line form ``compress``.

Stop 1 of a gradient bucket: autograd fills it and calls the hook, which hands the steps to the state's worker and gives
DDP a future. Backward goes on meanwhile.
"""

import logging
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.codecs import Codec, Policy, policy_of
from commpress.codecs.planned import PLAIN, Planned, load_plan
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket, settle
from commpress.collectives.checkpoint import check_fit, elastic_of, elastic_state, exact_state, residuals_of
from commpress.collectives.consensus import AgreeOver, consensus_over
from commpress.collectives.ef21 import check_codec, reduce_changes
from commpress.collectives.levels import levels_of
from commpress.collectives.links import Links
from commpress.collectives.low_rank import Bases, Plan, load_bases, reduce_matrices
from commpress.collectives.sketch import Quanta, load_quanta, reduce_sketch
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Recorded, Timed
from commpress.collectives.transports.transport import own_transport
from commpress.collectives.two_level import reduce_routes
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import ResidualStore, check_feedback
from commpress.integrations.ddp.backward import Backward
from commpress.integrations.ddp.layouts import Layout, Layouts
from commpress.integrations.ddp.plain import Plain, values_of
from commpress.integrations.ddp.replanning import Replanning
from commpress.integrations.ddp.trial import Trial, trial_of
from commpress.integrations.ddp.unhooked import unhook_after
from commpress.integrations.observe.counters import Counters, relative_errors
from commpress.work import Steps, Work, Worker, overlapped, run

log = logging.getLogger("commpress")

DEFAULT_MIN_NUMEL = 256
BUCKET = (25 << 20) // 4  # elements of a bucket of DDP, for choices that need a size beforehand
UNORDERED_LIMIT = 4  # buckets under way at once where messages are matched by tag


def compress(
    ddp: DistributedDataParallel,
    codec: str | Codec | Policy = "sign",
    *,
    policy: str | Path | Planned | None = None,
    min_numel: int = DEFAULT_MIN_NUMEL,
    exclude: tuple[str, ...] = (),
    **options: Any,
) -> "CompressedState":
    """Compress the gradients of ``ddp`` from its next backward on; returns the state, which holds residuals and counters.

    ``codec="auto"`` tries no compression and several codecs for a few steps each and keeps the fastest. ``policy``: a file
    that ``commpress plan`` wrote, in place of a codec. Where that is no compression, DDP goes on without a hook, as if this
    had never been called, and counters stand still.

    Tensors of fewer than ``min_numel`` elements, and those whose name matches a regular expression in ``exclude``, travel
    exactly. ``options`` are those of ``CompressedState``.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidArgument(
            f"ddp is a {type(ddp).__name__}, expected a DistributedDataParallel: wrap the model first, "
            "as in DistributedDataParallel(model)"
        )
    if policy is not None:
        codec = policy if isinstance(policy, Planned) else load_plan(policy)
        if codec.topology is not None:
            options.setdefault("topology", codec.topology)
    state = CompressedState(
        codec,
        min_numel=min_numel,
        exclude=exclude,
        named_parameters=ddp.module.named_parameters(),
        process_group=ddp.process_group,
        **options,
    )
    if state.compresses or not state.settled:
        ddp.register_comm_hook(state, compressed_allreduce_hook)
    if not state.settled:
        unhook_after(ddp, state)
    return state


def compressed_allreduce_hook(state: "CompressedState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` over the ranks of ``state``, compressed; the future holds the bucket's own buffer."""
    if not isinstance(state, CompressedState):
        raise InvalidArgument(
            f"state is a {type(state).__name__}, expected a CompressedState: "
            "ddp.register_comm_hook(commpress.CompressedState(codec='sign'), commpress.compressed_allreduce_hook)"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise InvalidArgument(
            f"bucket is a {type(bucket).__name__}: DDP's Python reducer (torch._dynamo.config.optimize_ddp) has no "
            "buckets, which compression needs; leave it at its default"
        )
    return state.reduce(bucket)


class CompressedState:
    """What the hook needs between calls: residuals, counters, one worker and a process group of its own.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other groups: it makes a new one.
    Gradients that no codec knows (float64, complex, sparse) are averaged by torch's own all-reduce; ``counters`` say how many.

    - ``codec``, ``min_numel``, ``exclude``: what travels how; see ``compress``.
    - ``named_parameters``: gives residuals their names in checkpoints, and ``exclude`` something to match. Without it,
      parameters are numbered in the order in which DDP first brings them.
    - ``error_feedback``: True keeps what compression leaves out and sends it later; "ef21" sends changes of the gradient
      instead (``collectives.ef21``); False forgets, which does not converge.
    - ``on_nonfinite``: "skip" (default) replaces the gradients of that bucket by zeros on all ranks, warns and counts;
      "raise" raises NonFiniteGradient on all ranks. Residuals stay untouched either way.
    - ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal, where these are more than the ranks of
      ``process_group``: with tensor parallelism the whole mesh. What is not finite on one of them then makes all buckets of
      that step zeros on all of them, or raises on all. Not the stages of a pipeline, whose backwards wait for each other.
    - ``grad_scaler``: pass AMP's GradScaler. Residuals are then kept in unscaled units, a bad gradient reaches the scaler
      as infinity so that it skips the step, and residuals of all buckets of a skipped step stay as they were. Costs
      4 bytes per parameter.
    - ``exact_steps``: so many first steps travel exactly (a warm-up for optimizers that estimate variances).
    - ``measure_every``: steps between measurements of the compression error; 0 never. Not with a topology.
    - ``replan_every``: steps between two choices of a codec for every layer, each from the gradients of that step: the fewest
      bytes at the error that ``codec`` for all would make; 0 never. See ``docs/planning.md``.
    - ``topology``: which ranks share a node, as a ``Topology``, in words ("2x4") or "auto" (what the launcher says). Sums
      inside a node are then exact and only what crosses between nodes is compressed; see ``docs/hierarchy.md``. The
      ``Links`` that ``commpress probe`` measured decide whether that is faster than one level.
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "sign",
        *,
        min_numel: int = DEFAULT_MIN_NUMEL,
        exclude: tuple[str, ...] = (),
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool | Literal["ef21"] = True,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        agree_over: AgreeOver | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        exact_steps: int = 0,
        measure_every: int = 100,
        timeout: timedelta | None = None,
        checksum: bool = False,
        seed: int = 0,
        replan_every: int = 0,
        topology: Topology | str | Links | None = None,
    ) -> None:
        self._saved: dict[str, Any] | None = None
        self._options: dict[str, Any] = {
            "codec": codec, "min_numel": min_numel, "exclude": exclude, "error_feedback": error_feedback,
            "on_nonfinite": on_nonfinite, "exact_steps": exact_steps, "measure_every": measure_every, "timeout": timeout,
            "checksum": checksum, "seed": seed, "replan_every": replan_every, "topology": topology,
        }  # fmt: skip
        self._given = {"agree_over": agree_over is not None, "grad_scaler": grad_scaler is not None}
        if on_nonfinite not in ("skip", "raise"):
            raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")
        check_feedback(error_feedback, ef21=True)
        if exclude and named_parameters is None:
            raise InvalidArgument(
                "exclude matches parameter names, but named_parameters is missing: pass model.named_parameters() or use "
                "commpress.compress(ddp, exclude=...)"
            )
        if not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group before CompressedState"
            )
        if isinstance(codec, str) and codec == PLAIN and agree_over is None:
            codec = Planned(PLAIN)
        self._trial: Trial | None = trial_of(codec)
        ef21 = error_feedback == "ef21"
        if ef21 and (self._trial is not None or topology is not None or replan_every):
            raise InvalidArgument("error_feedback='ef21' needs a codec that stays, and no topology: leave the other out")
        if agree_over is not None and (self._trial is not None or (isinstance(codec, Planned) and not codec.compresses)):
            raise InvalidArgument(
                f"agree_over is given, but codec is {getattr(codec, 'codec', codec)!r}, which leaves steps "
                "to torch's own all-reduce: name a codec, such as 'int8', or leave agree_over out"
            )
        self._limits: dict[str, Any] = {"min_numel": min_numel, "exclude": exclude}
        self.policy = policy_of("none" if self._trial else codec, **self._limits)
        if ef21:
            check_codec(self.policy.choose("", BUCKET))
        self.compresses = not isinstance(codec, Planned) or codec.compresses  # else torch's all-reduce carries everything
        self.on_nonfinite = on_nonfinite
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self.exact_steps, self.measure_every, self.seed = exact_steps, measure_every, seed
        self.step = 0
        self.counters = Counters(choice=f"the plan's: {codec.why or codec.codec}" if isinstance(codec, Planned) else "")
        self.residuals = ResidualStore(ef21=ef21)
        self.bases: Bases = {}  # of low-rank codecs
        self.quanta: Quanta = {}  # of sketches
        parameters = dict(named_parameters or ())
        numels = {name: p.numel() for name, p in parameters.items()}
        for pattern in exclude:
            if not any(re.search(pattern, name) for name in parameters):
                log.warning("exclude=%r matches no parameter: nothing is left out because of it", pattern)
        self._current: Backward | None = None
        self._sequence = 0
        self._said = False
        self._workspace = Workspace(checksum=checksum)
        transport = own_transport(process_group, timeout=timeout)
        self._timed = Timed(transport)
        self.transport = Recorded(self._timed)
        self.process_group = process_group
        self.consensus = consensus_over(agree_over, process_group, timeout=timeout)
        self.levels = None
        if topology is not None:
            usual = min(sum(numels.values()) or BUCKET, BUCKET)
            usually = policy_of(self._trial.ways[-1], **self._limits) if self._trial else self.policy
            self.levels = levels_of(topology, transport, usual, usually.choose("", usual))
        self._layouts = Layouts(
            self.policy, self.residuals, self._workspace, transport.size, self.bases, self.quanta, self.levels,
            feedback=bool(error_feedback), seed=seed, names={id(p): name for name, p in parameters.items()}, numels=numels,
        )  # fmt: skip
        group: Any = getattr(transport, "group", process_group or dist.group.WORLD)  # the own one, or the user's (MPI, sockets)
        self._plain = Plain(group, self.counters, self._layouts)
        self._replanning = Replanning(replan_every, codec, self.policy, transport.size) if replan_every else None  # type: ignore[arg-type]
        self._worker: Worker | None = None
        if self.transport.size == 1:
            log.warning("world size is 1: there is nothing to reduce, gradients pass through as they are")

    @property
    def settled(self) -> bool:
        """No trial is under way, and what it left behind has been sent."""
        return self._trial is None and not self._plain.owing

    # ------------------------------------------------------------ one bucket

    @torch.compiler.disable  # sockets and threads are nothing to trace
    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._saved is not None:
            self.reconnect()
        buffer = bucket.buffer()
        if self.transport.size == 1 and self.consensus is None:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        if self._current is None:
            if self._trial is not None and self.step >= self.exact_steps:
                self._turn(self._trial, buffer.device)
            if self._replanning is not None and self._replanning.measured:
                self._use(self._replanning.decide(self._plain.group, buffer.device, self.step - 1))
                self.counters.choice = self._replanning.why
            self._current = Backward(self.step)
        step = self._current
        step.open += 1
        if bucket.is_last():
            step.closed, self._current = True, None
            self.step += 1
        if not self.compresses:
            step.open -= 1
            return self._plain.reduce(bucket, last=step.closed)
        steps, waits = self._begin(bucket, buffer, step)
        if self._worker is None:
            limit = 1 if self.transport.ordered or self.levels is not None else UNORDERED_LIMIT
            self._worker = Worker("commpress", limit=limit, device=buffer.device)
        promised = step.promise(buffer) if self.consensus is not None else None  # before the worker could keep it
        future = self._worker.submit(steps, waits=waits)
        step.futures.append(future)
        if step.closed:
            step.raise_errors()
        return promised or future

    def _begin(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, step: Backward
    ) -> tuple[Steps[torch.Tensor], int | None]:
        """The steps of one bucket, and how often they wait, where that is known."""
        if self.transport.size == 1 or not self._plain.compressible(bucket):
            return self._averaged(buffer, self._plain.average(buffer), step), 1 if self.consensus is None else None
        layout = self._layouts.of(bucket, buffer, exact=step.number < self.exact_steps)
        if self._replanning is not None and self._replanning.due(step.number - self.exact_steps):
            self._replanning.measure(layout.spans, buffer)
        sequence, self._sequence = self._sequence, self._sequence + layout.sequences
        known = not layout.plans and layout.levels is None and self.consensus is None
        return self._bucket(buffer, layout, step, sequence), 2 * len(layout.rows) if known else None

    def _turn(self, trial: Trial, device: torch.device) -> None:
        """The next step of the trial begins, or the first after it: nothing is under way between two steps."""
        way = trial.begin(perf_counter())
        if way is None:
            way, self.counters.choice = trial.agreed(self._plain.group, device)
            self._trial, self._plain.owing = None, way == PLAIN
            log.info("codec='auto' goes on with %s", self.counters.choice)
        self.compresses = way != PLAIN
        if self.compresses:
            self._use(policy_of(way, **self._limits))

    def _use(self, policy: Policy) -> None:
        self.policy = policy
        self._layouts.use(policy)

    def _bucket(self, bucket: torch.Tensor, layout: Layout, step: Backward, sequence: int) -> Steps[torch.Tensor]:
        buffer = bucket
        if bucket.dtype != torch.float32:
            if layout.scratch is None:
                layout.scratch = torch.empty(bucket.numel(), dtype=torch.float32, device=bucket.device)
            buffer = layout.scratch.copy_(bucket)
        gain = 1.0 / self.grad_scaler.get_scale() if self.grad_scaler else 1.0
        measure = self.measure_every and step.number % self.measure_every == 0 and layout.levels is None
        before = layout.compensated(buffer, gain, owed=not self.residuals.ef21) if measure else None
        outcomes = yield from self._exchange(buffer, layout, sequence, step.number, gain)
        finite = all(outcome.finite for outcome in outcomes)
        if finite and bucket is not buffer:
            bucket.copy_(buffer)
            if bucket.dtype == torch.float16:  # a mean that does not fit overflows on every rank alike
                finite = bool(torch.isfinite(bucket).all())
        if before is not None and finite:
            self.counters.errors.update(relative_errors(before, layout.spans, outcomes))
        self.counters.bucket(bucket.numel(), layout.messages, self.transport.size)
        yield from self._finish(step, bucket, finite, outcomes)
        return bucket

    def _averaged(self, bucket: torch.Tensor, work: Work, step: Backward) -> Steps[torch.Tensor]:
        """A bucket that torch's own all-reduce carries."""
        yield work
        yield from self._finish(step, bucket, bool(torch.isfinite(values_of(bucket)).all()), [])
        return bucket

    def _exchange(
        self, buffer: torch.Tensor, layout: Layout, sequence: int, step: int, gain: float
    ) -> Steps[list[Outcome]]:
        options: dict[str, Any] = {
            "workspace": self._workspace, "key": self.seed * 1_000_003 + step, "gain": gain, "sequence": sequence
        }  # fmt: skip
        if self.levels is not None and layout.levels is not None:
            routes, hierarchy = layout.levels.routes, self.levels.hierarchy
            return (
                yield from reduce_routes(buffer, layout.levels.feedbacks, plan=routes, hierarchy=hierarchy, **options)
            )
        options["transport"] = self.transport
        feedbacks, count = layout.feedbacks, len(layout.rows)
        options["reduce"] = reduce_changes if self.residuals.ef21 else None
        rows = reduce_bucket(buffer, feedbacks[:count], messages=layout.rows, **options)
        if not layout.plans:
            return (yield from rows)
        del options["reduce"]
        options["sequence"] += count
        jobs: list[Steps[Any]] = []
        for plan, feedback in zip(layout.plans, feedbacks[count:], strict=True):
            reduce: Any = reduce_matrices if isinstance(plan, Plan) else reduce_sketch
            jobs.append(reduce(buffer, feedback, plan=plan, **options))
            options["sequence"] += plan.MESSAGES
        jobs.append(rows)
        *others, first = yield from overlapped(jobs, limit=2)
        return [*first, *others]

    def _finish(self, step: Backward, bucket: torch.Tensor, finite: bool, outcomes: list[Outcome]) -> Steps[None]:
        """Commit or discard residuals: per bucket, or for all of the step together under a GradScaler or a consensus."""
        step.open -= 1
        step.finite &= finite
        ends = step.closed and step.open == 0
        step.held += outcomes
        step.buckets.append(bucket)
        if self.consensus is not None:
            if not ends:
                return
            finite = step.finite = yield from self.consensus.agreed(step.finite, bucket.device)
        if not finite:
            for each in step.buckets:
                values_of(each).fill_(float("inf") if self.grad_scaler else 0.0)
            self._bad_gradient(step, len(step.buckets))
        step.buckets.clear()
        if ends or not self.grad_scaler:
            settle(step.held, taken=step.finite if self.grad_scaler else finite)
            step.held.clear()
        step.keep_promises()
        if ends:
            inside, between, waited = (0, 0, 0.0) if self.levels is None else self.levels.traffic()
            sent_bytes = self._plain.sent_bytes + self.transport.sent_bytes + inside + between
            seconds = self._timed.seconds + waited
            self.counters.step(step.finite, sent_bytes, between, seconds, self._workspace)
            if not self._said and step.number >= self.exact_steps:
                self._said = True
                self.counters.say(log)

    def _bad_gradient(self, step: Backward, buckets: int) -> None:
        before, self.counters.skipped_buckets = self.counters.skipped_buckets, self.counters.skipped_buckets + buckets
        count = self.counters.skipped_buckets
        if self.on_nonfinite == "raise":
            step.error = NonFiniteGradient(
                f"the gradients of step {step.number} hold NaN or infinity on some rank. No residual was changed. Look for "
                "the cause in the loss, or pass on_nonfinite='skip'."
            )
        elif before < 3 or count // 100 > before // 100:
            effect = "passed on as infinity to the GradScaler" if self.grad_scaler else "replaced by zeros on all ranks"
            log.warning(
                "step %d: a bucket held NaN or infinity on some rank and was %s (%d so far). With AMP pass "
                "grad_scaler= so that the loss scale adapts.", step.number, effect, count,
            )  # fmt: skip

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume at the same world size: every rank saves and loads its own."""
        if self._saved is not None:
            return dict(self._saved["state"])
        state = exact_state(self.residuals, self.transport, self.step, str(self.levels or ""))
        return state | self._saved_choices()

    def elastic_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the total residual R, for a resume at any world size; collective, between steps."""
        if self._saved is not None:
            self.reconnect()
        sequence = self._next_sequence()
        if self.levels is None:
            state = run(elastic_state(self.residuals, self.transport, self.step, sequence))
        else:
            parts = self.levels.parts(self.residuals, self._layouts.compressed())
            state = run(elastic_of(parts, self.transport, self.step, sequence))
        return state | self._saved_choices()

    def __getstate__(self) -> dict[str, Any]:
        """For ``torch.save``, as torch documents it for hooks with a state: all but groups, scaler, threads and connections."""
        if self._saved is not None:
            return self._saved
        if any(self._given.values()) or self.process_group is not None:
            log.warning("process_group, agree_over and grad_scaler are not saved with a state: give them to reconnect()")
        numels = self._layouts.numels
        return {
            "options": self._options, "given": self._given, "state": self.state_dict(), "counters": self.counters,
            "numels": numels, "brought": list(self._layouts.brought) if numels else None,
        }  # fmt: skip

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Without a word to other ranks: that is left to ``reconnect``."""
        self._saved, self.counters, self.step = saved, saved["counters"], saved["state"]["step"]

    def reconnect(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        agree_over: AgreeOver | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    ) -> None:
        """Make a state that ``torch.load`` or a copy gave work for the ranks of ``process_group``; collective over these.

        The first backward calls it, where no argument is needed. Without ``named_parameters`` DDP is taken to bring parameters
        in the order in which it brought them in the first backward of the run that was saved.
        """
        saved = self._saved
        if saved is None:
            raise InvalidArgument("this state is connected: reconnect is for one that comes from torch.load or a copy")
        given = {"agree_over": agree_over, "grad_scaler": grad_scaler}
        for name, value in given.items():
            if saved["given"][name] and value is None:
                raise InvalidArgument(
                    f"the state was saved by a run with {name}=, which cannot be saved: call state.reconnect({name}=...) on "
                    "every rank before the first backward"
                )
        parameters = dict(named_parameters or ())
        stand_ins = {name: torch.nn.Parameter(torch.empty(numel, device="meta")) for name, numel in saved["numels"].items()}
        if stand_ins and not parameters and not saved["brought"]:
            raise InvalidArgument(
                "the state was saved before its first backward, when nobody knew which parameter comes when: pass "
                "named_parameters=ddp.module.named_parameters() to reconnect()"
            )
        self.__init__(  # type: ignore[misc]
            **saved["options"], **given, process_group=process_group, named_parameters=(parameters or stand_ins).items()
        )
        if not parameters:
            self._layouts.names, self._layouts.expected = {}, list(saved["brought"] or ())
        self.counters = self._plain.counters = saved["counters"]
        self.load_state_dict(saved["state"])

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """From this rank's ``state_dict``, or at any world size from all ranks' states, of either kind, in any order."""
        levels = self.levels
        if levels is None:
            step, residuals = residuals_of(states, self.transport, ef21=self.residuals.ef21)
        else:
            step, residuals = residuals_of(states, self.transport, share=levels.share, nodes=str(levels))
        if numels := self._layouts.numels:
            check_fit(residuals, numels, levels.lengths(numels) if levels else None)
        load_bases(self.bases, states[0].get("bases", {}))
        load_quanta(self.quanta, states[0].get("quanta", {}))
        self.residuals.load(residuals)
        self.step = step
        if self._replanning is not None:
            self._use(self._replanning.load(states[0].get("rules", {})))

    def _saved_choices(self) -> dict[str, Any]:
        rules = {"rules": dict(self._replanning.rules)} if self._replanning is not None else {}
        bases = {name: basis.clone() for name, basis in self.bases.items()}
        return {"bases": bases, "quanta": dict(self.quanta), **rules}

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1
