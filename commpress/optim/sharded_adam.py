"""1-bit Adam with its state partitioned over the ranks (ZeRO-1): master weights, variance and momentum of 1/P each.

Each rank owns one row of every piece (``kernels.pieces``), the row that it reduces. One step:

    to the owner     what is new in the momentum, (1 − β1)·g_i + e_i, in one bit; e_i keeps the rest       (all-to-all)
    at the owner     m ← β1·m + mean        v as Adam, until it freezes        w ← Adam's step from m and v
    to everybody     w − x in one bit, x ← x + what arrived                                               (all-gather)

Exact steps send gradients to the owner and w to everybody as they are.

Note: only what is new. The owner has β1·m already, so nothing is lost and nobody else needs m.

Note: no second residual. What the all-gather could not say is w − x itself, the gap between master weights and the
parameters that all ranks hold; the next step sends it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Outcome, any_flag, exchange, settle
from commpress.collectives.buckets import Message, Span, messages, share
from commpress.collectives.checkpoint import elastic_state, exact_state, residuals_of
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, HEADER, Frame
from commpress.collectives.transport import Transport
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.kernels import arithmetic
from commpress.kernels.adam import adam_arithmetic
from commpress.kernels.pieces import BLOCK, HASH, KIND, NUMEL, SHARD, WIDTH, Piece, Pieces, cut
from commpress.optim.flat import Flat
from commpress.optim.onebit_adam import check_defaults
from commpress.optim.optimizer import Round
from commpress.optim.stepping import SteppingOptimizer
from commpress.torch_private import adam
from commpress.work import Steps

log = logging.getLogger("commpress")


@dataclass
class _Row:
    """One message and where this rank's row of it lies in the sharded buffers."""

    message: Message
    pieces: Pieces  # the row alone, as a message of one row
    feedback: ErrorFeedback | None
    first: int
    numel: int


class ShardedOneBitAdam(SteppingOptimizer):
    """AdamW: per parameter 12/P bytes of state and 4 of residual on each rank, about one bit each way per step.

    ``warmup_steps`` exact steps come first. Other options are those of ``OneBitAdam``. All ranks hold the same parameters
    after each step. Gradients must be local: no DistributedDataParallel around the model, or its ``no_sync``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        codec: str | Codec | Policy = "sign",
        min_numel: int = 256,
        variance_floor: float = 1e-3,
        process_group: Any = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_defaults(defaults)
        if warmup_steps < 1:
            raise InvalidArgument(f"warmup_steps is {warmup_steps!r}, expected at least 1: it fixes the variance")
        self.warmup_steps, self.floor, self.steps_done = warmup_steps, variance_floor, 0
        super().__init__(params, defaults)
        self.connect(transport, process_group, timeout, grad_scaler=grad_scaler)
        self.flat = Flat(*self.named_parameters())
        self.work, self.kernels = self.flat.new(), adam_arithmetic(self.flat.device)
        self.residuals = ResidualStore()
        spans = [Span(name, *place) for name, place in zip(self.flat.names, self.flat.places, strict=True)]
        size = self.transport.size
        self.exact_rows = self._rows(messages(spans, policy_of("none"), size, feedback=False))
        policy = policy_of(codec, min_numel=min_numel)
        self.rows = self._rows(messages(spans, policy, size))
        self.counters.shares = {s.name: share(s.numel, policy.choose(s.name, s.numel), size) for s in spans}
        numel = sum(row.numel for row in self.rows)
        self.master, self.momentum, self.variance, self.mean = (
            torch.zeros(numel, device=self.flat.device) for _ in range(4)
        )
        self.reciprocal = self.mean[:0]
        self._take_parameters(self.master)

    def _rows(self, plan: list[Message]) -> list[_Row]:
        rows, first = [], 0
        for message in plan:
            lines = message.pieces.table.tolist()
            own = [Piece(t[SHARD], t[WIDTH], t[KIND], t[BLOCK], t[HASH], False) for t in lines]
            feedback = self.residuals.attach(message.keys, message.pieces, self.flat.device)
            rows.append(_Row(message, cut(own, 1), feedback, first, message.pieces.shard))
            first += message.pieces.shard
        return rows

    def _owned(self) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, first element of it, elements, first element of the sharded buffers) of what this rank owns."""
        names = {name: i for i, name in enumerate(self.flat.names)}
        for row in self.rows:
            for (name, offset), t in zip(row.message.keys, row.message.pieces.table.tolist(), strict=True):
                begin = min(self.transport.rank * t[WIDTH], t[NUMEL])
                yield names[name], offset + begin, min(t[WIDTH], t[NUMEL] - begin), row.first + t[SHARD]

    def _take_parameters(self, out: torch.Tensor) -> None:
        for i, begin, numel, at in self._owned():
            out[at : at + numel] = self.flat.parameters[i].detach().reshape(-1)[begin : begin + numel]

    # ------------------------------------------------------------ one step

    def steps(self) -> Steps[bool]:
        kind = self.round()
        if kind is Round.LOCAL:
            self.local()
        taken = kind is Round.LOCAL or (yield from self._together(kind))
        if taken:
            self.steps_done += 1
            self.after(kind)
        else:
            log.warning("step %d was skipped on all ranks: a gradient holds NaN or infinity", self.steps_done)
        self.counters.step(kind.value, taken, self.sent_bytes(), self.flat.numel, self.transport.size)
        return taken

    def round(self) -> Round:
        return Round.EXACT if self.steps_done < self.warmup_steps else Round.COMPRESSED

    def prepare(self, kind: Round) -> None:
        """work := what goes to the owners."""
        for group, at in self._groups():
            for i in at:
                g, into = self.flat.gradient(i), self.flat.view(self.work, i)
                if g is None:
                    into.zero_()
                else:
                    torch.mul(g, self.gain() * (1.0 if kind is Round.EXACT else 1 - group["betas"][0]), out=into)

    def local(self) -> None:
        """A step without communication: there is none here."""

    def after(self, kind: Round) -> None:
        """Schedules, once a step is taken."""

    def _together(self, kind: Round) -> Steps[bool]:
        exact = kind is Round.EXACT
        rows = self.exact_rows if exact else self.rows
        self.prepare(kind)
        outcomes = []
        for row in rows:
            outcomes.append((yield from self._to_owners(row)))
        taken = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=taken)
        if taken:
            self._update(exact)
            if not exact:
                self._take_parameters(self.mean)  # no longer needed as such
                torch.sub(self.master, self.mean, out=self.mean)
            for row in rows:
                yield from self._to_everybody(row, self.master if exact else self.mean)
            for i, p in enumerate(self.flat.parameters):
                (p.copy_ if exact else p.add_)(self.flat.view(self.work, i))
        return taken

    def _to_owners(self, row: _Row) -> Steps[Outcome]:
        message, pieces, device = row.message, row.message.pieces, self.flat.device
        kernels, size = arithmetic(device), self.transport.size
        outbox, inbox = (self.workspace.wires(message, size, device) for _ in range(2))
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        old = row.feedback
        new = self.workspace.residual(message, device) if old is not None else None
        kernels.encode(
            self.work, outbox[:, HEADER:], flag, pieces, key=self.steps_done, residual=old and old.sent,
            residual_scale=old and old.sent_scale, new_residual=new and new.sent, new_scale=new and new.sent_scale,
        )  # fmt: skip
        frame = Frame(ALL_TO_ALL, size, message.codec, pieces.numel, self.next_sequence(), message.label)
        yield from exchange(self.transport.all_to_all, inbox, outbox, frame, flag, self.transport, self.workspace)
        kernels.decode_mean(inbox[:, HEADER:], self.mean[row.first : row.first + row.numel], pieces, self.transport.rank)
        finite = not bool(any_flag(inbox))
        self.workspace.give_wires(outbox, inbox)
        return Outcome(message, finite, old, new, self.workspace)

    def _to_everybody(self, row: _Row, values: torch.Tensor) -> Steps[None]:
        message, device = row.message, self.flat.device
        kernels, size = arithmetic(device), self.transport.size
        reply, every = self.workspace.wires(message, 1, device), self.workspace.wires(message, size, device)
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        kernels.encode(
            values[row.first : row.first + row.numel], reply[:, HEADER:], flag, row.pieces, key=self.steps_done + 1
        )
        frame = Frame(ALL_GATHER, size, message.codec, message.pieces.numel, self.next_sequence(), message.label)
        yield from exchange(self.transport.all_gather, every, reply, frame, flag, self.transport, self.workspace)
        kernels.decode(every[:, HEADER:], self.work, message.pieces)
        self.workspace.give_wires(reply, every)

    def _update(self, exact: bool) -> None:
        """Momentum, variance and master weights of the own rows from ``mean``."""
        if not exact and self.reciprocal.numel() == 0:
            self._freeze()
        for number, (group, (a, b)) in enumerate(zip(self.param_groups, self._ranges(), strict=True)):
            w, m, v, mean = (t[a:b] for t in (self.master, self.momentum, self.variance, self.mean))
            if exact:
                (beta1, beta2), (lr, decay) = group["betas"], self.exact_rates(group)
                adam(
                    [w], [mean], [m], [v], [], [torch.tensor(float(self.variance_updates()))], fused=True, amsgrad=False,
                    beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=group["eps"], maximize=False,
                    decoupled_weight_decay=True,
                )  # fmt: skip
            else:
                self.descend(number, w, m, mean, self.reciprocal[a:b])

    def descend(self, number: int, w: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, r: torch.Tensor) -> None:
        """One group's momentum and master weights of the own rows, from the mean of what came."""
        group = self.param_groups[number]
        beta1, lr = group["betas"][0], float(group["lr"])
        m.mul_(beta1).add_(mean)
        correction = 1 - beta1 ** (self.steps_done + 1)
        w.mul_(1 - lr * group["weight_decay"]).addcmul_(m, r, value=-lr / correction)

    def variance_updates(self) -> int:
        """How often the variance was updated before this step."""
        return min(self.steps_done, self.warmup_steps)

    def exact_rates(self, group: dict[str, Any]) -> tuple[float, float]:
        return float(group["lr"]), group["weight_decay"]

    def _freeze(self) -> None:
        """reciprocal := 1 / (√v̂ + ε), no variance below its share of the own row's mean."""
        self.reciprocal = torch.zeros_like(self.variance)
        updates = self.variance_updates()
        group_of = [group for group, at in self._groups() for _ in at]
        for i, _, numel, at in self._owned():
            v, group = self.variance[at : at + numel], group_of[i]
            if numel > 0:
                root = torch.maximum(v, self.floor * v.mean()).div_(1 - group["betas"][1] ** updates).sqrt_()
                self.reciprocal[at : at + numel] = root.add_(group["eps"]).reciprocal_()

    def _groups(self) -> Iterator[tuple[dict[str, Any], range]]:
        at = 0
        for group in self.param_groups:
            yield group, range(at, at + len(group["params"]))
            at += len(group["params"])

    def _ranges(self) -> list[tuple[int, int]]:
        """Where each group's rows lie in the sharded buffers: parameters are placed in order, so side by side."""
        starts: dict[int, int] = {}
        for i, _, _, at in self._owned():
            starts.setdefault(i, at)
        firsts = [starts[at[0]] if len(at) else None for _, at in self._groups()]
        edges = [first for first in firsts if first is not None] + [self.master.numel()]
        return list(pairwise(edges))

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume at the same world size; parameters come with the model."""
        return self._state(exact_state(self.residuals, self.transport, self.steps_done))

    def elastic_steps(self) -> Steps[dict[str, Any]]:
        residuals = yield from elastic_state(self.residuals, self.transport, self.steps_done, self.next_sequence())
        return self._state(residuals)

    def _state(self, residuals: dict[str, Any]) -> dict[str, Any]:
        shards = [
            {"parameter": i, "begin": begin}
            | {name: getattr(self, name)[at : at + numel].clone() for name in ("master", "momentum", "variance")}
            for i, begin, numel, at in self._owned()
        ]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "commpress": residuals, "shards": shards, "warmup": self.warmup_steps}

    @torch.no_grad()
    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """From this rank's ``state_dict`` or from all ranks' ``elastic_state_dict``s; load the model first."""
        self.steps_done, residuals = residuals_of([state["commpress"] for state in states], self.transport)
        whole = {name: self.flat.new() for name in ("master", "momentum", "variance")}
        for state in states:
            for shard in state["shards"]:
                i, begin = shard["parameter"], shard["begin"]
                if i >= len(self.flat.places) or begin + shard["master"].numel() > self.flat.places[i][1]:
                    raise StateMismatch(f"the state has elements of parameter {i} that this model lacks")
                first = self.flat.places[i][0] + begin
                for name, buffer in whole.items():
                    buffer[first : first + shard[name].numel()] = shard[name]
        for i, begin, numel, at in self._owned():
            first = self.flat.places[i][0] + begin
            for name, buffer in whole.items():
                getattr(self, name)[at : at + numel] = buffer[first : first + numel]
        self.warmup_steps = int(states[0]["warmup"])
        for group, saved in zip(self.param_groups, states[0]["param_groups"], strict=True):
            group.update(saved)
        self.residuals.load(residuals)
        self.reciprocal = self.mean[:0]
