"""Muon over the ranks: each matrix has one owner, which has its momentum and orthogonalises it for
all.

    to the owner  gᵢ + eᵢ in ``codec``, eᵢ keeps the rest; the mean is ḡ               (all-to-all)
    at the owner  m ← μ·m + (1 − μ)·ḡ       u = NS(ḡ + μ·(m − ḡ)), or NS(m) without Nesterov
    to everybody  û = Q(u + f) in ``update_codec``, f keeps the rest                   (all-gather)
    everywhere    x ← (1 − γλ)·x − γ·s·û    s depends on the shape (``adjust_lr_fn``)

NS is Newton and Schulz's iteration in bfloat16, as in ``torch.optim.Muon``. Other tensors are
averaged over all ranks, which all take AdamW's step.

Note: what is coded where. NS lifts small singular directions and the noise of a code with them, by
four to seven times. So a gradient takes eight bits. The update has no outliers, and its error goes
into the next one: it takes four.

Note: f counts updates. If γ changes from step to step, what comes later counts at the later γ.

Note: nothing changes before all messages of a step have arrived, finite on every rank.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Unpack

import torch

from commpress.codecs import Codec, codec_named, policy_of
from commpress.codecs.codec import NoRows
from commpress.collectives.allreduce import Outcome, settle
from commpress.collectives.buckets import Span
from commpress.collectives.change import Change
from commpress.collectives.exchange import Exchange
from commpress.collectives.frame import HEADER
from commpress.collectives.handover import Divided
from commpress.collectives.owners import Owners
from commpress.collectives.residual_state import (
    Residuals,
    check_widths,
    residuals_of,
    residuals_of_all,
)
from commpress.collectives.state import ConnectOptions, State, Stateful
from commpress.errors import (
    InvalidArgument,
    Mismatch,
    StateMismatch,
    check_counts,
    check_entries,
    refuse_model,
    refuse_unknown,
)
from commpress.feedback import ResidualStore
from commpress.logs import warn_on_first
from commpress.optim.flat import Flat, adam_step
from commpress.optim.layout import alike, local, named_parameters, refuse_held, tensors_in
from commpress.optim.muon_shards import MuonShards, mesh_of, rows_joined, rows_state
from commpress.optim.newton_schulz import direction, move, owners_of
from commpress.optim.optimizer import (
    OptimizerCounters,
    bits_of,
    check_numbers,
    checksum_of,
    different_from_first,
    loss_of,
)
from commpress.plan.assignment import errors_of
from commpress.torch_private import untraced
from commpress.work import Steps

COARSEST = 0.01  # error of a gradient's codec on Gaussian numbers: int8 has 0.007, seven bits 0.013
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
MOMENTS = ("exp_avg", "exp_avg_sq")
ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Divided, Stateful, torch.optim.Optimizer):
    """``torch.optim.Muon`` for matrices and ``torch.optim.AdamW`` for other tensors; averages over
    the ranks in ``step()``.

    Gradients must be each rank's own: run the model without DistributedDataParallel, or call
    ``commpress.keep_local(ddp)``. All ranks begin with the same weights. Under ``fully_shard``, on
    a mesh of one dimension, gradients are averaged already: only rows of matrices travel, to their
    owners and back.

    A tensor of two dimensions is a matrix, unless its group says ``use_muon=False``, as it should
    of embeddings and output layers: ``[{"params": hidden}, {"params": rest, "use_muon": False,
    "lr": 3e-4}]``. Momentum of a matrix is on its owner alone, AdamW's state on every rank; both
    are float32, and half-precision parameters have float32 master weights.

    Each of several matrices in one tensor is orthogonalised by itself: with ``"use_muon": True`` a
    tensor of three dimensions is a batch of them, as experts are, and ``"split": (64, 16, 16)``
    divides the rows of a group's matrices, into query, key and value or into heads.

    - ``momentum``, ``nesterov``, ``ns_coefficients``, ``ns_steps``, ``adjust_lr_fn``: as in torch.
    - ``adamw``: options of ``torch.optim.AdamW`` for tensors that are no matrices; ``lr``,
      ``betas``, ``eps``, ``weight_decay``.
    - ``codec``: of gradients, with error feedback at the sender; int8 or finer. None sends float32.
    - ``update_codec``: of a matrix's update, with error feedback at the owner. None sends bfloat16,
      in which updates are computed, so nothing is lost.
    - ``check_every``: compare the weights of all ranks every so many steps; 0: never.

    Other options are those of ``Stateful.connect``; matrices travel in ``codec`` whatever their
    size.
    """

    averages_gradients = True  # over all ranks, in ``step``: nothing else may
    shards: MuonShards | None = None  # parameters of which every rank has some rows
    # a GradScaler would skip steps on single ranks: ``step`` refuses it
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        codec: str | Codec | None = "int8",
        update_codec: str | Codec | None = "int4",
        check_every: int = 1000,
        **options: Unpack[ConnectOptions],
    ) -> None:
        refuse_model(params)
        refuse_unknown("Muon", options, Muon, Stateful.connect)
        check_counts(check_every=check_every, min_numel=options.get("min_numel", 0))
        there = codec_of("codec", codec, "none")
        back = codec_of("update_codec", update_codec, "bf16")
        check_fine("codec", there)
        refuse_unknown("adamw", adamw or {}, lambda lr, betas, eps, weight_decay: None)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        torch.optim.Optimizer.__init__(self, divided(params, ADAMW | dict(adamw or {})), defaults)
        parameters, names = named_parameters(self.param_groups)
        if (mesh := self._check(parameters, names)) is not None:
            if given := {"process_group", "transport"} & options.keys():
                raise InvalidArgument(
                    f"{min(given)} is given and parameters are rows over {mesh}, whose ranks "
                    "exchange them: leave it out"
                )
            options["process_group"] = mesh.get_group()
        self.averages_gradients = mesh is None
        self.check_every, self.counters = check_every, OptimizerCounters()
        self.connect(codec=there, **options)
        if self.channel.size == 1:  # nothing travels
            there, back = codec_named("none"), codec_named("bf16")
            self.exchanges.use(policy_of(there))
        self.flat, lossless = Flat(parameters, names), update_codec is None
        self.groups = [group for group in self.param_groups for _ in group["params"]]
        self.matrices = [i for i, group in enumerate(self.groups) if group["use_muon"]]
        self.others = [i for i, group in enumerate(self.groups) if not group["use_muon"]]
        if mesh is None:
            self._place(there, back, lossless=lossless)
        else:
            among = self.groups, self.channel
            self.shards = MuonShards(self.flat, *among, there, back, lossless=lossless)
            for i, buffer in self.shards.batches.items():
                p = self.flat.parameters[i]
                self.state[p]["momentum_buffer"] = alike(buffer, p)
        for name, mine in self._mine().items():
            i = self.flat.names.index(name)
            self.state[self.flat.parameters[i]]["momentum_buffer"] = mine["momentum_buffer"]
        for i in self.others:
            p, shape = self.flat.parameters[i], self.flat.shapes[i]
            zeros = {kind: torch.zeros(shape, device=self.flat.device) for kind in MOMENTS}
            moments = {kind: alike(each, p) for kind, each in zeros.items()}
            self.state[p] |= {"step": torch.zeros(()), **moments}

    def _check(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Any:
        """Check groups and parameters; return the mesh whose ranks have rows of each, if any."""
        for group in self.param_groups:
            (check_matrices if group["use_muon"] else check_numbers)(group)
        refuse_held("Muon", zip(names, parameters, strict=True), "averages over all ranks")
        return mesh_of(parameters, names)

    def _place(self, there: Codec, back: Codec, *, lossless: bool) -> None:
        flat, size, device = self.flat, self.channel.size, self.flat.device
        owners = owners_of(
            [flat.shapes[i] for i in self.matrices],
            size,
            [self.groups[i].get("split") for i in self.matrices],
        )
        spans, among = self._spans(self.matrices), (self.channel, device)
        self.gradients = Owners(spans, owners, there, *among)
        self.updates = Owners(spans, owners, back, *among, feedback=False)
        self.work = flat.new()
        # of this rank's matrices, side by side: the last is what updates still lack
        rows = 3 if lossless else 4
        self.momentum, self.mean, self.sent, *lacking = torch.zeros(
            rows, self.gradients.numel, device=device
        )
        self.lacking: torch.Tensor | None = lacking[0] if lacking else None
        self.own = {self.matrices[j]: j for j in self.gradients.own()}

    def _spans(self, indices: Iterable[int]) -> list[Span]:
        flat = self.flat
        return [Span(flat.names[i], *flat.places[i]) for i in indices]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is constructed; later it is refused, because matrices
        would change owners."""
        if hasattr(self, "flat"):
            raise InvalidArgument(
                "add_param_group was called after construction, which would give matrices other "
                "owners: construct Muon with all parameters, also with those that train later "
                "(without a gradient on any rank they are left alone)"
            )
        super().add_param_group(param_group)

    # ------------------------------------------------------------ one step

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; one whose gradients are not finite on some rank is left out on all."""
        loss = loss_of(closure)
        if hasattr(self, "found_inf"):
            raise InvalidArgument(
                "step was called by a GradScaler, which skips steps on single ranks: train in "
                "bfloat16, which needs no loss scale, and call step yourself"
            )
        self.channel.run(self.steps())
        return loss

    def steps(self) -> Steps[bool]:
        """Take one step, as an algorithm that may wait; return whether it was taken, the same on
        every rank."""
        self.flat.check()
        self.groups = [group for group in self.param_groups for _ in group["params"]]
        if self.channel.size > 1 and self.check_every and self.steps_done % self.check_every == 0:
            yield from self._compare()
        before = self.channel.sent_bytes
        taken = yield from self._whole() if self.shards is None else self._in_rows(self.shards)
        self.handover.settle(taken=taken)
        self.steps_done += 1
        sent, numel = self.channel.sent_bytes - before, self.flat.numel
        self.counters.step("compressed", taken, sent, numel, self.channel.size)
        if not taken:
            warn_on_first(
                self.channel.rank,
                "step %d was skipped on all ranks: gradients held NaN or infinity on some rank",
                self.steps_done,
            )
        return taken

    def _whole(self) -> Steps[bool]:
        """Take the step of parameters that are whole on every rank."""
        outcomes, trained = yield from self._reduced()
        taken = all(outcome.finite for outcome in outcomes)
        if taken:
            self._orthogonalise(trained)
            taken = all((yield from self.updates.gather(self.sent, self.work, key=self.steps_done)))
        if taken:
            self._apply(trained)
        settle(outcomes, taken=taken)
        return taken

    def _in_rows(self, shards: MuonShards) -> Steps[bool]:
        """Take the step of parameters of which this rank has rows."""
        finite, trained = yield from shards.agreed()
        if finite:
            finite = yield from shards.steps(self.groups, trained, key=self.steps_done)
            means = {}
            for i in (i for i in self.others if i in trained):
                gradient = self.flat.gradient(i)
                means[i] = torch.zeros_like(self.flat.weights[i]) if gradient is None else gradient
            self._adamw(means)
            self.flat.publish()
        return finite

    def _reduced(self) -> Steps[tuple[list[Outcome], set[int]]]:
        """Average gradients: of this rank's matrices in ``mean``, of other tensors in ``work``.
        Return the parameters that have a gradient on some rank, too."""
        flat = self.flat
        gradients = [flat.gradient(i) for i in range(len(flat.parameters))]
        for i, gradient in enumerate(gradients):
            into = flat.view(self.work, i)
            into.zero_() if gradient is None else into.copy_(gradient)
        trained = {
            i
            for i, (p, g) in enumerate(zip(flat.parameters, gradients, strict=True))
            if p.requires_grad or g is not None
        }
        asks = any(gradients[i] is None for i in trained)
        key, exchange = self.steps_done, self._exchange()
        outcomes = yield from self.gradients.reduce(self.work, self.mean, key=key, asks=asks)
        call = self.channel.call(exchange.sequences, key, asks=asks)
        outcomes += yield from exchange.steps(self.channel, self.work, call)
        if any(outcome.asks for outcome in outcomes):
            has = [float(gradient is not None) for gradient in gradients]
            every = yield from self.channel.gathered(has)
            trained = {i for i in range(len(has)) if every[:, i].any()}
        return outcomes, trained

    def _exchange(self) -> Exchange:
        flat, others = self.flat, self.others
        return self.exchanges.of(
            tuple(others),
            lambda: (self._spans(others), [flat.shapes[i] for i in others]),
            flat.device,
        )

    def _orthogonalise(self, trained: set[int]) -> None:
        """Write this rank's updates to ``sent``, and momentum as it will be to ``mean``."""
        self.sent.zero_()
        for i, j in self.own.items():
            group, shape = self.groups[i], self.flat.shapes[i]
            rows = (self.momentum, self.mean, self.sent)
            before, mean, sent = (self.gradients.view(row, j).view(shape) for row in rows)
            rest = 1 - group["momentum"]
            if i not in trained:  # only what gradients lacked before has come
                mean.copy_(before.add(mean, alpha=rest))
                continue
            after = before.lerp(mean, rest)
            sent.copy_(direction(mean, after, group))
            mean.copy_(after)
            if self.lacking is not None:
                sent.add_(self.gradients.view(self.lacking, j).view(shape))

    def _apply(self, trained: set[int]) -> None:
        """Take the step: decoded updates and mean gradients are in ``work``."""
        flat = self.flat
        self.momentum.copy_(self.mean)
        lacking = self.lacking
        for i, j in self.own.items():
            if lacking is not None and i in trained:
                sent, decoded = self.gradients.view(self.sent, j), flat.view(self.work, i)
                torch.sub(sent, decoded.view(-1), out=self.gradients.view(lacking, j))
        for i in self.matrices:
            if i in trained:
                move(flat.weights[i], flat.view(self.work, i), self.groups[i])
        means = {i: flat.view(self.work, i) for i in self.others}
        for i in means.keys() - trained:
            momentum, rest = self._state(i, "exp_avg"), 1 - self.groups[i]["betas"][0]
            momentum.add_(means.pop(i), alpha=rest)
        self._adamw(means)
        flat.publish()

    def _adamw(self, means: Mapping[int, torch.Tensor]) -> None:
        """Take AdamW's step of the parameters of which these are the mean gradients."""
        for group in self.param_groups:
            if at := [i for i in means if self.groups[i] is group]:
                weights = [self.flat.weights[i] for i in at]
                lists = ([self._state(i, kind) for i in at] for kind in (*MOMENTS, "step"))
                adam_step(group, weights, [means[i] for i in at], *lists)

    def _state(self, i: int, kind: str) -> torch.Tensor:
        return local(self.state[self.flat.parameters[i]][kind])

    def _compare(self) -> Steps[None]:
        """Check that parameters, options and weights are equal on all ranks."""
        flat = self.flat
        way = self if self.shards is None else self.shards
        codecs = way.gradients.codec.spec, way.updates.codec.spec, self.exchanges.policy
        shapes = [tuple(p.shape) for p in flat.parameters]
        said = repr((flat.names, shapes, codecs, self.schedule()))
        weights = checksum_of(map(bits_of, flat.weights)) if self.shards is None else 0
        mine = [zlib.crc32(said.encode()), self.steps_done, weights]
        every = yield from self.channel.gathered([*map(float, mine)])
        if ranks := different_from_first(every):
            what = (
                "parameters, codecs or options" if every[ranks[0], 0] != every[0, 0] else "weights"
            )
            raise Mismatch(
                f"after {self.steps_done} steps ranks {list(ranks)} have other {what} than rank 0: "
                "construct Muon alike on all ranks, with the same weights, and change these only "
                "through it",
                ranks=ranks,
            )

    def step_bytes(self) -> int:
        """Return the bytes, headers included, that this rank sends in a step: (P − 1) times a row
        of each message."""
        if self.shards is not None:
            return self.shards.sent_bytes
        others = self._exchange().messages
        rows = sum(m.pieces.row_bytes + m.mean.row_bytes + 2 * HEADER for m in others)
        matrices = self.gradients.sent_bytes + self.updates.sent_bytes
        return matrices + (self.channel.size - 1) * rows

    # ------------------------------------------------------------ state

    def exchange_sets(self) -> Mapping[str, Any]:
        if self.shards is not None:
            return {"matrices": self.shards.gradients, "updates": self.shards.updates}
        return {"others": self.exchanges, "matrices": self.gradients}

    def residuals_in(self, exchanges: Any, states: Sequence[State]) -> Residuals:
        if exchanges is self.exchanges:
            return super().residuals_in(exchanges, states)
        if self.shards is not None:
            residuals = residuals_of_all(states, self.channel)
        else:
            _, residuals = residuals_of(states, self.channel)
            check_widths(residuals, self.channel.size)
        exchanges.check(residuals)
        return residuals

    def stores(self) -> dict[str, ResidualStore]:
        """Return nothing to hand over, because ``reform`` raises."""
        return {}

    def numels(self) -> dict[str, int]:
        flat = self.flat
        return {name: numel for name, (_, numel) in zip(flat.names, flat.places, strict=True)}

    def copies(self) -> dict[str, torch.Tensor]:
        """Return AdamW's state and float32 weights; of parameters in rows the number of steps
        alone, because the rest is in ``_rows``."""
        names = self.flat.names
        steps = {f"step of {names[i]}": self._state(i, "step") for i in self.others}
        return steps | {
            f"{kind} of {name}": each
            for name, kept in (self._kept().items() if self.shards is None else ())
            for kind, each in kept.items()
        }

    def _kept(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return AdamW's state and float32 weights of each parameter, as far as this rank has
        it."""
        flat = self.flat
        kept = {flat.names[i]: {k: self._state(i, k) for k in MOMENTS} for i in self.others}
        for i in flat.shadowed:
            kept.setdefault(flat.names[i], {})["master"] = flat.weights[i]
        for i, momentum in self.shards.batches.items() if self.shards is not None else ():
            kept.setdefault(flat.names[i], {})["momentum_buffer"] = momentum
        return kept

    def schedule(self) -> State:
        """Return the options of all groups."""
        every = [{**group} for group in self.param_groups]
        for group in every:
            group |= {"lr": float(group["lr"])}
            del group["params"]
            group.pop("param_names", None)
        return {"groups": every}

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        saved, own = schedule["groups"], [group["use_muon"] for group in self.param_groups]
        if [group.get("use_muon") for group in saved] != own:
            raise StateMismatch(
                f"the state has {len(saved)} groups, of which "
                f"{sum(bool(group.get('use_muon')) for group in saved)} are of matrices; this Muon "
                f"has {len(own)} and {sum(own)}: construct it with the same groups"
            )
        for group in saved:
            entries = (*self.defaults, *(() if group["use_muon"] else ADAMW))
            check_entries(group, entries, "a group of the state")

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        for group, saved in zip(self.param_groups, schedule["groups"], strict=True):
            group.update(saved)
        for saved, mine in (("owned", self._mine()), ("rows", self._kept())):
            for name, tensors in mine.items() if saved in schedule else ():
                for kind, each in tensors.items():
                    each.copy_(schedule[saved][name][kind])
        self.flat.publish()

    def part(self) -> State:
        part = super().part() | {"owned": self.owned()}
        if self.shards is not None:
            part["rows"] = rows_state(self._parameters(), self._kept())
        return part

    def elastic_part(self) -> Steps[State]:
        if self.shards is not None:  # no two ranks have the same
            return self.part()
        return (yield from super().elastic_part()) | {"owned": self.owned()}

    def owned(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return momentum of this rank's matrices, and what their updates still lack."""
        mine = self._mine()
        return {name: {k: each.clone() for k, each in kept.items()} for name, kept in mine.items()}

    def _mine(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what ``owned`` copies."""
        shapes, names = self.flat.shapes, self.flat.names
        if self.shards is not None:
            return {names[i]: {"momentum_buffer": m} for i, m in self.shards.momentum.items()}
        rows = {"momentum_buffer": self.momentum}
        rows |= {} if self.lacking is None else {"lacking": self.lacking}
        return {
            names[i]: {k: self.gradients.view(row, j).view(shapes[i]) for k, row in rows.items()}
            for i, j in self.own.items()
        }

    def _parameters(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.flat.names, self.flat.parameters, strict=True))

    def joined(self, states: Sequence[State], missing: str) -> State:
        """Return what all ranks own; an update lacks nothing where a state does not say."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        entries = ("owned",) if self.shards is None else ("owned", "rows")
        for state in states:
            check_entries(state, entries, "the state of a rank")
            found |= state["owned"]
        for name, mine in self._mine().items():
            shape = mine["momentum_buffer"].shape
            check_entries(found, (name,), "the momentum of matrices in the state")
            kept = {"lacking": torch.zeros(shape)} | found[name]
            check_entries(kept, ("momentum_buffer",), f"the state of {name!r}")
            if any(part.shape != shape for part in kept.values()):
                raise StateMismatch(
                    f"the state of {name!r} has shapes {[tuple(p.shape) for p in kept.values()]}, "
                    f"expected {tuple(shape)}: load the state of this model"
                )
            found[name] = kept
        if self.shards is None:
            return {"owned": found}
        return {"owned": found, "rows": rows_joined(states, self._parameters(), self._kept())}

    def shared_state(self) -> State:
        """Return all of this rank's state: no other has its matrices."""
        return self.state_dict()

    def load_shared_state(self, state: State) -> None:
        self.load_state_dict(state)


# ---------------------------------------------------------------- arguments


def divided(params: Any, adamw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide each group into matrices and others, which get the options ``adamw`` beside those of
    the group."""
    given = list(params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(given):
        chosen, options, every = group.get("use_muon"), {**group}, group["params"]
        if chosen not in (None, True, False):
            raise InvalidArgument(
                f"use_muon of group {number} is {chosen!r}, expected True or False, or nothing for "
                "Muon where tensors are matrices"
            )
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for each in [every] if isinstance(every, torch.Tensor) else every:
            (tensor,) = tensors_in([each])
            if chosen and tensor.ndim not in (2, 3):
                raise InvalidArgument(
                    f"use_muon of group {number} is True and it has a tensor of shape "
                    f"{tuple(tensor.shape)}, which is no matrix and no batch of matrices: leave "
                    "use_muon out, or give that tensor another group"
                )
            parts[chosen is not False and tensor.ndim in ((2, 3) if chosen else (2,))].append(each)
        both = sorted({"lr", "eps"} & options.keys())
        if all(parts.values()) and both:
            raise InvalidArgument(
                f"group {number} has {both[0]}={options[both[0]]!r} and both matrices and other "
                "tensors, for which that means different things: make two groups, or pass lr= and "
                "adamw={'lr': ...} to Muon"
            )
        for matrices, part in parts.items():
            if part:
                own = {} if matrices else adamw
                groups.append({**own, **options, "params": part, "use_muon": matrices})
    return groups


def codec_of(option: str, codec: str | Codec | None, none: str) -> Codec:
    found = codec_named(none if codec is None else codec)
    if isinstance(found, NoRows):
        raise InvalidArgument(
            f"{option} is {codec!r}, which has no rows of a known size: owners send and receive "
            "rows. Choose a codec such as 'int8' for gradients and 'int4' for updates"
        )
    return found


def check_fine(option: str, codec: Codec) -> None:
    """Raise ``InvalidArgument`` unless a codec is as fine as int8 on Gaussian numbers."""
    sample = torch.randn(1 << 13, generator=torch.Generator().manual_seed(0))
    error = sqrt(errors_of(sample, [codec])[0] / float(sample.square().sum()))
    if error > COARSEST:
        raise InvalidArgument(
            f"{option} is {codec.spec!r}, which is {100 * error:.1f} % off on Gaussian numbers: "
            "orthogonalising a matrix multiplies that by up to seven. Choose 'int8' (0.7 %), "
            "'bf16' or None; update_codec may be coarser"
        )


def check_matrices(group: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options of a group of matrices that Muon cannot use."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise InvalidArgument(f"{name} is {group[name]!r}, expected a number of at least 0")
    check_counts(ns_steps=group["ns_steps"])
    split: Any = group.get("split")
    for tensor in tensors_in([group]) if split is not None else ():
        if min(split, default=0) < 1 or sum(split) != tensor.shape[-2]:
            raise InvalidArgument(
                f"split is {split!r} and a tensor of its group has shape {tuple(tensor.shape)}: "
                f"expected numbers of rows that add up to {tensor.shape[-2]}; give tensors that "
                "divide otherwise a group of their own"
            )
    for name, fits, expected in (
        ("ns_steps", group["ns_steps"] < 100, "less than 100"),
        ("ns_coefficients", len(group["ns_coefficients"]) == 3, "three numbers"),
        ("adjust_lr_fn", group["adjust_lr_fn"] in ADJUSTMENTS, f"one of {ADJUSTMENTS}"),
    ):
        if not fits:
            raise InvalidArgument(f"{name} is {group[name]!r}, expected {expected}")
