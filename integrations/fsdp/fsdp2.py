"""FSDP2: compress gradients and weights of a sharded model through torch's own extension points."""

import logging
import zlib
from collections import Counter
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from commpress.alarm import NONE, WARN, Alarm, Peers, alarm_of
from commpress.choice import PerLayer, check_layers, choice_of
from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.codecs.exponents import ExponentCodec
from commpress.codecs.family import EXACT
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec, travels_whole
from commpress.collectives.buckets import MESSAGE, PIECE
from commpress.collectives.channel import Channel, Counters, any_rank
from commpress.collectives.exchange import Round
from commpress.collectives.handover import Divided
from commpress.collectives.levels import divide
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import AgreeOver, consensus_over, on_reform
from commpress.collectives.transports.transport import Divisible
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import ResidualStore
from commpress.integrations.experts.moe import experts_of
from commpress.integrations.fsdp.nonfinite import BadGradients
from commpress.integrations.fsdp.param_groups import ParamGroup, column_mesh, param_groups_of
from commpress.integrations.fsdp.policies import policy_for, residual_codec
from commpress.integrations.fsdp.prefetch import AT_ONCE, DeferredReductions, Prefetcher
from commpress.integrations.fsdp.shard_checkpoint import (
    elastic_residuals,
    exact_residuals,
    load_elastic,
    load_exact,
    load_mean,
)
from commpress.integrations.fsdp.shard_gradients import CompressedReduceScatter, Hop
from commpress.integrations.fsdp.shard_weights import (
    CompressedAllGather,
    Difference,
    LosslessAllGather,
)
from commpress.logs import tell_on_first, warn_on_first
from commpress.optim.layout import local
from commpress.plan.assignment import rank_options
from commpress.torch_private import LossScale, fsdp_groups
from commpress.work import run

log = logging.getLogger("commpress")

MIN_NUMEL = 1024


class ShardedState(Divided):
    """Compress the messages of ``fully_shard``. The result has channels, residuals and counters.

    Call it on every rank, after the last ``fully_shard`` and before the first step. The sharded
    parameters, which the optimizer sees, do not change: only gathered copies are quantized.

    - ``codec``, ``weights``: codecs of gradients and of weights: a codec or its name, a policy by
      parameter name, or None to leave that side to torch. ``PerLayer`` chooses those of gradients
      again and again, for every layer. A codec is used by role: tensors of fewer
      than ``min_numel`` elements, norms and biases are sent exactly, embeddings and the last Linear
      with at least 8 bits. ``weights=Difference("int4")`` sends changes of weights;
      ``weights="exact"`` codes their exponents without loss: 1.35 to 1.43 times fewer bytes of
      bfloat16, 1.15 of float32.
    - ``topology``: nodes, to reduce gradients in two hops: exactly inside a node, between nodes
      with ``codec``. A pair, ``(nodes, "int8")``, names the codec inside a node, too. PowerSGD
      needs exact sums of nodes.
    - ``error_feedback``: keep residuals of gradients, 4 bytes per parameter of the whole model on
      each rank; with an exact hop inside nodes, of a node's share of it. A codec keeps them in
      fewer bytes: "bf16", or "shift8", one unbiased byte. ``ShardedState.memory`` returns all of
      this memory.
    - ``on_nonfinite``: gradients of a group of parameters (one ``fully_shard``) in which a rank has
      NaN or infinity become zeros on all ranks ("skip"), NaN ("propagate", if the program tests
      them), or zeros with an error after backward ("raise"). No residual changes.
    - ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal and run
      backward together, if these are more than the ranks of a group: they decide about each group
      together. Stages of a pipeline are not among them. Default: the mesh of parameters that tensor
      parallelism shards, too.
    - ``grad_scaler``: AMP's GradScaler, so that residuals are kept in unscaled units, infinities
      reach it, and no group's residuals change in a step that it skips.
    - ``regather``: send weights again before backward. Otherwise received weights are kept, still
      encoded, from forward to backward, which takes a byte per parameter of the whole model on each
      rank with "int8" and saves a third of the traffic.
    - ``overlap``: communicate on separate threads: gather weights in advance of forward and
      backward, and reduce gradients during backward. Not where ``CPUOffloadPolicy`` keeps shards of
      a GPU's model in host memory.
    - ``alarm``: an ``Alarm``, or only its ``then``: the reaction if compressed gradients seem to
      harm the run.

    Each set of ranks with a group has two channels, for gradients and for weights, which work at
    the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: str | Codec | Policy | PerLayer | None = "fp8",
        weights: str | Codec | Policy | Difference | None = "int8",
        *,
        topology: Topology | tuple[Topology, str | Codec | Policy] | None = None,
        min_numel: int = MIN_NUMEL,
        error_feedback: bool | str | Codec = True,
        on_nonfinite: Literal["skip", "propagate", "raise"] = "skip",
        agree_over: AgreeOver | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        regather: bool = False,
        overlap: bool = True,
        alarm: Alarm | str | None = None,
    ) -> None:
        if codec is None and weights is None:
            raise InvalidArgument("codec and weights are both None: there is nothing to compress")
        topology, inside = topology if isinstance(topology, tuple) else (topology, "none")
        for layer in experts_of(model):
            layer.check_parameters()
        self.param_groups = param_groups_of(model)
        if waiting := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
            raise InvalidArgument(
                f"parameter {waiting[0]!r} is on the meta device: materialise the model first, "
                "with model.to_empty(device=...) and its values, after fully_shard and before "
                "compress_fsdp"
            )
        self.model = model
        self.bad = BadGradients(on_nonfinite, dist.get_rank(self.param_groups[0].group))
        self.grad_scaler = (
            grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        )
        self._scale = LossScale()
        if self.grad_scaler is not None:
            self.bad.value = float("nan")  # so that it skips the step
        self.step, self.gradients, self.weights = 0, Counters(), Counters()
        # step of a loaded state, which counters do not include
        self.resumed_at = 0
        self.error_feedback = error_feedback is not False
        self.kept_in = EXACT if isinstance(error_feedback, bool) else residual_codec(error_feedback)
        coded: dict[str, Any] = (
            {}
            if self.kept_in.lossless
            else {"kind": self.kept_in.kind, "block": self.kept_in.block}
        )
        self.residuals, self.residuals_between = ResidualStore(**coded), ResidualStore(**coded)
        self.reducing: dict[tuple[int, ...], Channel] = {}  # by ranks
        self.gathering: dict[tuple[int, ...], Channel] = {}
        self.hops: list[Channel] = []  # inside a node and between nodes
        self.reducers: dict[ParamGroup, CompressedReduceScatter] = {}
        self.gatherers: list[CompressedAllGather] = []
        self._exact_bytes = 0  # of weights sent by torch
        self._summary_logged, self._pipeline_logged = False, False
        self.device = self.param_groups[0].parameters[0].device
        on_reform(None, self)
        if all(each.ranks == 1 for each in self.param_groups):
            log.warning(
                "all shards are on one rank: there is nothing to reduce or gather, so nothing is "
                "compressed"
            )

        named = partial(policy_for, model, min_numel=min_numel)
        difference = isinstance(weights, Difference)
        weight_codec = weights.codec if isinstance(weights, Difference) else weights
        layers = codec if isinstance(codec, PerLayer) else None
        gradient_codec = codec.uniform if isinstance(codec, PerLayer) else codec
        gradient_policy = None if gradient_codec is None else named(gradient_codec)
        uniform = None if layers is None else codec_named(layers.uniform)
        # highest rank that a matrix may get from ``PerLayer``; 0: ranks do not change
        self.most = rank_options(uniform)[-1] if isinstance(uniform, LowRankCodec) else 0
        lossless = not difference and (
            isinstance(weight_codec, ExponentCodec) or weight_codec == ExponentCodec.spec
        )
        weight_policy = None
        if weight_codec is not None:
            weight_policy = policy_of(ExponentCodec()) if lossless else named(weight_codec)
        inside_policy = None if topology is None else policy_for(model, inside, min_numel=0)
        self._check_codecs(gradient_policy, inside_policy, None if lossless else weight_policy)
        given = {"gradients": gradient_codec, "weights": weight_codec}
        self._wanted = {side for side, each in given.items() if each not in (None, NONE, EXACT)}
        if agree_over is None:  # shard peers of tensor parallelism decide together
            agree_over = column_mesh(self.param_groups)
        self.consensus = consensus_over(agree_over, self.param_groups[0].group)
        self.alarm = alarm_of(alarm)
        apart = "groups of parameters on other ranks than the first, and it adds up errors over one"
        size = self.param_groups[0].group.size()
        check_layers(codec, size, self.consensus, apart if self._several_meshes else "")
        if self.alarm is not None:
            self._check_alarm(self.alarm, gradient_policy, two_hops=topology is not None)
        self.choice = choice_of(codec, named, alarm=self.alarm, tries=False)
        self._now = self.choice.usual
        divided: set[tuple[int, ...]] = set()  # channels divided into two levels, for whole tensors
        for each in self.param_groups:
            ranks = tuple(dist.get_process_group_ranks(each.group))
            if ranks not in self.reducing:
                self.reducing[ranks] = Channel.among(
                    each.group, name="commpress-gradients", at_once=AT_ONCE
                )
                self.gathering[ranks] = self.reducing[ranks].beside("commpress-weights")
            channel = self.reducing[ranks]
            self._agree_on(
                each,
                channel,
                gradient_policy,
                weight_policy,
                (inside, str(topology), difference),
            )
            if gradient_policy is not None and each.parts(trainable=True):
                hops = [Hop(channel, gradient_policy, self.residuals)]
                if topology is not None and inside_policy is not None:
                    hops = self._two_hops(each, channel, gradient_policy, inside_policy, topology)
                    if ranks not in divided and any(_whole_gradients(each, gradient_policy)):
                        numel = sum(part.numel for part in each.parts(trainable=True))
                        divide(channel, topology, numel, EXACT)
                        divided.add(ranks)
                self.reducers[each] = CompressedReduceScatter(each, self, channel, hops)
                each.module.set_custom_reduce_scatter(self.reducers[each])
            if weight_policy is not None:
                among, keep = self.gathering[ranks], not regather
                gatherer = (
                    LosslessAllGather(each, self, among, keep=keep)
                    if lossless
                    else CompressedAllGather(
                        each, self, weight_policy, among, difference=difference, keep=keep
                    )
                )
                each.module.set_custom_all_gather(gatherer)
                self.gatherers.append(gatherer)
        first, *others = [*self.reducing.values(), *self.gathering.values()]
        for channel in others if first.inner.ordered else ():
            channel.queue_at(first)
        offloaded = any(each.offloaded for each in self.param_groups)
        self.background = overlap and not offloaded
        self.prefetcher = Prefetcher(self.background)
        self.deferred = DeferredReductions() if self.background and self.reducers else None
        self._rounds: dict[int, Round] = {}  # by backward, with a GradScaler
        self._step_round: Round | None = None  # the round of a step that ends with ``settle``
        # None: reductions and backwards are settled one by one
        self._unsettled: set[CompressedReduceScatter] | None = None
        if self.alarm is not None and any(
            reducer.whole is not None for reducer in self.reducers.values()
        ):
            raise InvalidArgument(
                "alarm is given, but the codec of gradients compresses whole tensors: an alarm "
                "needs a codec of rows, such as 'int4'"
            )
        self._shared_verdict = len(self.reducing) == 1 or self.consensus is not None
        for each in self.param_groups:
            if self.deferred is not None:
                each.module.register_forward_pre_hook(self.deferred.forget)  # type: ignore[attr-defined]
            if self.grad_scaler is not None:
                each.module.register_forward_pre_hook(self._abandon)  # type: ignore[attr-defined]

    # ------------------------------------------------------------ setting up

    def _check_codecs(
        self, gradients: Policy | None, inside: Policy | None, weights: Policy | None
    ) -> None:
        """Check that whole-tensor codecs are used for gradients only, with exact sums inside nodes;
        the same on any number of ranks."""
        for name, shape in (pair for each in self.param_groups for pair in each.shapes.items()):
            for policy in (gradients, inside, weights):
                chosen = None if policy is None else policy.choose(name, shape.numel())
                if isinstance(chosen, ExponentCodec):
                    chosen.refuse()
            for option, policy in (("topology", inside), ("weights", weights)):
                codec: object = None if policy is None else policy.choose(name, shape.numel())
                if isinstance(codec, WholeTensorCodec):
                    why = (
                        "a rank has rows of weights only"
                        if option == "weights"
                        else "inside a node rows travel"
                    )
                    raise InvalidArgument(
                        f"{option} has the codec {codec.spec!r} for {name!r}. It compresses whole "
                        f"tensors, and {why}: choose a codec of rows such as 'int4'"
                    )
            codec = None if gradients is None else gradients.choose(name, shape.numel())
            if not self.kept_in.lossless and travels_whole(codec, shape):
                raise InvalidArgument(
                    f"error_feedback is {self.kept_in.spec!r}, but the codec of {name!r} "
                    "compresses whole tensors, with residuals in float32: leave error_feedback "
                    "out, or choose a codec of rows such as 'int4'"
                )
            within = None if inside is None else inside.choose(name, shape.numel())
            if within is not None and not within.lossless and travels_whole(codec, shape):
                raise InvalidArgument(
                    f"topology has the codec {within.spec!r} for {name!r}, but the codec between "
                    "nodes compresses whole tensors and needs exact sums: pass the nodes alone, or "
                    "with a policy with 'none' for it (commpress.ByName), or a codec of rows as "
                    "codec"
                )

    @property
    def _several_meshes(self) -> bool:
        """True if groups of parameters are on other ranks than the first."""
        return len({tuple(dist.get_process_group_ranks(g.group)) for g in self.param_groups}) > 1

    def _check_alarm(self, alarm: Alarm, gradients: Policy | None, *, two_hops: bool) -> None:
        """An alarm needs one exchange of rows, among ranks that are the same for all groups of
        parameters."""
        beside = ""
        if gradients is None:
            beside = "codec=None: there is nothing to look at"
        elif not self.error_feedback:
            beside = "error_feedback=False: it looks at residuals"
        elif two_hops:
            beside = "a topology: it looks at one hop"
        elif self._several_meshes:
            beside = (
                "groups of parameters on other ranks than the first: it adds up over one set of "
                "ranks"
            )
        if beside:
            raise InvalidArgument(f"alarm is given with {beside}. Leave alarm out")
        if alarm.then == WARN:
            return
        then = None if alarm.then == NONE else codec_named(alarm.then)
        if then is None or then.lossless or not then.feedback or isinstance(then, WholeTensorCodec):
            raise InvalidArgument(
                f"alarm has then={alarm.then!r}, and what compression owes can only go with a "
                "codec of rows that has residuals: use Alarm('int8') or Alarm('warn')"
            )
        if self.consensus is not None:
            raise InvalidArgument(
                f"alarm has then={alarm.then!r}, and ranks beyond the shards' must agree, which do "
                "not look together: use Alarm('warn')"
            )

    def _two_hops(
        self,
        param_group: ParamGroup,
        channel: Channel,
        policy: Policy,
        inside: Policy,
        topology: Topology,
    ) -> list[Hop]:
        nodes, transport = topology.nodes, cast(Divisible, channel.inner)
        if topology.size != param_group.ranks or len({len(node) for node in nodes}) > 1:
            raise InvalidArgument(
                f"topology is {str(topology)!r}, expected nodes of equal size with "
                f"{param_group.ranks} ranks in all"
            )
        (home,) = [node for node in nodes if channel.rank in node]
        place = home.index(channel.rank)
        rows = tuple(tuple(node[i] for node in nodes) for i in range(len(home)))
        within = [transport.subset(node) for node in nodes]
        across = [transport.subset(row) for row in rows]
        first, second = (
            channel.beside("inside", within[nodes.index(home)]),
            channel.beside("between", across[place]),
        )
        self.hops += [first, second]
        return [
            Hop(first, inside, self.residuals, rows=rows),
            Hop(second, policy, self.residuals_between, own=rows[place]),
        ]

    def _agree_on(
        self,
        param_group: ParamGroup,
        channel: Channel,
        gradients: Policy | None,
        weights: Policy | None,
        options: object,
    ) -> None:
        """Check that all ranks cut this group alike with the same codecs; an error names those that
        do not."""
        lines = [repr(options)]
        for part in param_group.parts(trainable=False):
            specs: list[object] = [gradients is None, weights is None]
            specs += [
                p.choose(part.name, part.numel).spec for p in (gradients, weights) if p is not None
            ]
            lines.append(f"{part.name} {part.width} {part.numel} {specs}")
        numel, label = (
            sum(p.numel() for p in param_group.parameters),
            zlib.crc32("\n".join(lines).encode()),
        )
        uncounted = channel.beside("agreement")
        run(
            any_rank(
                False,
                uncounted,
                channel.take(),
                self.device,
                what="compress_fsdp",
                numel=numel,
                label=label,
            )
        )

    # ---------------------------------------------------------- called by parameter groups

    def begin(self, reducer: CompressedReduceScatter) -> int:
        """Return a seed for stochastic codecs; a step begins when a group is reduced more often
        than any before."""
        if self._unsettled is not None:
            if reducer in self._unsettled:
                raise InvalidArgument(
                    f"the gradients of {reducer.param_group.name} are reduced again before the "
                    "first reduction was settled: call states.synchronize() on every rank between "
                    "schedule.step() and optimizer.step()"
                )
            self._unsettled.add(reducer)
        if reducer.calls >= self.step:
            self._choose()
            self._check_complete()
            self.step, self.bad.error = reducer.calls + 1, None
        return reducer.calls

    def _choose(self) -> None:
        """Choose the codecs of a new step, on every rank at its first reduction. Residuals stay."""
        steps = self.choice.at(self.step, Peers(self.channel))
        if self.background:  # what was submitted may be running
            shard = local(self.param_groups[0].parameters[0])
            now = self.channel.submit(steps, shard).wait().policy
        else:
            now = self.channel.run(steps).policy
        self.gradients.choice = self.choice.why or self.gradients.choice
        if now is not None and now != self._now:
            self._now = now
            for reducer in self.reducers.values():
                reducer.go_on_with(now)

    def reductions(self, param_group: ParamGroup, backwards: int) -> int:
        """Return how often a group's gradients have been reduced; torch reduces in each of its
        ``backwards``."""
        return self.reducers[param_group].calls if param_group in self.reducers else backwards

    def gain(self) -> float:
        return 1.0 / self._scale.of(self.grad_scaler)

    def settle_by_steps(self) -> None:
        """Commit or discard all reductions of a step together from now on, in ``settle`` after the
        last."""
        self._unsettled = set()

    @property
    def finite(self) -> bool:
        """True if all reductions since the last ``settle`` were finite."""
        return self._step_round is None or self._step_round.finite

    @torch.no_grad()
    def settle(self, finite: bool) -> NonFiniteGradient | None:
        """Take the step after all ranks have reduced, or set its gradients to zero (NaN with a
        GradScaler) and keep residuals.

        The caller raises the returned error, after all have settled.
        """
        round, self._step_round, self._unsettled = self._step_round, None, set()
        if round is not None:
            round.finite = finite
            round.close()
        if finite:
            return None
        self.gradients.skipped_steps += 1
        for p in self.model.parameters():
            if p.grad is not None:
                local(p.grad).fill_(self.bad.value)
        if self.bad.policy != "raise":
            return None
        return NonFiniteGradient(
            f"gradients of step {self.step} hold NaN or infinity on some rank of the mesh. No "
            "residual was changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
        )

    def round(self) -> Round | None:
        """Return the round of the running backward, with a GradScaler that skips a step in which
        one group is not finite."""
        if self._unsettled is not None:
            self._step_round = self._step_round or Round()
            return self._step_round
        task = torch._C._current_graph_task_id()
        if self.grad_scaler is None or not self._shared_verdict or task < 0:
            return None
        if task not in self._rounds:
            self._rounds[task] = Round()
            Variable._execution_engine.queue_callback(lambda: self._rounds.pop(task).close())
        return self._rounds[task]

    def _abandon(self, *_args: object) -> None:
        """Drop, before forward, what a failed backward has left."""
        if self._rounds and torch._C._current_graph_task_id() < 0:
            for round in self._rounds.values():
                round.abandon()
            self._rounds.clear()

    def outside_backward(self) -> None:
        if not self._pipeline_logged:
            self._pipeline_logged = True
            text = (
                "gradients are reduced outside of backward, as by a pipeline, so overlap=True does "
                "not overlap them with it"
            )
            tell_on_first(self.bad.rank, text)

    # ------------------------------------------------------------ counting

    def reduced(self) -> None:
        """Count a reduction of a group's gradients."""
        self.gradients.channels([*self.reducing.values(), *self.hops])
        self.gradients.steps = self.step - self.resumed_at

    def gathered(
        self, whole: torch.Tensor, plan: list[Any], ranks: int, *, headers: int = 0
    ) -> None:
        self.weights.logical_bytes += whole.element_size() * whole.numel() * (ranks - 1) // ranks
        self.weights.messages += len(plan) + headers
        self.weights.elements(plan, ranks)
        self._count_weights()

    def gathered_exactly(self, whole: torch.Tensor, ranks: int) -> None:
        """Count an exact gather by torch, among the ranks of a smaller mesh after forward."""
        sent = whole.element_size() * whole.numel() * (ranks - 1) // ranks
        self.weights.logical_bytes += sent
        self.weights.exact_elements += whole.numel()
        self._exact_bytes += sent
        self._count_weights()

    def _count_weights(self) -> None:
        self.weights.channels(self.gathering.values())
        self.weights.wire_bytes += self._exact_bytes
        self.weights.steps = self.step - self.resumed_at

    @property
    def counters(self) -> Counters:
        """Counters of gradients and weights together."""
        return Counters.together([self.gradients, self.weights])

    @property
    def channel(self) -> Channel:
        """The first channel of gradients."""
        return next(iter(self.reducing.values()))

    @property
    def wire_bytes(self) -> int:
        return self.gradients.wire_bytes + self.weights.wire_bytes

    @property
    def logical_bytes(self) -> int:
        """Bytes that plain FSDP2 sends in the same dtypes, if each collective sends (P − 1) / P of
        its buffer."""
        return self.gradients.logical_bytes + self.weights.logical_bytes

    def summary(self) -> str:
        steps = max(self.gradients.steps, self.weights.steps, 1)
        return (
            f"{self.wire_bytes / steps / 1e6:.3f} MB sent per step instead of "
            f"{self.logical_bytes / steps / 1e6:.3f}: {self._shares()}"
        )

    def _shares(self) -> str:
        def share(sent: int, plain: int) -> str:
            return f"{100 * sent / max(plain, 1):.1f} %"

        return (
            f"{share(self.wire_bytes, self.logical_bytes)} of the bytes, of gradients "
            f"{share(self.gradients.wire_bytes, self.gradients.logical_bytes)}, of weights "
            f"{share(self.weights.wire_bytes, self.weights.logical_bytes)}"
        )

    def _check_complete(self) -> None:
        """Check once a step that no other object has replaced ours, so that all traffic stays
        compressed."""
        known = {id(each.inner) for each in self.param_groups}
        for path, module in self.model.named_modules():
            groups = fsdp_groups(module) if isinstance(module, FSDPModule) else []
            if any(group.fsdp_params and id(group) not in known for group in groups):
                raise InvalidArgument(
                    f"{path or 'the model'} was sharded after compress_fsdp, so its traffic is not "
                    "compressed: call compress_fsdp after the last fully_shard"
                )
        if self.step == 1 and not self._summary_logged:
            self._summary_logged = True
            sides = {"gradients": self.gradients, "weights": self.weights}
            exact = [
                side
                for side, counters in sides.items()
                if side in self._wanted
                and counters.compressed_elements == 0 < counters.exact_elements
            ]
            for side in exact:
                warn_on_first(
                    self.bad.rank,
                    "no %s were compressed: every tensor has fewer than min_numel elements",
                    side,
                )
            if not exact:
                tell_on_first(self.bad.rank, "compressing: %s", self._shares())

    def memory(self) -> dict[str, int]:
        """Return the bytes that compression keeps on this rank between steps, by purpose; valid
        before the first step, too.

        "residuals": residuals of gradients. "proposed": new residuals during a backward; equal
        groups of parameters share them, two at once. "scratch": one message in floats, for
        residuals in a codec. "weights": received weights, or copies for differences; those of the
        root group count until torch has decided not to gather them twice.
        """
        every = [reducer.quantised() for reducer in self.reducers.values()]
        every = every if self.error_feedback else []
        coded = bool(every) and not self.kept_in.lossless
        size = self.kept_in.row_bytes(PIECE) / PIECE if coded else 4.0
        # the residuals of a backward that are all taken or left at its end are proposed together
        together = self._unsettled is not None or (
            self.grad_scaler is not None and self._shared_verdict
        )
        kinds = Counter(tuple(elements) for elements in every)
        proposed = sum(
            (times if together else min(times, AT_ONCE)) * sum(elements)
            for elements, times in kinds.items()
        )
        longest = max((max(elements, default=0) for elements in every), default=0)
        return {
            "residuals": round(size * sum(map(sum, every))),
            "proposed": round(size * proposed),
            "scratch": 4 * min(longest, MESSAGE) if coded else 0,
            "weights": sum(gatherer.kept_bytes() for gatherer in self.gatherers),
        }

    # ------------------------------------------------------------ not finite

    def not_finite(self, reducer: CompressedReduceScatter, shard: torch.Tensor) -> None:
        """Refuse gradients with NaN or infinity, on all ranks alike, because all have received all
        headers."""
        self.bad.refuse(
            shard,
            self.gradients,
            f"gradients of {reducer.param_group.name}",
            reducer.calls,
            raises=self._unsettled is None,  # else ``settle`` does, on all ranks
        )

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part, for a bitwise resume at the same world size: every rank saves
        and loads its own."""
        return exact_residuals(self)

    def elastic_state_dict(self) -> dict[str, Any]:
        """Return the total residual, sharded like the parameters (DTensors), for torch's
        distributed checkpoints.

        Collective, between steps. Loads at any world size. Two hops keep residuals that this form
        does not know.
        """
        return elastic_residuals(self)

    def load_state_dict(self, state: dict[str, Any], *others: dict[str, Any]) -> None:
        """Load this rank's ``state_dict`` or an ``elastic_state_dict``, at any time between steps.

        With the states of all ranks of a run on another number of ranks every residual becomes
        their mean, as with the elastic form.
        """
        if state.get("kind") == "elastic":
            load_elastic(self, state)
        elif others:
            load_mean(self, [state, *others])
        else:
            load_exact(self, state)

    def forget_weights(self) -> None:
        """Gather all weights next time, with ``Difference`` exactly, as after loading other
        weights. Call it on every rank."""
        for gatherer in self.gatherers:
            gatherer.forget()


compress_fsdp = ShardedState  # the public name


def _whole_gradients(param_group: ParamGroup, policy: Policy) -> list[str]:
    """Return the names of parameters with gradients that are compressed as whole tensors."""
    trained = [
        name
        for name, p in zip(param_group.names, param_group.parameters, strict=True)
        if p.requires_grad
    ]
    shapes = {name: param_group.shapes[name] for name in trained}
    return [
        name
        for name, shape in shapes.items()
        if travels_whole(policy.choose(name, shape.numel()), shape)
    ]
