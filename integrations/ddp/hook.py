"""DistributedDataParallel: the hook, its state, and the one-line form ``compress``.

A gradient bucket starts here: autograd fills it and calls the hook, which submits the steps to the
state's worker and returns a future to DDP. Backward continues meanwhile.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from commpress.alarm import NONE, Alarm, Peers, alarm_of
from commpress.choice import Now, PerLayer, Seen, check_layers, choice_of, methods_of
from commpress.codecs import Codec, Policy, SignCodec, codec_named, policy_of
from commpress.codecs.family import EXACT
from commpress.codecs.planned import PLAIN, Planned, load_plan
from commpress.codecs.policy import check_exclude
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.allreduce import Call, Outcome, Settled
from commpress.collectives.buckets import FLOATS, Span
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel, Counters
from commpress.collectives.exchange import Exchange, Exchanges, Reduce, Round, check_on_nonfinite
from commpress.collectives.handover import Handover, cannot_follow
from commpress.collectives.levels import divide
from commpress.collectives.measured_links import Links
from commpress.collectives.state import Stateful
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import (
    AgreeOver,
    can_reform,
    consensus_over,
    on_reform,
)
from commpress.errors import (
    CommunicationError,
    InvalidArgument,
    NonFiniteGradient,
    StateMismatch,
    check_counts,
    refuse_unknown,
)
from commpress.feedback import ResidualStore, check_feedback
from commpress.integrations.ddp.names import ParameterNames, averaged_parameters
from commpress.integrations.ddp.stragglers import OWED, OWING, Stragglers, check_model, check_wait
from commpress.kernels.pieces import NUMEL, RESIDUAL
from commpress.logs import warn_on_first
from commpress.optim.layout import held_of
from commpress.torch_private import LossScale, check_unhooked, check_wrapped
from commpress.work import Done, Steps, Work, run

if TYPE_CHECKING:
    from commpress.integrations.ddp.mesh import MeshStates

log = logging.getLogger("commpress")

DEFAULT_MIN_NUMEL = 256
BUCKET = (25 << 20) // 4  # elements of a bucket of DDP, for choices that need a size beforehand


class HookOptions(TypedDict, total=False):
    """Further keyword options of ``compress``; ``CompressedState`` explains them."""

    error_feedback: bool
    on_nonfinite: Literal["skip", "propagate", "raise"]
    agree_over: AgreeOver | None
    grad_scaler: torch.amp.GradScaler | None
    exact_steps: int
    alarm: Alarm | str | None
    wait: float | Literal["auto"] | None


class CompressOptions(HookOptions, total=False):
    """Keyword options of ``compress`` for a model of either kind."""

    min_numel: int
    exclude: tuple[str, ...]
    topology: Topology | str | Links | None


@overload
def compress(
    ddp: DistributedDataParallel,
    codec: str | Codec | Policy | PerLayer = "fp8",
    *,
    plan: str | Path | Planned | None = None,
    **options: Unpack[CompressOptions],
) -> "CompressedState": ...


@overload
def compress(
    ddp: Any, *, mesh: DeviceMesh, dims: Mapping[str, Any], **options: Unpack[CompressOptions]
) -> "MeshStates": ...


def compress(
    ddp: DistributedDataParallel,
    codec: str | Codec | Policy | PerLayer = "fp8",
    *,
    plan: str | Path | Planned | None = None,
    min_numel: int = DEFAULT_MIN_NUMEL,
    exclude: tuple[str, ...] = (),
    topology: Topology | str | Links | None = "auto",
    mesh: DeviceMesh | None = None,
    dims: Mapping[str, Any] | None = None,
    **options: Unpack[HookOptions],
) -> Any:
    """Compress the gradients of ``ddp`` from its next backward on; return the state, which holds
    residuals and counters.

    ``codec="auto"`` tries no compression, ``fp8``, ``int4`` and, in one level, ``powersgd-8+fp8``
    for a few steps each and keeps the fastest; powersgd only while its residual is at most two
    gradients. ``"auto+sign"`` tries ``sign`` as well, however large its residual;
    ``"auto:fp8,sign"`` tries these alone. ``PerLayer`` chooses a codec for every layer,
    repeatedly. ``plan``: a file written by ``commpress plan``, or its content, in place of a codec.
    If the plan advises no compression, DDP gets no hook.

    ``topology="auto"`` sums exactly inside a node and compresses between nodes, if the launcher
    says which ranks share one; None reduces flat. Groups whose ranks may change, exact codecs and
    trials of low-rank codecs are flat unless the topology is given, and so is a ``plan`` without
    one.

    Tensors of fewer than ``min_numel`` elements, and those whose name matches a regular expression
    in ``exclude``, travel exactly. ``options`` are those of ``CompressedState``.

    ``mesh`` with ``dims={"dp": "int8", "pp": "int4"}``: the codec of each dimension of a mesh by
    name, in place of ``codec``; other traffic, such as that of tensor parallelism, stays exact.
    ``ddp`` may then also be a bare model, a model under ``fully_shard``, or the stages of a
    pipeline or their schedule. All ranks that must stay equal agree. Returns the states by name
    (``integrations.ddp.mesh.MeshStates``). See ``docs/meshes.md``.
    """
    if mesh is not None or dims is not None:
        if plan is not None:
            raise InvalidArgument(
                "plan and mesh are both given: of a mesh name the codecs in dims="
            )
        check_wait(options.get("wait"), {"mesh is given: compress each dimension by itself": True})
        from commpress.integrations.ddp.mesh import compress_mesh  # it imports this file

        given = {"min_numel": min_numel, "exclude": exclude} | (
            {} if topology == "auto" else {"topology": topology}
        )
        return compress_mesh(ddp, mesh, dims, given | options)
    check_wrapped(ddp)
    check_unhooked(ddp)
    refuse_unknown("compress", options, compress, CompressedState)
    check_model(options.get("wait"), ddp)
    if plan is not None:
        codec = plan if isinstance(plan, Planned) else load_plan(plan)
        topology = codec.topology if topology == "auto" else topology
    elif topology == "auto" and not _divides(codec, ddp, options):
        topology = None
    state = CompressedState(
        codec,
        min_numel=min_numel,
        exclude=exclude,
        named_parameters=averaged_parameters(ddp),
        process_group=ddp.process_group,
        topology=topology,
        **options,
    )
    state.apart = [
        p
        for name, p in ddp.module.named_parameters()
        if name in ddp.parameters_to_ignore and held_of(p) is not None
    ]
    if state.compresses:
        ddp.register_comm_hook(state, compressed_allreduce_hook)
    return state


def _divides(codec: Any, ddp: DistributedDataParallel, options: HookOptions) -> bool:
    """Return true if all options work in two levels too, so that "auto" may read the launcher."""
    if (
        ddp.process_group.size() == 1
        or can_reform(ddp.process_group)
        or codec == PLAIN
        or options.get("alarm") is not None
        or options.get("wait") is not None
    ):
        return False
    if methods := methods_of(codec):
        return not any(isinstance(codec_named(each), LowRankCodec) for each in methods[1:])
    uniform = codec.uniform if isinstance(codec, PerLayer) else codec
    return not policy_of(uniform).choose("", BUCKET).lossless


def compressed_allreduce_hook(
    state: "CompressedState", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` over the ranks of ``state``, compressed; the future holds the bucket's own
    buffer."""
    if not isinstance(state, CompressedState):
        raise InvalidArgument(
            f"state is a {type(state).__name__}, expected a CompressedState: "
            "ddp.register_comm_hook(commpress.CompressedState(codec='fp8'), "
            "commpress.compressed_allreduce_hook)"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise InvalidArgument(
            f"bucket is a {type(bucket).__name__}: DDP's Python reducer "
            "(torch._dynamo.config.optimize_ddp) has no buckets, which compression needs; leave it "
            "at its default"
        )
    return state.reduce(bucket)


class Backward(Round):
    """Round of the buckets of one backward, with the job submitted for each."""

    apart: Sequence[torch.nn.Parameter] = ()  # not averaged, but left out with the rest
    instead = 0.0  # of gradients of a step that is left out

    def __init__(self, number: int = 0, **options: Any) -> None:
        super().__init__(number, **options)
        self.submitted: list[torch.futures.Future[Any]] = []

    def raise_errors(self) -> None:
        """Raise errors at the end of this backward, with their own types. Called once, inside the
        hook of the last bucket.

        Note: where errors are raised. DDP turns an exception in a future into "RuntimeError: Unable
        to cast", so autograd calls back before DDP looks at the futures. If no node of the graph is
        being evaluated (the first step of a static graph, a rank that has joined) it is too late
        for that: wait here. Errors are raised after DDP has finished, so that training may continue
        after them, as after ``group.reform``.
        """
        if torch._C._current_autograd_node() is None:
            self._wait()
        else:
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        for future in self.submitted:
            try:
                future.wait()
            except Exception as error:
                self.fail(error)
        if not self.finite:
            self._leave_out()
        if self.error is not None:
            if torch._C._current_graph_task_id() < 0:
                raise self.error
            Variable._execution_engine.queue_callback(self._raise)

    def _leave_out(self) -> None:
        """Replace the gradients of experts, which are there only now."""
        for gradient in [p.grad for p in self.apart if p.grad is not None]:
            gradient.detach().fill_(self.instead)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class CompressedState(Stateful):
    """State of the hook between calls: residuals, counters, a worker and a process group.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other
    groups: it makes a new one. torch's own all-reduce averages gradients that codecs do not support
    (float64, complex, sparse); ``counters`` count them.

    - ``codec``, ``min_numel``, ``exclude``: see ``compress``.
    - ``named_parameters``: names for residuals in checkpoints and for ``exclude``. Without it,
      parameters are numbered in the order in which DDP first brings them.
    - ``error_feedback``: True keeps the error of compression and sends it later; False drops it,
      which does not converge.
    - ``on_nonfinite``: "skip" (default) replaces all gradients of that step by zeros on all ranks,
      warns and counts; "propagate" by NaN, for code that tests them; "raise" raises
      NonFiniteGradient on all ranks. No residual changes. Of one rank, and in steps without
      compression ("auto", a plan or an alarm may take such), gradients stay as they are.
    - ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal, if these are
      more than the ranks of ``process_group``: with tensor parallelism the whole mesh. A value that
      is not finite on one of them makes all buckets of that step zeros on all of them, or raises on
      all. Not for stages of a pipeline, whose backwards wait for each other.
    - ``grad_scaler``: pass AMP's GradScaler. Residuals are then kept in unscaled units, a bad
      gradient reaches the scaler as infinity so that it skips the step, and residuals of a skipped
      step stay as they were.
    - ``exact_steps``: the number of first steps without compression (a warm-up for optimizers that
      estimate variances).
    - ``topology``: the ranks of each node, as a ``Topology``, in words ("2x4") or "auto" (from the
      launcher). Sums inside a node are then exact, and only traffic between nodes is compressed;
      see ``docs/hierarchy.md``. ``Links`` measured by ``commpress probe`` decide whether that is
      faster than one level.
    - ``alarm``: an ``Alarm``, or its ``then`` alone: the reaction if compression seems to harm the
      run.
    - ``wait``: seconds that other ranks wait for a backward of this one which is late; then it
      takes part with zeros, and its gradients follow later. "auto": a quarter of a step. None:
      until it is there. See ``docs/ddp.md``.

    ``measure_every`` says how many steps lie between measurements of the compression error (100; 0:
    none; none with a topology), and may be set at any time.
    """

    measure_every = 100

    def __init__(
        self,
        codec: str | Codec | Policy | PerLayer = "fp8",
        *,
        min_numel: int = DEFAULT_MIN_NUMEL,
        exclude: tuple[str, ...] = (),
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "propagate", "raise"] = "skip",
        agree_over: AgreeOver | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        exact_steps: int = 0,
        topology: Topology | str | Links | None = None,
        alarm: Alarm | str | None = None,
        wait: float | Literal["auto"] | None = None,
    ) -> None:
        self.process_group = process_group
        self.options: dict[str, Any] = {
            "codec": codec,
            "min_numel": min_numel,
            "exclude": exclude,
            "error_feedback": error_feedback,
            "on_nonfinite": on_nonfinite,
            "exact_steps": exact_steps,
            "topology": topology,
            "alarm": alarm,
            "wait": wait,
        }
        self.names = ParameterNames(named_parameters or ())
        self.alarm = alarm_of(alarm)
        check_counts(exact_steps=exact_steps)
        check_on_nonfinite(on_nonfinite)
        check_feedback(error_feedback)
        check_exclude(exclude)
        self._check(named=named_parameters is not None, agrees=agree_over is not None)
        if wait is not None:
            self._check_wait(
                scaled=grad_scaler is not None and grad_scaler.is_enabled(),
                agrees=agree_over is not None,
            )
        if codec == PLAIN and agree_over is None:
            codec = Planned(PLAIN)
        plain = isinstance(codec, Planned) and not codec.compresses
        numel = sum(self.names.numels.values()) or BUCKET
        self.choice = choice_of(
            None if plain else codec,
            partial(policy_of, min_numel=min_numel, exclude=exclude),
            exact_steps=exact_steps,
            alarm=self.alarm,
            numel=numel,
        )
        self._now = Now(self.choice.usual)
        policy = self.choice.usual or policy_of("none")
        self.on_nonfinite = on_nonfinite
        self.grad_scaler = (
            grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        )
        self.step, self._scale = 0, LossScale()
        self.counters = Counters(
            choice=f"the plan's: {codec.why or codec.codec}" if isinstance(codec, Planned) else ""
        )
        self.channel = Channel.among(process_group, device=self.names.device)
        self.consensus = consensus_over(agree_over, process_group)
        check_layers(codec, self.channel.size, self.consensus)
        if topology is not None:
            usual = min(numel, BUCKET)
            divide(self.channel, topology, usual, policy.choose("", usual))
        self._names_ranks = {
            "topology": topology not in (None, "auto") or self.channel.levels is not None,
            "agree_over": agree_over is not None,
        }
        self.exchanges = Exchanges(
            policy,
            self.channel.size,
            self.channel.workspace,
            levels=self.channel.levels,
            feedback=error_feedback,
            any_rank=isinstance(codec, PerLayer),
        )
        self._plain = Plain(self._plain_group(), self.counters)
        self._survives = can_reform(process_group)  # failed backwards: another may follow
        # the next step, exact or without messages, must apply the residuals
        self._owing = False
        self._backward: Backward | None = None
        # experts on this rank alone, whose gradients no bucket has
        self.apart: Sequence[torch.nn.Parameter] = ()
        self.handover = Handover(self.channel)
        if wait is not None:
            self._check_parts(policy)
        self.stragglers = None if wait is None else Stragglers(wait, self)
        self._told = False  # whether the log has reported the first compressed step
        on_reform(process_group, self)
        if self.channel.size == 1:
            log.warning(
                "world size is 1: there is nothing to reduce, gradients pass through as they are"
            )
        elif any(isinstance(each, SignCodec) for each in self._codecs(min(numel, BUCKET))):
            warn_on_first(
                self.channel.rank,
                "a codec of one bit sends the rest of a gradient later: compare the loss with an "
                "uncompressed run; exact_steps= of a tenth of the run, and a finer codec for the "
                "output layer, bring it closer",
            )

    def _codecs(self, numel: int) -> list[Codec]:
        """List the codecs that may be chosen for a tensor of this size."""
        if methods := methods_of(self.options["codec"]):
            return [codec_named(each) for each in methods[1:]]
        return [] if self.choice.usual is None else [self.choice.usual.choose("", numel)]

    def _check(self, *, named: bool, agrees: bool) -> None:
        """Raise an error for options that exclude each other, the same on every rank."""
        o, tries = self.options, methods_of(self.options["codec"])
        codec = o["codec"]
        if o["exclude"] and not named:
            raise InvalidArgument(
                "exclude matches parameter names, but named_parameters is missing: pass "
                "model.named_parameters() or use commpress.compress(ddp, exclude=...)"
            )
        if not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group before "
                "CompressedState"
            )
        if self.alarm is not None and (tries or o["topology"] is not None):
            raise InvalidArgument(
                "alarm is given with codec='auto' or a topology: an alarm looks at one codec in "
                "one level, so name the codec, and pass topology=None"
            )
        if self.alarm is not None and self._uncompressed:
            raise InvalidArgument(
                "alarm is given, but the codec, or the plan's, is 'none': there is no compression "
                "to look at"
            )
        if self.alarm is not None and self.alarm.then == NONE and agrees:
            raise InvalidArgument(
                "alarm has then='none' with agree_over, but steps without compression are torch's "
                "own: use Alarm('fp8')"
            )
        if agrees and (tries or (self._uncompressed and isinstance(codec, Planned))):
            raise InvalidArgument(
                f"agree_over is given, but codec is {getattr(codec, 'codec', codec)!r}, which "
                "leaves steps to torch's own all-reduce: name a codec, such as 'fp8', or leave "
                "agree_over out"
            )
        for method in tries[1:] if o["topology"] is not None else ():
            if isinstance(codec_named(method), LowRankCodec):
                # a matrix keeps residuals as a whole and rows slice by slice
                raise InvalidArgument(
                    f"a topology, and a codec that changes, is given, but "
                    f"{codec_named(method).spec!r} keeps what it leaves behind in whole matrices, "
                    "and other codecs in slices of a node: leave one of the three out"
                )
        for pattern in o["exclude"]:
            if not any(re.search(pattern, name) for name in self.names.numels):
                warn_on_first(
                    dist.get_rank(self.process_group),
                    "exclude=%r matches no parameter: nothing is left out because of it",
                    pattern,
                )

    def _check_wait(self, *, scaled: bool, agrees: bool) -> None:
        o = self.options
        changes = methods_of(o["codec"]) or isinstance(o["codec"], PerLayer) or self.alarm
        check_wait(
            o["wait"],
            {
                "codec, or the plan's, is 'none', and torch's own all-reduce waits for every rank: "
                "name a codec, such as 'fp8'": self._uncompressed,
                "the codec may change, for which ranks wait for each other: name one codec, "
                "without alarm": bool(changes),
                "topology is given: pass topology=None": o["topology"] is not None,
                "agree_over is given, with which ranks wait for each other: leave it out": agrees,
                "grad_scaler is given, whose scale a late rank does not know yet: train in "
                "bfloat16": scaled,
                "the ranks of this group may change: make one of backend 'gloo'": can_reform(
                    self.process_group
                ),
            },
        )

    def _check_parts(self, policy: Policy) -> None:
        """Raise an error where ``wait`` does not work with these ranks or parameters."""
        numels = self.names.numels or {"": BUCKET}
        whole = [isinstance(policy.choose(name, numels[name]), LowRankCodec) for name in numels]
        check_wait(
            self.options["wait"],
            {
                "these ranks do not talk over Gloo on the CPU, of which alone it is known what has "
                "come: make a group of backend 'gloo'": self.channel.size > 1
                and not hasattr(self.channel.inner, "early"),
                f"the parameters are on {self.names.device}: train on the CPU": self.names.device
                not in (None, torch.device("cpu")),
                "codec keeps whole matrices for some parameters: name one of rows, such as "
                "'fp8'": any(whole),
            },
        )

    @property
    def _uncompressed(self) -> bool:
        """Return true if the caller asked for no compression."""
        codec = self.options["codec"]
        return not codec.compresses if isinstance(codec, Planned) else codec in (NONE, EXACT)

    @property
    def compresses(self) -> bool:
        """False while torch's all-reduce averages all gradients."""
        return self._now.policy is not None

    @property
    def transport(self) -> Any:
        """The transport to the other ranks, with counters."""
        return self.channel.transport

    def _plain_group(self) -> Any:
        """Return the channel's own group, or the user's."""
        return getattr(self.channel.inner, "group", self.process_group or dist.group.WORLD)

    @property
    def residuals(self) -> ResidualStore:
        """Residuals of this rank."""
        return self.exchanges.residuals

    @property
    def policy(self) -> Policy:
        """The present codec of every parameter."""
        return self.exchanges.policy

    # ------------------------------------------------------------ one bucket

    @torch.compiler.disable  # sockets and threads cannot be traced
    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self.submit(bucket) if self.stragglers is None else self.stragglers.submit(bucket)

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket of this rank."""
        buffer = bucket.buffer()
        if self.channel.size == 1 and self.consensus is None:
            self._pay(bucket, last=bucket.is_last())
            if self.stragglers is not None:
                self.stragglers.pay(self.names.tensors(bucket)[0], buffer).commit()
            passed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            passed.set_result(buffer)
            return passed
        if bucket.index() == 0:
            self._begin_backward()
        assert self._backward is not None
        backward, last = self._backward, bucket.is_last()
        self.step += last
        if not self.compresses and backward.error is None:
            if not self._survives:
                return self._reduce_plainly(bucket, last=last)
            self._pay(bucket, last=last)
            self.counters.plain_steps += last
        future = backward.begin(buffer, last=last)
        try:
            if backward.error is not None:
                raise backward.error
            steps, waits = self._steps(bucket, buffer, backward)
            backward.submitted.append(self.channel.submit(steps, buffer, waits=waits))
        except CommunicationError as error:  # the group is broken already
            backward.fail(error)
        if last:
            self._backward = None
            backward.raise_errors()
        return future

    @property
    def under_way(self) -> bool:
        """True while a step is submitted and not settled."""
        return self.steps_done < self.step

    def prepared(self, tensors: tuple[int, ...]) -> Exchange | None:
        """Return the exchange of these tensors in the next step, if that is known."""
        if self.step >= self._now.until:
            return None
        return self.exchanges.known(tensors, exact=self._now.exact)

    def answer(
        self, mean: torch.Tensor, exchange: Exchange, *, last: bool
    ) -> tuple[Backward, torch.futures.Future[torch.Tensor]]:
        """Start the exchange of a bucket that backward has not reached, with zeros. The round of a
        step that it has not reached stays open until ``release``."""
        if self._backward is None:
            self._backward = Backward(self.step, counts=self.handover)
            self._backward.hold()
        backward, sequence = self._backward, self.channel.take(exchange.sequences)
        future = backward.begin(mean, last=last)
        steps = self._exchanged(mean, exchange, backward, sequence, late=True)
        backward.submitted.append(self.channel.submit(steps, mean, waits=exchange.waits))
        if last:
            self.step, self._backward = self.step + 1, None
        return backward, future

    def release(self, backward: Backward) -> None:
        """Let a round that ``answer`` began close."""
        run(self._end(None, True, [], backward))

    def compressible(self, bucket: dist.GradBucket) -> bool:
        """True if codecs support these gradients."""
        return self._plain.compressible(bucket)

    def _begin_backward(self) -> None:
        """Begin a backward; drop what an aborted one has left."""
        before = self._backward
        self._backward = Backward(self.step, consensus=self.consensus, counts=self.handover)
        self._backward.apart = self.apart
        if before is not None:
            before.abandon()
        if self.step < self._now.until:
            return
        try:
            self._choose(aborted=before is not None)
        except CommunicationError as error:
            self._backward.fail(error)

    def _choose(self, *, aborted: bool) -> None:
        """Choose the codecs of this step; collective if they may change."""
        channel = self.channel

        def add_residual(name: str, out: torch.Tensor) -> None:
            self.residuals.add_to(name, out, channel.rank, channel.size)

        found = self.choice.at(self.step, Peers(channel, add_residual), aborted=aborted)
        was, self._now = self._now, channel.run(found)
        if self._now.policy is not None:
            self.exchanges.use(self._now.policy)
        elif was.policy is not None:
            self._owing = True
        self.counters.choice = self.choice.why or self.counters.choice

    def _reduce_plainly(
        self, bucket: dist.GradBucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket of an uncompressed step by torch's own all-reduce; the first such step
        after a trial carries the residuals."""
        self._pay(bucket, last=last)
        if last:
            self._backward, self.steps_done = None, self.step
        return self._plain.reduce(bucket, last=last)

    def _pay(self, bucket: dist.GradBucket, *, last: bool) -> None:
        """Add the residuals to the gradients once these, or their mean, are sent exactly."""
        if self._owing and self._plain.compressible(bucket):
            scale = self._scale.of(self.grad_scaler)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if (name := self.names.known(parameter)) is not None:
                    residual = torch.zeros(gradient.numel(), device=gradient.device)
                    self.exchanges.pay(name, residual, self.channel.rank)
                    gradient.view(-1).add_(residual, alpha=scale)
        self._owing &= not last

    def _steps(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, backward: Backward
    ) -> tuple[Steps[None], int | None]:
        """Return the steps of one bucket, and how often they wait, if known."""
        if self.channel.size == 1 or not self.compresses or not self._plain.compressible(bucket):
            waits, begin = (
                1 if self.consensus is None else None,
                partial(self._plain.average, buffer),
            )
            work = None if self._survives else begin()
            return self._averaged(buffer, lambda: work or begin(), backward), waits
        exchange = self.exchanges.of(
            tuple(map(id, bucket.parameters())),
            lambda: self.names.tensors(bucket),
            buffer.device,
            exact=self._now.exact,
        )
        sequence = self.channel.take(exchange.sequences)
        waits = exchange.waits if self.consensus is None else None
        return self._exchanged(buffer, exchange, backward, sequence), waits

    def _exchanged(
        self,
        bucket: torch.Tensor,
        exchange: Exchange,
        round: Round,
        sequence: int,
        *,
        late: bool = False,
    ) -> Steps[None]:
        """Average a bucket over the channel. ``late``: it stands for one that is not there."""
        workspace, buffer = self.channel.workspace, bucket
        if bucket.dtype != torch.float32:
            buffer = workspace.borrow(bucket.numel(), torch.float32, bucket.device).copy_(bucket)
        paid = [] if late or not self.stragglers else [self.stragglers.pay(exchange.spans, buffer)]
        gain = 1.0 / self._scale.of(self.grad_scaler) if self.grad_scaler else 1.0
        first = not (self._told or self._now.exact)  # compressed step
        every = 0 if late else self.measure_every
        measure = every and (first or round.number % every == 0)
        own = buffer * gain if self._now.looks else None
        before = None
        if (measure or own is not None) and isinstance(exchange, Reduce):
            before = exchange.compensated(buffer, gain)
        call = Call(self.channel.transport, workspace, sequence, round.number, gain)
        outcomes = yield from exchange.steps(self.channel, buffer, call)
        finite = all(outcome.finite for outcome in outcomes)
        if finite and bucket is not buffer:
            bucket.copy_(buffer)
            # a mean too large for float16 overflows on every rank alike
            if bucket.dtype == torch.float16:
                finite = bool(torch.isfinite(bucket).all())
        if bucket is not buffer:
            workspace.give_back(buffer)
        if measure and finite and before is not None:
            self.counters.errors.update(relative_errors(before, exchange.spans, outcomes))
        if own is not None and finite:
            seen = Seen(exchange.spans, own, before, outcomes, exchange.plans)
            self.choice.observe(round.number, seen)
        self.counters.bucket(bucket.numel(), exchange.messages, self.channel.size)
        yield from self._end(bucket, finite, [*outcomes, *paid], round)

    def _averaged(
        self, bucket: torch.Tensor, begin: Callable[[], Work], round: Round
    ) -> Steps[None]:
        """Average a bucket by torch's own all-reduce; values that are not finite stay in an
        uncompressed step.

        Note: the thread. If a call begins on autograd's thread and fails, it ends the backward
        before DDP has finished it.
        """
        yield begin()
        finite = not self.compresses or bool(torch.isfinite(values_of(bucket)).all())
        yield from self._end(bucket, finite, [], round)

    def _end(
        self, bucket: torch.Tensor | None, finite: bool, outcomes: Sequence[Settled], round: Round
    ) -> Steps[None]:
        """End a bucket whose means have arrived; the last one commits or discards the whole
        backward."""
        closed = yield from round.end(bucket, finite, outcomes)
        if not closed:
            return
        if self.stragglers is not None:  # a state may be saved while a bucket is answered
            self.residuals.settle()
        self.steps_done = round.number + 1
        if not round.finite:
            self._replace_nonfinite(round)
        round.deliver()
        self.counters.step(round.finite, self.channel, self._plain.sent_bytes)
        if not self._told and not self._now.exact:
            self._told = True
            self.counters.say(self.channel.rank, wanted=not self._uncompressed)

    def _replace_nonfinite(self, round: Round) -> None:
        value = 0.0
        if self.grad_scaler or self.on_nonfinite == "propagate":
            value = inf if self.grad_scaler else nan
        if isinstance(round, Backward):
            round.instead = value
        for buffer in round.buffers:
            values_of(buffer).fill_(value)
        self.counters.skipped_buckets += len(round.buffers)
        count = self.counters.skipped_steps + 1
        if self.on_nonfinite == "raise":
            round.error = NonFiniteGradient(
                f"the gradients of step {round.number} hold NaN or infinity on some rank. No "
                "residual was changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
            )
        elif count <= 3 or count % 100 == 0:
            instead = "NaN" if self.on_nonfinite == "propagate" else "zeros"
            effect = (
                "passed on as infinity to the GradScaler"
                if self.grad_scaler
                else f"replaced by {instead} on all ranks"
            )
            advice = (
                ""
                if self.grad_scaler
                else " With AMP pass grad_scaler= so that the loss scale adapts."
            )
            warn_on_first(
                self.channel.rank,
                "step %d: gradients held NaN or infinity on some rank and were %s (%d so far).%s",
                round.number,
                effect,
                count,
                advice,
            )

    # ------------------------------------------------------------ state

    def schedule(self) -> dict[str, Any]:
        owing = {} if self.stragglers is None else {OWING: list(map(list, self.numels().items()))}
        return self.choice.saved() | owing

    def check(self, schedule: Mapping[str, Any]) -> None:
        """Accept every schedule, since a choice may continue from any other, but for gradients that
        this object would not send."""
        if self.stragglers is not None:
            self.stragglers.check_load()
        elif OWED in schedule and bool(schedule[OWED].any()):
            raise StateMismatch(
                "the state holds gradients that were late and are to follow: pass wait=, as in the "
                "run that saved it"
            )

    def waiting(self) -> dict[str, torch.Tensor]:
        """Return the gradients that were late and are to follow."""
        return {} if self.stragglers is None else self.stragglers.waiting(self.numels())

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        with nullcontext() if self.stragglers is None else self.stragglers.lock:
            return (yield from super().elastic_steps())

    def passing(self) -> dict[str, Any]:
        return self.choice.state() | {"brought": list(self.names.brought)}

    def numels(self) -> dict[str, int]:
        return self.names.brought | self.names.numels

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        self.step = self.steps_done
        self.choice.load(schedule)
        self._now = self._now._replace(until=0)
        if self.stragglers is not None:
            self.stragglers.restart(schedule)
        if change is None:
            return
        self._backward = None
        self._plain.group = self._plain_group()
        self._owing = self.channel.size == 1 or self._now.policy is None
        if change.was is None and not self.names.numels:
            self.names.expect(schedule["brought"])
        self.counters.lost_ranks = self.handover.lost

    def reforming(self, change: Change) -> Steps[Callable[[], None]]:
        for option, names in self._names_ranks.items():
            if names:
                raise cannot_follow(self, f"{option} names ranks that were")
        return (yield from super().reforming(change))

    def __getstate__(self) -> NoReturn:
        """Raise an error: connections, threads and groups cannot be saved or copied."""
        raise InvalidArgument(
            "a CompressedState cannot be pickled or copied: save state.state_dict(), and load it "
            "into what commpress.compress returns for the model that goes on"
        )


class Plain:
    """torch's own all-reduce behind the hook, for uncompressed steps and for dtypes without a
    codec."""

    def __init__(self, group: dist.ProcessGroup, counters: Counters) -> None:
        self.group, self.counters = group, counters
        self.sent_bytes = 0  # as in a ring all-reduce

    @staticmethod
    def compressible(bucket: dist.GradBucket) -> bool:
        """True if codecs support these gradients; torch's all-reduce averages others: float64,
        complex, sparse.

        Complex gradients arrive as pairs of real numbers.
        """
        buffer = bucket.buffer()
        return (
            not buffer.is_sparse
            and buffer.dtype in FLOATS
            and not any(p.is_complex() for p in bucket.parameters())
        )

    def reduce(self, bucket: dist.GradBucket, *, last: bool) -> torch.futures.Future[torch.Tensor]:
        self.counters.steps += last
        self.counters.plain_steps += last
        work: Any = self._begin(bucket.buffer())
        return work.get_future().then(lambda future: future.value()[0])

    def average(self, buffer: torch.Tensor) -> Work:
        """Start the all-reduce, in call order with the group's other collectives."""
        if self.group.size() == 1:
            return Done()
        self.counters.plain_elements += values_of(buffer).numel()
        return self._begin(buffer)

    def _begin(self, buffer: torch.Tensor) -> Work:
        self._count(buffer)
        return dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)

    def _count(self, buffer: torch.Tensor) -> None:
        size, numel = self.group.size(), values_of(buffer).numel()
        nbytes = 2 * (size - 1) * numel * buffer.element_size() // size
        if buffer.is_sparse:  # values of all ranks, with their indices
            nbytes = (size - 1) * (buffer._values().nbytes + buffer._indices().nbytes)
        self.sent_bytes += nbytes
        self.counters.wire_bytes += nbytes
        self.counters.logical_bytes += 8 * (size - 1) * numel // size
        self.counters.exact_elements += numel


def values_of(buffer: torch.Tensor) -> torch.Tensor:
    """Return the elements of a buffer; the stored ones if it is sparse."""
    return buffer._values() if buffer.is_sparse else buffer


def relative_errors(
    before: torch.Tensor, spans: Sequence[Span], outcomes: Sequence[Outcome]
) -> dict[str, float]:
    """Return ‖residual‖ / ‖compensated‖ of each parameter, from the encoder's input and the
    proposed residuals."""
    left: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.proposed is None:
            continue
        outcome.proposed.settle(outcome.message.pieces)
        for (name, _), line in zip(outcome.message.keys, outcome.message.pieces.table, strict=True):
            if line[RESIDUAL] >= 0:
                part = outcome.proposed.sent[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]
                left[name] = left.get(name, 0.0) + float(part.square().sum())
    norms = {s.name: float(before[s.source : s.source + s.numel].square().sum()) for s in spans}
    return {
        name: (value / norms[name]) ** 0.5 if norms[name] else 0.0 for name, value in left.items()
    }
