"""FSDP2: gradients and weights of a sharded model cross the network quantised, through torch's own extension points."""

import logging
import zlib
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from commpress.codecs import Codec, Policy
from commpress.codecs.codec import NotOfRows
from commpress.collectives.allreduce import Workspace, any_flag, exchange
from commpress.collectives.consensus import AgreeOver, consensus_over
from commpress.collectives.frame import ALL_TO_ALL, HEADER, Frame
from commpress.collectives.reduce_scatter import Deal
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.transport import Divisible, Transport
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.feedback import ResidualStore, check_feedback
from commpress.integrations.fsdp.param_groups import Unit, units_of
from commpress.integrations.fsdp.policies import policy_for
from commpress.integrations.fsdp.prefetch import Ahead, Late
from commpress.integrations.fsdp.shard_checkpoint import elastic_residuals, exact_residuals, load_elastic, load_exact
from commpress.integrations.fsdp.shard_gradients import CompressedReduceScatter, Hop
from commpress.integrations.fsdp.shard_weights import CompressedAllGather, Difference
from commpress.integrations.observe.counters import Counters
from commpress.work import Steps, Worker, run

log = logging.getLogger("commpress")

MIN_NUMEL = 1024


def compress_fsdp(
    model: nn.Module,
    gradients: str | Codec | Policy | None = "int8",
    weights: str | Codec | Policy | Difference | None = "int8",
    *,
    inside: str | Codec | None = None,
    topology: Topology | None = None,
    hadamard: bool = False,
    min_numel: int = MIN_NUMEL,
    error_feedback: bool = True,
    on_nonfinite: Literal["skip", "propagate", "raise"] = "skip",
    agree_over: AgreeOver | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    regather: bool = False,
    overlap: bool = True,
    timeout: timedelta | None = None,
    checksum: bool = False,
    seed: int = 0,
) -> "ShardedState":
    """Compress what ``fully_shard`` sends; returns the state, which holds residuals and counters.

    Call it on every rank, after the last ``fully_shard`` and before the first step. The sharded parameters, which the
    optimizer sees, stay as they are: only what is gathered from them is quantised.

    - ``gradients``, ``weights``: a codec or its name; a policy by parameter name; None leaves that side to torch. A codec is
      used by role: tensors of fewer than ``min_numel`` elements, norms and biases travel exactly, embeddings and the last
      Linear with at least 8 bits. ``weights=Difference("int4")`` sends changes of weights.
    - ``inside`` with ``topology``: gradients take two hops, inside the node with that codec, between nodes with ``gradients``;
      ``hadamard`` rotates blocks of 64 before the second, which spreads outliers.
    - ``error_feedback``: keep what quantising gradients leaves behind, 4 bytes per parameter of the whole model on each rank.
    - ``on_nonfinite``: gradients of a unit in which a rank has NaN or infinity become zeros on all ranks ("skip"), NaN
      ("propagate", for whoever tests them), or also an error after backward ("raise"). No residual changes.
    - ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal and run backward together, where these are
      more than share a unit: they decide about each unit together. Not the stages of a pipeline.
    - ``grad_scaler``: pass AMP's, so that residuals are kept in unscaled units and infinities reach it.
    - ``regather``: send weights again before backward. Otherwise they are kept from forward to backward as they came, encoded,
      which costs a byte per parameter of the whole model on each rank with "int8", and saves a third of the traffic.
    - ``overlap``: on CPU, communicate on threads of their own: weights ahead of forward and backward, gradients behind it.
    """
    return ShardedState(
        model, gradients, weights, inside=inside, topology=topology, hadamard=hadamard, min_numel=min_numel,
        error_feedback=error_feedback, on_nonfinite=on_nonfinite, agree_over=agree_over, grad_scaler=grad_scaler,
        regather=regather, overlap=overlap, timeout=timeout, checksum=checksum, seed=seed,
    )  # fmt: skip


class ShardedState:
    """What the communication objects of all units share: links, residuals, counters, options. See ``compress_fsdp``."""

    def __init__(
        self,
        model: nn.Module,
        gradients: str | Codec | Policy | None,
        weights: str | Codec | Policy | Difference | None,
        *,
        inside: str | Codec | None,
        topology: Topology | None,
        hadamard: bool,
        min_numel: int,
        error_feedback: bool,
        on_nonfinite: str,
        agree_over: AgreeOver | None,
        grad_scaler: torch.amp.GradScaler | None,
        regather: bool,
        overlap: bool,
        timeout: timedelta | None,
        checksum: bool,
        seed: int,
    ) -> None:
        if on_nonfinite not in ("skip", "propagate", "raise"):
            raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip', 'propagate' or 'raise'")
        if gradients is None and weights is None:
            raise InvalidArgument("gradients and weights are both None: there is nothing to compress")
        if (inside is None) != (topology is None):
            raise InvalidArgument("inside and topology belong together: the codec inside a node, and who shares one")
        if hadamard and inside is None:
            raise InvalidArgument("hadamard is for the second of two hops: pass inside= and topology= as well")
        self.units = units_of(model)
        check_feedback(error_feedback)
        self.model, self.on_nonfinite, self.error_feedback = model, on_nonfinite, error_feedback
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self.timeout, self.seed, self.hadamard = timeout, seed, hadamard
        self.step, self.gradients, self.weights = 0, Counters(), Counters()
        self.residuals, self.residuals_between = ResidualStore(), ResidualStore()
        self.reducing, self.gathering = Workspace(checksum=checksum), Workspace(checksum=checksum)
        self.reducers: dict[Unit, CompressedReduceScatter] = {}
        self.gatherers: list[CompressedAllGather] = []
        self._sequence, self._said, self._told = 0, False, False
        self._error: NonFiniteGradient | None = None
        self._lent: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._links: dict[tuple[int, ...], Divisible] = {}
        self.consensus = consensus_over(agree_over, self.units[0].group, timeout=timeout)
        device = self.units[0].parameters[0].device
        if all(unit.ranks == 1 for unit in self.units):
            log.warning("all shards are on one rank: there is nothing to reduce or gather, so nothing is compressed")

        difference = isinstance(weights, Difference)
        codec = weights.codec if isinstance(weights, Difference) else weights
        gradient_policy = None if gradients is None else policy_for(model, gradients, min_numel=min_numel)
        weight_policy = None if codec is None else policy_for(model, codec, min_numel=min_numel)
        for unit in self.units:
            link = self._link(unit)
            self._agree_on(unit, link, gradient_policy, weight_policy, (inside, str(topology), hadamard, difference, seed))
            if gradient_policy is not None and unit.parts(trainable=True):
                self._attach_gradients(unit, link, gradient_policy, inside, topology)
            if weight_policy is not None:
                gatherer = CompressedAllGather(unit, self, weight_policy, link, difference=difference, keep=not regather)
                unit.module.set_custom_all_gather(gatherer)
                self.gatherers.append(gatherer)
        background = overlap and device.type == "cpu" and not any(link.ordered for link in self._links.values())
        self.worker = Worker("commpress-weights", limit=2) if background and self.gatherers else None
        self.ahead = Ahead(background)
        self.late = Late() if background and self.reducers else None
        if self.late is not None:
            for unit in self.units:
                unit.module.register_forward_pre_hook(self.late.forget)  # type: ignore[attr-defined]

    # ------------------------------------------------------------ setting up

    def _link(self, unit: Unit) -> Divisible:
        """One for all units with the same ranks; its messages meet no others."""
        ranks = tuple(dist.get_process_group_ranks(unit.group))
        if ranks not in self._links:
            self._links[ranks] = own_transport(unit.group, timeout=self.timeout)
        return self._links[ranks]

    def _attach_gradients(
        self,
        unit: Unit,
        link: Divisible,
        policy: Policy,
        inside: str | Codec | None,
        topology: Topology | None,
    ) -> None:
        hops = [Hop(link, policy, self.residuals)]
        if topology is not None and inside is not None:
            hops = self._two_hops(unit, link, policy, policy_for(self.model, inside, min_numel=0), topology)
        reducer = CompressedReduceScatter(unit, self, hops)
        unit.module.set_custom_reduce_scatter(reducer)
        self.reducers[unit] = reducer

    def _two_hops(
        self, unit: Unit, link: Divisible, policy: Policy, inside: Policy, topology: Topology
    ) -> list[Hop]:
        nodes = topology.nodes
        if topology.size != unit.ranks or len({len(node) for node in nodes}) > 1:
            raise InvalidArgument(
                f"topology is {str(topology)!r}, expected nodes of equal size with {unit.ranks} ranks in all"
            )
        (home,) = [node for node in nodes if link.rank in node]
        place = home.index(link.rank)
        rows = tuple(tuple(node[i] for node in nodes) for i in range(len(home)))
        within = [link.subset(node) for node in nodes]
        across = [link.subset(row) for row in rows]
        first, second = within[nodes.index(home)], across[place]
        assert first is not None
        assert second is not None
        return [
            Hop(first, inside, self.residuals, rows=rows),
            Hop(second, policy, self.residuals_between, own=rows[place], rotated=self.hadamard),
        ]

    def _agree_on(
        self, unit: Unit, link: Divisible, gradients: Policy | None, weights: Policy | None, options: object
    ) -> None:
        """All ranks cut this unit alike and name the same codecs, or an error names who does not."""
        said = [repr(options)]
        for part in unit.parts(trainable=False):
            codecs = [p.choose(part.name, part.numel) for p in (gradients, weights) if p is not None]
            for codec in codecs:
                if isinstance(codec, NotOfRows):
                    codec.refuse()
            specs = [gradients is None, weights is None, *(codec.spec for codec in codecs)]
            said.append(f"{part.name} {part.width} {part.numel} {specs}")
        numel = sum(parameter.numel() for parameter in unit.parameters)
        run(self._headers("compress_fsdp", numel, zlib.crc32("\n".join(said).encode()), False, link, self.sequence(1)))

    # ------------------------------------------------------------ what the units' objects ask for

    def begin(self, reducer: CompressedReduceScatter) -> int:
        """A seed for stochastic codecs; counts steps by the unit that has reduced most often."""
        if reducer.calls >= self.step:
            self._check_complete()
            self.step, self._error = reducer.calls + 1, None
        return self.seed * 1_000_003 + reducer.calls

    def reductions(self, unit: Unit) -> int:
        """How often its gradients have been reduced."""
        return self.reducers[unit].calls if unit in self.reducers else 0

    def key(self) -> int:
        """A seed for the weights of this step."""
        return self.seed * 1_000_003 + self.step

    def gain(self) -> float:
        return 1.0 / self.grad_scaler.get_scale() if self.grad_scaler else 1.0

    def sequence(self, count: int) -> int:
        self._sequence += count
        return self._sequence - count

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer until it is given back. Threads may share this."""
        try:
            return self._lent.setdefault((numel, dtype, device), []).pop()
        except IndexError:
            return torch.zeros(numel, dtype=dtype, device=device)

    def give_back(self, tensor: torch.Tensor) -> None:
        self._lent[tensor.numel(), tensor.dtype, tensor.device].append(tensor)

    def any_rank(self, flag: bool, transport: Transport, sequence: int) -> Steps[bool]:
        """Whether ``flag`` is set on any rank: a header to everybody."""
        return self._headers("any", 0, 0, flag, transport, sequence)

    def _headers(
        self, what: str, numel: int, label: int, flag: bool, transport: Transport, sequence: int
    ) -> Steps[bool]:
        device = self.units[0].parameters[0].device
        outbox, inbox = (torch.zeros(transport.size, HEADER + 8, dtype=torch.uint8, device=device) for _ in range(2))
        frame = Frame(ALL_TO_ALL, transport.size, what, numel, sequence, label)
        mark = torch.full((1,), int(flag), dtype=torch.uint8, device=device)
        yield from exchange(transport.all_to_all, inbox, outbox, frame, mark, transport, self.reducing)
        return bool(any_flag(inbox))

    def outside_backward(self) -> None:
        if not self._told:
            self._told = True
            log.info("gradients are reduced outside of backward, as by a pipeline: at once, not behind backward (overlap=True)")

    # ------------------------------------------------------------ counting

    def reduced(self, reducer: CompressedReduceScatter, buffer: torch.Tensor, legs: list[tuple[Transport, list[Deal]]]) -> None:
        ranks = reducer.unit.ranks
        self.gradients.logical_bytes += buffer.element_size() * buffer.numel() * (ranks - 1) // ranks
        for i, (transport, plan) in enumerate(legs):
            self.gradients.sent(plan, transport.size, elements=i == len(legs) - 1)
        self.gradients.steps = self.step
        self.gradients.encode_seconds, self.gradients.decode_seconds = (
            self.reducing.encode_seconds,
            self.reducing.decode_seconds,
        )

    def gathered(self, whole: torch.Tensor, plan: list[Deal], transport: Transport, *, headers: int = 0) -> None:
        ranks = transport.size
        self.weights.logical_bytes += whole.element_size() * whole.numel() * (ranks - 1) // ranks
        self.weights.sent(plan, ranks)
        self.weights.messages += headers
        self.weights.wire_bytes += headers * (HEADER + 8) * (ranks - 1)
        self.weights.steps = self.step
        self.weights.encode_seconds, self.weights.decode_seconds = (
            self.gathering.encode_seconds,
            self.gathering.decode_seconds,
        )

    def gathered_exactly(self, whole: torch.Tensor, ranks: int) -> None:
        """By torch, among the ranks of a smaller mesh after forward."""
        sent = whole.element_size() * whole.numel() * (ranks - 1) // ranks
        self.weights.logical_bytes += sent
        self.weights.wire_bytes += sent
        self.weights.exact_elements += whole.numel()

    @property
    def wire_bytes(self) -> int:
        return self.gradients.wire_bytes + self.weights.wire_bytes

    @property
    def logical_bytes(self) -> int:
        """What plain FSDP2 sends in the same dtypes where each collective sends (P − 1) / P of its buffer."""
        return self.gradients.logical_bytes + self.weights.logical_bytes

    def summary(self) -> str:
        steps = max(self.step, 1)
        return (
            f"{self.wire_bytes / steps / 1e6:.3f} MB sent per step instead of {self.logical_bytes / steps / 1e6:.3f}: "
            f"{self._shares()}"
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
        """Once a step: nothing of this model may travel uncompressed because somebody put another object in our place."""
        known = {id(unit.module) for unit in self.units}
        for path, module in self.model.named_modules():
            own = any(True for _ in module.parameters(False))
            if own and isinstance(module, FSDPModule) and id(module) not in known:
                raise InvalidArgument(
                    f"{path or 'the model'} was sharded after compress_fsdp, so its traffic is not compressed: call "
                    "compress_fsdp after the last fully_shard"
                )
        if self.step == 1 and not self._said:
            self._said = True
            counters = [c for c, used in ((self.gradients, self.reducers), (self.weights, self.gatherers)) if used]
            if any(counter.compressed_elements == 0 for counter in counters):
                log.warning("NOTHING WAS COMPRESSED on one side: the policy left every tensor exact: %s", self._shares())
            else:
                log.info("compressing: %s", self._shares())

    # ------------------------------------------------------------ not finite

    def not_finite(self, reducer: CompressedReduceScatter, shard: torch.Tensor) -> None:
        """The same decision on every rank: all have seen all headers."""
        self.gradients.skipped_buckets += 1
        count = self.gradients.skipped_buckets
        zeros = self.on_nonfinite == "skip" and self.grad_scaler is None
        shard.fill_(0.0 if zeros else float("nan"))
        if self.on_nonfinite == "raise":
            if self._error is None:
                self._error = NonFiniteGradient(
                    f"the gradients of {reducer.unit.name} hold NaN or infinity on some rank at step {reducer.calls}. None of "
                    "its residuals was changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
                )
                if torch._C._current_graph_task_id() < 0:
                    self._raise()
                Variable._execution_engine.queue_callback(self._raise)
        elif count <= 3 or count % 100 == 0:
            log.warning(
                "step %d: gradients of %s held NaN or infinity on some rank and became %s on all (%d so far)",
                reducer.calls, reducer.unit.name, "zeros" if zeros else "NaN", count,
            )  # fmt: skip

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume at the same world size: every rank saves and loads its own."""
        return exact_residuals(self)

    def elastic_state_dict(self) -> dict[str, Any]:
        """What all ranks still owe, sharded like the parameters (DTensors), for torch's distributed checkpoints.

        Collective, between steps. Loads at any world size. Two hops keep residuals that this form does not know.
        """
        return elastic_residuals(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From this rank's ``state_dict`` or an ``elastic_state_dict``, at any time between steps."""
        if state.get("kind") == "elastic":
            load_elastic(self, state)
        else:
            load_exact(self, state)

    def forget_weights(self) -> None:
        """Gather all weights next time, with ``Difference`` exactly, as after loading others. On every rank."""
        for gatherer in self.gatherers:
            gatherer.forget()
