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
from commpress.collectives.residual_state import Residuals, check_widths, residuals_of
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
from commpress.optim.layout import is_cut, named_parameters, refuse_held, tensors_in
from commpress.optim.optimizer import (
    OptimizerCounters,
    bits_of,
    check_numbers,
    checksum_of,
    decay_of,
    different_from_first,
    loss_of,
)
from commpress.plan.assignment import errors_of
from commpress.torch_private import untraced
from commpress.work import Steps

COARSEST = 0.01  # error of a gradient's codec on Gaussian numbers: int8 has 0.007, seven bits 0.013
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Divided, Stateful, torch.optim.Optimizer):
    """``torch.optim.Muon`` for matrices and ``torch.optim.AdamW`` for other tensors; averages over
    the ranks in ``step()``.

    Gradients must be each rank's own: run the model without DistributedDataParallel, or call
    ``commpress.keep_local(ddp)``. All ranks begin with the same weights.

    A tensor of two dimensions is a matrix, unless its group says ``use_muon=False``, as it should
    of embeddings and output layers: ``[{"params": hidden}, {"params": rest, "use_muon": False,
    "lr": 3e-4}]``. Momentum of a matrix is on its owner alone, AdamW's state on every rank; both
    are float32, and half-precision parameters have float32 master weights.

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
        self._check(parameters, names)
        self.check_every, self.counters = check_every, OptimizerCounters()
        self.connect(codec=there, **options)
        if self.channel.size == 1:  # nothing travels
            there, back = codec_named("none"), codec_named("bf16")
            self.exchanges.use(policy_of(there))
        self._place(Flat(parameters, names), there, back, lossless=update_codec is None)

    def _check(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        for group in self.param_groups:
            (check_matrices if group["use_muon"] else check_numbers)(group)
        for name, p in zip(names, parameters, strict=True):
            if is_cut(p):
                raise InvalidArgument(
                    f"parameter {name!r} is a DTensor, of which this rank has a part, and Muon "
                    "needs whole matrices: keep the model on every rank, or train it with "
                    "torch.optim.Muon and commpress.compress_fsdp(model)"
                )
        refuse_held("Muon", zip(names, parameters, strict=True), "averages over all ranks")

    def _place(self, flat: Flat, there: Codec, back: Codec, *, lossless: bool) -> None:
        self.flat, size, device = flat, self.channel.size, flat.device
        self.groups = [group for group in self.param_groups for _ in group["params"]]
        self.matrices = [i for i, group in enumerate(self.groups) if group["use_muon"]]
        self.others = [i for i, group in enumerate(self.groups) if not group["use_muon"]]
        owners = owners_of([flat.shapes[i] for i in self.matrices], size)
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
        for i, j in self.own.items():
            buffer = self.gradients.view(self.momentum, j).view(flat.shapes[i])
            self.state[flat.parameters[i]]["momentum_buffer"] = buffer
        for i in self.others:
            moments = {name: torch.zeros(flat.shapes[i], device=device) for name in MOMENTS}
            self.state[flat.parameters[i]] |= {"step": torch.zeros(()), **moments}

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
        outcomes, trained = yield from self._reduced()
        taken = all(outcome.finite for outcome in outcomes)
        if taken:
            self._orthogonalise(trained)
            taken = all((yield from self.updates.gather(self.sent, self.work, key=self.steps_done)))
        if taken:
            self._apply(trained)
        settle(outcomes, taken=taken)
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
            update = mean.lerp(after, group["momentum"]) if group["nesterov"] else after
            sent.copy_(
                orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
            )
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
                group, shape = self.groups[i], flat.shapes[i]
                flat.weights[i].mul_(decay_of(group))
                rate = adjusted(float(group["lr"]), group["adjust_lr_fn"], shape)
                flat.weights[i].add_(flat.view(self.work, i), alpha=-rate)
        for group in self.param_groups:
            at = [i for i in self.others if self.groups[i] is group]
            states = {i: self.state[flat.parameters[i]] for i in at}
            for i in set(at) - trained:
                mean = flat.view(self.work, i)
                states[i]["exp_avg"].add_(mean, alpha=1 - group["betas"][0])
            if at := [i for i in at if i in trained]:
                weights = [flat.weights[i] for i in at]
                means = [flat.view(self.work, i) for i in at]
                lists = ([states[i][kind] for i in at] for kind in (*MOMENTS, "step"))
                adam_step(group, weights, means, *lists)
        flat.publish()

    def _compare(self) -> Steps[None]:
        """Check that parameters, options and weights are equal on all ranks."""
        flat = self.flat
        codecs = self.gradients.codec.spec, self.updates.codec.spec, self.exchanges.policy
        said = repr((flat.names, [*map(tuple, flat.shapes)], codecs, self.schedule()))
        mine = [zlib.crc32(said.encode()), self.steps_done, checksum_of(map(bits_of, flat.weights))]
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
        others = self._exchange().messages
        rows = sum(m.pieces.row_bytes + m.mean.row_bytes + 2 * HEADER for m in others)
        matrices = self.gradients.sent_bytes + self.updates.sent_bytes
        return matrices + (self.channel.size - 1) * rows

    # ------------------------------------------------------------ state

    def exchange_sets(self) -> Mapping[str, Any]:
        return {"others": self.exchanges, "matrices": self.gradients}

    def residuals_in(self, exchanges: Any, states: Sequence[State]) -> Residuals:
        if exchanges is not self.gradients:
            return super().residuals_in(exchanges, states)
        _, residuals = residuals_of(states, self.channel)
        self.gradients.check(residuals)
        check_widths(residuals, self.channel.size)
        return residuals

    def stores(self) -> dict[str, ResidualStore]:
        """Return nothing to hand over, because ``reform`` raises."""
        return {}

    def numels(self) -> dict[str, int]:
        flat = self.flat
        return {name: numel for name, (_, numel) in zip(flat.names, flat.places, strict=True)}

    def copies(self) -> dict[str, torch.Tensor]:
        flat = self.flat
        moments = {
            f"{kind} of {flat.names[i]}": self.state[flat.parameters[i]][kind]
            for i in self.others
            for kind in ("step", *MOMENTS)
        }
        return moments | {f"master of {flat.names[i]}": flat.weights[i] for i in flat.shadowed}

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
        self.flat.publish()
        if "owned" in schedule:
            for row, kind in self._rows():
                for i, j in self.own.items():
                    saved = schedule["owned"][self.flat.names[i]]
                    self.gradients.view(row, j).copy_(saved[kind].view(-1))

    def part(self) -> State:
        return super().part() | {"owned": self.owned()}

    def elastic_part(self) -> Steps[State]:
        return (yield from super().elastic_part()) | {"owned": self.owned()}

    def owned(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return momentum of this rank's matrices, and what their updates still lack."""
        shapes, names = self.flat.shapes, self.flat.names
        return {
            names[i]: {
                kind: self.gradients.view(row, j).view(shapes[i]).clone()
                for row, kind in self._rows()
            }
            for i, j in self.own.items()
        }

    def _rows(self) -> list[tuple[torch.Tensor, str]]:
        """List this rank's rows and their names in a state."""
        rows = [(self.momentum, "momentum_buffer")]
        return rows if self.lacking is None else [*rows, (self.lacking, "lacking")]

    def joined(self, states: Sequence[State], missing: str) -> State:
        """Return what all ranks own; an update lacks nothing where a state does not say."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for state in states:
            check_entries(state, ("owned",), "the state of a rank")
            found |= state["owned"]
        for i in self.own:
            name, shape = self.flat.names[i], self.flat.shapes[i]
            check_entries(found, (name,), "the momentum of matrices in the state")
            kept = {"lacking": torch.zeros(shape)} | found[name]
            check_entries(kept, ("momentum_buffer",), f"the state of {name!r}")
            if any(part.shape != shape for part in kept.values()):
                raise StateMismatch(
                    f"the state of {name!r} has shapes {[tuple(p.shape) for p in kept.values()]}, "
                    f"expected {tuple(shape)}: load the state of this model"
                )
            found[name] = kept
        return {"owned": found}

    def shared_state(self) -> State:
        """Return all of this rank's state: no other has its matrices."""
        return self.state_dict()

    def load_shared_state(self, state: State) -> None:
        self.load_state_dict(state)


MOMENTS = ("exp_avg", "exp_avg_sq")


# ---------------------------------------------------------------- arithmetic


def orthogonalised(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about UVᵀ of ``update`` = USVᵀ, in bfloat16: ``steps`` times x ← a·x + (b·G + c·G²)·x
    with G = xxᵀ, from ``update`` divided by its norm."""
    a, b, c = coefficients
    x, tall = update.bfloat16(), update.shape[0] > update.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted(lr: float, adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * sqrt(max(rows, columns)))
    return lr * sqrt(max(1, rows / columns))


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Deal matrices to ranks so that all have about as many operations of an iteration to do: the
    largest first, each to the rank that has least to do."""
    work = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    owners, loads = [0] * len(work), [0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work[i]
    return owners


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
            if chosen and tensor.ndim != 2:
                raise InvalidArgument(
                    f"use_muon of group {number} is True and it has a tensor of shape "
                    f"{tuple(tensor.shape)}, which is no matrix: leave use_muon out, or give that "
                    "tensor another group"
                )
            parts[chosen is not False and tensor.ndim == 2].append(each)
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
    for name, fits, expected in (
        ("ns_steps", group["ns_steps"] < 100, "less than 100"),
        ("ns_coefficients", len(group["ns_coefficients"]) == 3, "three numbers"),
        ("adjust_lr_fn", group["adjust_lr_fn"] in ADJUSTMENTS, f"one of {ADJUSTMENTS}"),
    ):
        if not fits:
            raise InvalidArgument(f"{name} is {group[name]!r}, expected {expected}")
