"""DistributedDataParallel: the hook, its state, and the one-line form ``compress``.

Stop 1 of a gradient bucket: autograd fills it and calls the hook, which hands the steps to the state's worker and gives
DDP a future. Backward goes on meanwhile.
"""

import logging
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.loopback import Recorded, Timed
from commpress.collectives.transport import TorchTransport
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.integrations.checkpoint import check_fit, elastic_state, exact_state, residuals_of
from commpress.integrations.counters import Counters, relative_errors
from commpress.work import Steps, Worker

log = logging.getLogger("commpress")

DEFAULT_MIN_NUMEL = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNORDERED_LIMIT = 4  # buckets under way at once where messages are matched by tag


def compress(
    ddp: DistributedDataParallel,
    codec: str | Codec | Policy = "sign",
    *,
    min_numel: int = DEFAULT_MIN_NUMEL,
    exclude: tuple[str, ...] = (),
    **options: Any,
) -> "CompressedState":
    """Compress the gradients of ``ddp`` from its next backward on; returns the state, which holds residuals and counters.

    Tensors of fewer than ``min_numel`` elements, and those whose name matches a regular expression in ``exclude``, travel
    exactly. ``options`` are those of ``CompressedState``.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidArgument(
            f"ddp is a {type(ddp).__name__}, expected a DistributedDataParallel: wrap the model first, "
            "as in DistributedDataParallel(model)"
        )
    state = CompressedState(
        codec,
        min_numel=min_numel,
        exclude=exclude,
        named_parameters=ddp.module.named_parameters(),
        process_group=ddp.process_group,
        **options,
    )
    ddp.register_comm_hook(state, compressed_allreduce_hook)
    return state


def compressed_allreduce_hook(
    state: "CompressedState", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` over the ranks of ``state``, compressed; the future holds the bucket's own buffer."""
    if not isinstance(state, CompressedState):
        raise InvalidArgument(
            f"state is a {type(state).__name__}, expected a CompressedState: "
            "ddp.register_comm_hook(commpress.CompressedState(codec='sign'), commpress.compressed_allreduce_hook)"
        )
    return state.reduce(bucket)


class _Step:
    """One backward: which buckets are still under way and what they proposed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.open, self.closed, self.finite = 0, False, True
        self.held: list[Outcome] = []
        self.futures: list[torch.futures.Future[torch.Tensor]] = []
        self.error: NonFiniteGradient | None = None

    def raise_errors(self) -> None:
        """At the end of this backward, as what they are. Called once, inside the hook of the last bucket.

        Note: who raises. DDP makes "RuntimeError: Unable to cast" of an exception in a future, so autograd is asked to call
        back before DDP looks at the futures. Where no node of the graph is being evaluated (the first step of a static
        graph, a rank that has joined) it is too late for that: wait here. NonFiniteGradient comes after DDP has finished, so
        that training may go on after it.
        """
        if torch._C._current_autograd_node() is None:
            self._wait()
        else:
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        for future in self.futures:
            future.wait()
        if self.error is None:
            return
        if torch._C._current_graph_task_id() < 0:
            raise self.error
        Variable._execution_engine.queue_callback(self._raise)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class _Layout:
    """How one bucket, known by its parameters, is cut into messages."""

    def __init__(self, plan: list[Message], feedbacks: list[ErrorFeedback | None], spans: list[Span]) -> None:
        self.messages, self.feedbacks, self.spans = plan, feedbacks, spans
        self.scratch: torch.Tensor | None = None  # float32 copy of a bucket of another dtype


class CompressedState:
    """What the hook needs between calls: residuals, counters, one worker and a process group of its own.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other groups: it makes a new one.

    - ``codec``, ``min_numel``, ``exclude``: what travels how; see ``compress``.
    - ``named_parameters``: gives residuals their names in checkpoints, and ``exclude`` something to match. Without it,
      parameters are numbered in the order in which DDP first brings them.
    - ``on_nonfinite``: "skip" (default) replaces the gradients of that bucket by zeros on all ranks, warns and counts;
      "raise" raises NonFiniteGradient on all ranks. Residuals stay untouched either way.
    - ``grad_scaler``: pass AMP's GradScaler. Residuals are then kept in unscaled units, a bad gradient reaches the scaler
      as infinity so that it skips the step, and residuals of all buckets of a skipped step stay as they were. Costs
      4 bytes per parameter.
    - ``exact_steps``: so many first steps travel exactly (a warm-up for optimizers that estimate variances).
    - ``measure_every``: steps between measurements of the compression error; 0 never.
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "sign",
        *,
        min_numel: int = DEFAULT_MIN_NUMEL,
        exclude: tuple[str, ...] = (),
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        grad_scaler: torch.amp.GradScaler | None = None,
        exact_steps: int = 0,
        measure_every: int = 100,
        timeout: timedelta = default_pg_timeout,
        checksum: bool = False,
        seed: int = 0,
    ) -> None:
        if on_nonfinite not in ("skip", "raise"):
            raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")
        if exclude and named_parameters is None:
            raise InvalidArgument(
                "exclude matches parameter names, but named_parameters is missing: pass model.named_parameters() or use "
                "commpress.compress(ddp, exclude=...)"
            )
        if not dist.is_initialized():
            raise InvalidArgument("torch.distributed is not initialised: call init_process_group before CompressedState")
        self.policy = policy_of(codec, min_numel=min_numel, exclude=exclude)
        self.exact = policy_of("none")
        self.error_feedback, self.on_nonfinite = error_feedback, on_nonfinite
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self.exact_steps, self.measure_every, self.seed = exact_steps, measure_every, seed
        self.step = 0
        self.counters = Counters()
        self.residuals = ResidualStore()
        parameters = dict(named_parameters or ())
        self._names = {id(p): name for name, p in parameters.items()}
        self._numels = {name: p.numel() for name, p in parameters.items()}
        for pattern in exclude:
            if not any(re.search(pattern, name) for name in parameters):
                log.warning("exclude=%r matches no parameter: nothing is left out because of it", pattern)
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._current: _Step | None = None
        self._sequence = 0
        self._said = False
        self._workspace = Workspace(checksum=checksum)
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        backend = dist.get_backend(process_group)
        group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        self._timed = Timed(TorchTransport(group, timeout=timeout))
        self.transport = Recorded(self._timed)
        self._worker: Worker | None = None
        if self.transport.size == 1:
            log.warning("world size is 1: there is nothing to reduce, gradients pass through as they are")

    # ------------------------------------------------------------ one bucket

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise InvalidArgument("a bucket holds sparse gradients, which are not compressed: build it with sparse=False")
        if buffer.dtype not in DTYPES:
            raise InvalidArgument(
                f"a bucket holds {buffer.dtype} gradients, expected float32, bfloat16 or float16: convert the model with "
                ".float(), or leave these parameters to DistributedDataParallel without this hook"
            )
        if self.transport.size == 1:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        if self._current is None:
            self._current = _Step(self.step)
        step = self._current
        step.open += 1
        if bucket.is_last():
            step.closed, self._current = True, None
            self.step += 1
        layout = self._layout(bucket, buffer, exact=step.number < self.exact_steps)
        sequence, self._sequence = self._sequence, self._sequence + len(layout.messages)
        steps = self._bucket(buffer, layout, step, sequence)
        if self._worker is None:
            limit = 1 if self.transport.ordered else UNORDERED_LIMIT
            self._worker = Worker("commpress", limit=limit, device=buffer.device)
        future = self._worker.submit(steps)
        step.futures.append(future)
        if step.closed:
            step.raise_errors()
        return future

    def _bucket(self, bucket: torch.Tensor, layout: _Layout, step: _Step, sequence: int) -> Steps[torch.Tensor]:
        buffer = bucket
        if bucket.dtype != torch.float32:
            if layout.scratch is None:
                layout.scratch = torch.empty(bucket.numel(), dtype=torch.float32, device=bucket.device)
            buffer = layout.scratch.copy_(bucket)
        gain = 1.0 / self.grad_scaler.get_scale() if self.grad_scaler else 1.0
        measure = self.measure_every and step.number % self.measure_every == 0
        before = self._compensated(buffer, layout, gain) if measure else None
        outcomes = yield from reduce_bucket(
            buffer, layout.feedbacks, messages=layout.messages, transport=self.transport,
            workspace=self._workspace, sequence=sequence, key=self.seed * 1_000_003 + step.number, gain=gain,
        )  # fmt: skip
        finite = all(outcome.finite for outcome in outcomes)
        if finite and bucket is not buffer:
            bucket.copy_(buffer)
            if bucket.dtype == torch.float16:  # a mean that does not fit overflows on every rank alike
                finite = bool(torch.isfinite(bucket).all())
        if before is not None and finite:
            self.counters.errors.update(relative_errors(before, layout.spans, outcomes))
        self.counters.bucket(bucket.numel(), layout.messages, self.transport.size)
        self._finish(step, bucket, finite, outcomes)
        return bucket

    def _compensated(self, buffer: torch.Tensor, layout: _Layout, gain: float) -> torch.Tensor:
        """c = g·x + e of the whole bucket: what the encoder is about to see. Measuring only."""
        c = buffer * gain
        for message, feedback in zip(layout.messages, layout.feedbacks, strict=True):
            if feedback is not None:
                feedback.settle(message.pieces)
                for start, numel, kept in message.pieces.kept_runs():
                    c[start : start + numel] += feedback.sent[kept : kept + numel]
        return c

    def _finish(self, step: _Step, bucket: torch.Tensor, finite: bool, outcomes: list[Outcome]) -> None:
        """Commit or discard residuals: per bucket, or for all buckets of the step together under a GradScaler."""
        step.open -= 1
        step.finite &= finite
        if not finite:
            bucket.fill_(float("inf") if self.grad_scaler else 0.0)
            self._bad_gradient(step)
        if self.grad_scaler:
            step.held += outcomes
            if step.closed and step.open == 0:
                _settle_outcomes(step.held, step.finite)
        else:
            _settle_outcomes(outcomes, finite)
        if step.closed and step.open == 0:
            self.counters.step(step.finite, self.transport.sent_bytes, self._timed.seconds, self._workspace)
            if not self._said and step.number >= self.exact_steps:
                self._say_what_happened()

    def _bad_gradient(self, step: _Step) -> None:
        self.counters.skipped_buckets += 1
        count = self.counters.skipped_buckets
        if self.on_nonfinite == "raise":
            step.error = NonFiniteGradient(
                f"the gradients of step {step.number} hold NaN or infinity on some rank. No residual was changed. Look for "
                "the cause in the loss, or pass on_nonfinite='skip'."
            )
        elif count <= 3 or count % 100 == 0:
            effect = "passed on as infinity to the GradScaler" if self.grad_scaler else "replaced by zeros on all ranks"
            log.warning(
                "step %d: a bucket held NaN or infinity on some rank and was %s (%d so far). With AMP pass "
                "grad_scaler= so that the loss scale adapts.", step.number, effect, count,
            )  # fmt: skip

    def _say_what_happened(self) -> None:
        self._said = True
        if self.counters.compressed_elements == 0:
            log.warning("NOTHING WAS COMPRESSED: every tensor travelled exactly (codec, min_numel or exclude leave none).")
        else:
            log.info("up to the first compressed step: %s", self.counters.summary())

    # ------------------------------------------------------------ layouts

    def _layout(self, bucket: dist.GradBucket, buffer: torch.Tensor, *, exact: bool) -> _Layout:
        parameters = bucket.parameters()
        key = (exact, *map(id, parameters))
        if key not in self._layouts:
            spans, at = [], 0
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                name = self._names.setdefault(id(parameter), f"#{len(self._names):05d}")
                spans.append(Span(name, at, gradient.numel()))
                at += gradient.numel()
            if at != buffer.numel():
                raise InvalidArgument(f"a bucket of {buffer.numel()} elements has gradients of {at}: unknown layout")
            self._forget(exact, parameters)
            policy = self.exact if exact else self.policy
            plan = messages(spans, policy, self.transport.size, feedback=self.error_feedback)
            feedbacks = [self.residuals.attach(m.keys, m.pieces, buffer.device) for m in plan]
            self._layouts[key] = _Layout(plan, feedbacks, spans)
        return self._layouts[key]

    def _forget(self, exact: bool, parameters: list[torch.Tensor]) -> None:
        """Drop layouts whose parameters come in other buckets from now on: their residuals move away."""
        now = set(map(id, parameters))
        for key in [key for key in self._layouts if key[0] == exact and not now.isdisjoint(key[1:])]:
            for message in self._layouts.pop(key).messages:
                self._workspace.forget(message)

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume at the same world size: every rank saves and loads its own."""
        return exact_state(self.residuals, self.transport, self.step)

    def elastic_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the total residual R, for a resume at any world size; collective, between steps."""
        return elastic_state(self.residuals, self.transport, self.step, self._next_sequence())

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """From this rank's ``state_dict``, or from all ranks' ``elastic_state_dict``s in any order, at any time."""
        step, residuals = residuals_of(states, self.transport)
        if self._numels:
            check_fit(residuals, self._numels)
        self.residuals.load(residuals)
        self.step = step

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def _settle_outcomes(outcomes: list[Outcome], finite: bool) -> None:
    for outcome in outcomes:
        if finite:
            outcome.commit()
        else:
            outcome.discard()
