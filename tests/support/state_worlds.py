"""Ranks of one communicating object in one process, as the laws of state see them: trained, saved,
loaded, killed, joined by others.

A ``Rank`` says how its object takes a step, which tensors are its weights, and what of its state is
a sum over the ranks, equal on all of them, or its own. The ``World`` does the rest.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

import commpress
from commpress.choice import PerLayer
from commpress.codecs import SignCodec
from commpress.collectives.channel import Channel
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.optim.layout import mark_held
from commpress.optim.outer import Average, Gossip, Nesterov, SparseLoCo
from commpress.schedules import Every
from gallery import gallery
from local_twin import HiddenOf, options_of
from new_ranks import Dying, changes, until_stuck
from ranks import caught

SHAPES = ((40, 13), (300,), (7,))


def drawn(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def stored(state: Any) -> Any:
    """Plain numbers and tensors, or it does not load."""
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def copied(state: Any) -> Any:
    """The same, with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(copied, state))
    return state


def apart(one: Any, two: Any, *, absent: bool = False) -> str:
    """The place where two states differ in a bit; "" if nowhere. ``absent``: what one of both
    lacks is zero in the other."""
    if isinstance(one, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        return "" if alike else f": {one.dtype}{list(one.shape)} and {two.dtype}{list(two.shape)}"
    if isinstance(one, Mapping):
        for key in one.keys() | two.keys():
            if key in one and key in two:
                found = apart(one[key], two[key], absent=absent)
            else:
                alone = (one if key in one else two)[key]
                found = "" if absent and (key == "bases" or nothing(alone)) else " is in one alone"
            if found:
                return f"/{key}{found}"
        return ""
    if isinstance(one, list | tuple) and len(one) == len(two):
        every = (apart(a, b, absent=absent) for a, b in zip(one, two, strict=True))
        return next((f"/{i}{found}" for i, found in enumerate(every) if found), "")
    return "" if one == two else f": {one!r:.80} and {two!r:.80}"


def nothing(value: Any) -> bool:
    """True if all tensors in it are zero."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return all(isinstance(each, torch.Tensor) and not each.any() for each in values)


def added(totals: dict[str, torch.Tensor], name: str, offset: int, part: torch.Tensor) -> None:
    """Add a part to the total of this name, which grows to hold it."""
    total = totals.setdefault(name, torch.zeros(0, dtype=torch.float64))
    grown = torch.zeros(max(len(total), offset + len(part)), dtype=torch.float64)
    grown[: len(total)] = total
    grown[offset : offset + len(part)] += part
    totals[name] = grown


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all that a state holds, containers among them."""
    if path:
        yield path
    if isinstance(state, Mapping | list):
        for key in state if isinstance(state, Mapping) else range(len(state)):
            yield from leaves(state[key], (*path, key))


class Rank:
    """One rank's object."""

    shapes = SHAPES
    reforms = joins = elastic = True
    heals = True  # a rank behind takes over what others have
    sign = 1  # with which residuals are in what the ranks have together
    loads: tuple[str, ...] = ("own", "all")
    exactly: tuple[str, ...] = ()  # of these ways those that resume in every bit; (): all

    def __init__(self, make: Callable[..., Any], rank: int, transport: Any) -> None:
        self.weights = [torch.nn.Parameter(p) for p in drawn(0, self.shapes)]
        self.owner = make(self.weights, transport)

    def gradients(self, number: int, rank: int) -> list[torch.Tensor]:
        """A common part and one of the rank's own."""
        common, own = drawn(1000 + number, self.shapes), drawn(7919 * rank + number, self.shapes)
        return [a + 0.5 * b for a, b in zip(common, own, strict=True)]

    def grow_at(self, number: int) -> None:
        """Parameters may come late."""

    # ---- a step

    def begin(self, number: int, rank: int) -> None:
        """Begin a step, up to its first message."""
        self.grow_at(number)
        for p, g in zip(self.weights, self.gradients(number, rank), strict=True):
            p.grad = g

    def step(self, number: int, rank: int) -> Any:
        return self.owner.steps()

    def ends(self) -> Any:
        """Steps after which weights are equal on all ranks."""
        return none()

    def save(self) -> Any:
        return returned(self.owner.state_dict())

    def save_elastically(self) -> Any:
        return self.owner.elastic_steps()

    def load(self, *states: Any) -> None:
        self.owner.load_state_dict(*states)

    def kept(self) -> Any:
        """All that a step which fails may not change."""
        return [[p.detach().clone() for p in self.weights], self.owner.state_dict()]

    def channels(self) -> list[Channel]:
        return [self.owner.channel]

    def leaving(self, ranks: Sequence[int]) -> Any:
        return self.owner.leaving(ranks)

    def seen(self, state: Any) -> Any:
        """A state without what a clock has told."""
        return state

    def residuals(self, state: Any) -> dict[str, Any]:
        """Residuals in an exact state."""
        return dict(state["residuals"])

    def means(self) -> Mapping[str, torch.Tensor]:
        """State that differs between ranks and counts by its mean."""
        return {}

    def rows(self) -> Mapping[str, torch.Tensor]:
        """State of which ranks hold a part each, with zeros elsewhere."""
        return {}

    def alike(self) -> Mapping[str, Any]:
        """State that is equal on all ranks, and stays so on others."""
        return {}

    def count(self) -> int:
        return self.owner.steps_done

    def lost(self) -> int:
        return self.owner.counters.lost_ranks

    def common(self) -> list[torch.Tensor]:
        """Weights that all ranks have."""
        return list(self.weights)

    def share(self, state: Any, rank: int, size: int) -> dict[str, torch.Tensor]:
        """The rank's share in what all have together."""
        found = {name: value / size for name, value in self.means().items()}
        for place, kept in self.residuals(state).items():
            part, (name, _, offset) = kept["sent"].double(), place.rpartition("@")
            width = len(kept["reduced"])
            own = part[rank * width :][:width]
            own += size * kept["reduced"][: len(own)]
            added(found, name, int(offset), self.sign * part / size)
        return found

    def heal(self, other: "Rank") -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.common(), other.common(), strict=True):
                mine.copy_(theirs)
        self.owner.load_shared_state(copied(other.owner.shared_state()))


def done(steps: Any) -> Any:
    """Steps with a result that is not None."""
    yield from steps
    return True


def none() -> Iterator[Any]:
    yield from ()


def returned(value: Any) -> Any:
    yield from ()
    return value


class Kind:
    """A table's row: ranks of this class, made so; ``ats``: steps after which the laws look."""

    size = 3  # ranks of the laws

    def __init__(
        self,
        of: type[Rank],
        make: Callable[..., Any] | None = None,
        ats: Sequence[int] = (5,),
        **facts: Any,
    ) -> None:
        self.of, self.make, self.ats = of, make, ats
        self.window: Sequence[int] = ()
        self.dies: Sequence[int] | None = None  # steps in which ranks die; None: the next ones
        self.wakes = of is Loud  # in an exchange of its own, after that of the step
        self.__dict__ |= facts

    def world(self, size: int, begins: int = 0) -> "World":
        return World(self, size, begins)


class World:
    """All ranks of an object; ``begins``: the step before which they are made."""

    stay = (0, 2)  # of three, where others join

    def __init__(self, kind: Kind, size: int, begins: int = 0) -> None:
        self.kind, self.size = kind, size
        self.ranks = [kind.of(kind.make, r, t) for r, t in enumerate(Loopback(size).transports())]
        self.number = begins
        for rank in self.ranks:
            rank.grow_at(begins)

    def at_once(self, what: Iterable[Any]) -> list[Any]:
        with torch.no_grad():
            return simulate(list(what))

    def begin(self, number: int) -> None:
        self.number = number + 1
        for r, rank in enumerate(self.ranks):
            rank.begin(number, r)

    def step(self, number: int) -> list[Any]:
        self.begin(number)
        return self.at_once(rank.step(number, r) for r, rank in enumerate(self.ranks))

    def run(self, steps: Iterable[int]) -> None:
        for number in steps:
            self.step(number)

    def end(self) -> None:
        self.at_once(rank.ends() for rank in self.ranks)

    # ---- what they have

    def numbers(self) -> list[Any]:
        """All that there is, by rank."""
        states = self.at_once(rank.save() for rank in self.ranks)
        return [
            [[p.detach().clone() for p in rank.weights], rank.seen(copied(state))]
            for rank, state in zip(self.ranks, states, strict=True)
        ]

    def kept(self) -> list[Any]:
        return [copied(rank.kept()) for rank in self.ranks]

    def parts(self) -> list[dict[str, torch.Tensor]]:
        """Share of each rank in what all have together."""
        states = self.at_once(rank.save() for rank in self.ranks)
        return [
            rank.share(state, r, self.size)
            for r, (rank, state) in enumerate(zip(self.ranks, states, strict=True))
        ]

    def total(self) -> dict[str, torch.Tensor]:
        """R of every tensor, flat, and the means of what waits; float64."""
        found: dict[str, torch.Tensor] = {}
        for parts in self.parts():
            for name, part in parts.items():
                added(found, name, 0, part)
        return found

    def alike(self) -> dict[str, Any]:
        """State that all have alike, and that which is divided among them, put together."""
        found = dict(self.ranks[0].alike())
        for rank in self.ranks[1:]:
            assert not apart(dict(rank.alike()), dict(self.ranks[0].alike()))
        for rank in self.ranks:
            for name, value in rank.rows().items():
                found[name] = found.get(name, 0.0) + value
        return found

    def counts(self) -> list[int]:
        return [rank.count() for rank in self.ranks]

    def lost(self) -> list[int]:
        return [rank.lost() for rank in self.ranks]

    def refused(self, state: Any) -> Exception | None:
        """The error with which rank 0 refuses a state."""
        return caught(self.ranks[0].load, state)

    def agree(self) -> bool:
        self.end()
        self.alike()
        first = self.ranks[0].common()
        return not any(apart(rank.common(), first) for rank in self.ranks)

    # ---- files

    def saved(self, *, elastic: bool = False) -> tuple[list[Any], list[Any]]:
        """States and weights of all ranks."""
        how = "save_elastically" if elastic else "save"
        states = self.at_once(getattr(rank, how)() for rank in self.ranks)
        weights = [[p.detach().clone() for p in rank.weights] for rank in self.ranks]
        return stored(states), weights

    def load(self, saved: tuple[list[Any], list[Any]], how: str) -> None:
        """``own``: each rank what it saved; ``all``: what all saved, in another order on each;
        ``parts``: the state of rank 0, as trainers save it, then every rank's part."""
        states, weights = saved
        for r, rank in enumerate(self.ranks):
            own = weights[r] if len(weights) == self.size else weights[0] if weights else []
            with torch.no_grad():
                for mine, theirs in zip(rank.weights, own, strict=False):
                    mine.copy_(theirs)
            if how == "own":
                rank.load(copied(states[r]))
            elif how == "all":
                rank.load(*copied(states[r:] + states[:r]))
            else:
                rank.load(copied(states[0]))
                rank.owner.load_rank_state(*(copied(state["commpress"]) for state in states))

    # ---- other ranks

    def connect(self) -> None:
        every = [rank.channels() for rank in self.ranks]
        for channels in zip(*every, strict=True):
            transports = Loopback(self.size).transports()
            for channel, transport in zip(channels, transports, strict=True):
                channel.reform(transport)

    def reforming(self, stay: Iterable[int], new: int = 0) -> list[Any]:
        every, before = changes(set(stay), new, self.size), sorted(stay)
        alone = [Loopback(1).transport(0) for _ in range(new)]
        self.ranks = [self.ranks[r] for r in before] + [
            self.kind.of(self.kind.make, 0, transport) for transport in alone
        ]
        self.size = len(self.ranks)
        for rank in self.ranks:
            rank.grow_at(self.number)
        self.connect()
        return [
            rank.owner.reforming(change) for rank, change in zip(self.ranks, every, strict=True)
        ]

    def reform(self, stay: Iterable[int], new: int = 0) -> None:
        for commit in self.at_once(self.reforming(stay, new)):
            commit()

    def leave(self, ranks: Sequence[int]) -> None:
        """They hand over what they owe."""
        self.at_once(rank.leaving(ranks) for rank in self.ranks)

    def die(self, number: int, victim: int, after: int, reached: Any) -> tuple[list[Any], bool]:
        """The victim ends in a step, after so many messages: results of all, None of who failed,
        and whether it came to that."""
        self.begin(number)
        self.before = self.kept()
        steps = [rank.step(number, r) for r, rank in enumerate(self.ranks)]
        dying = self.mortal(self.ranks[victim], after, reached)
        with torch.no_grad():
            results = until_stuck([done(each) for each in steps])
        return results, dying.left < 0

    def mortal(self, victim: Rank, after: int, reached: Any) -> Dying:
        first, *others = victim.channels()
        dying = Dying(first.inner, after, reached)
        for channel in (first, *others):  # messages are counted over all of them
            channel.transport.stand_for(dying)
        return dying

    def heal(self, source: int, needy: Iterable[int]) -> None:
        for r in needy:
            self.ranks[r].heal(self.ranks[source])


# ---------------------------------------------------------------- what says only what it holds


class Said(Rank):
    """An object of ``Stateful``: all state comes from there."""

    def alike(self) -> Mapping[str, Any]:
        return self.owner.shared_state()

    def lost(self) -> int:
        return self.owner.handover.lost

    def heal(self, other: Rank) -> None:
        """All but the weights came with the change."""
        with torch.no_grad():
            for mine, theirs in zip(self.weights, other.weights, strict=True):
                mine.copy_(theirs)


class Averaged(commpress.Stateful):
    """Exchanges alone, as every object has them that averages."""

    shapes: Mapping[str, Sequence[int]] = dict(zip("abc", SHAPES, strict=True))

    def numels(self) -> dict[str, int]:
        return {name: prod(shape) for name, shape in self.shapes.items()}

    def reforming(self, change: Any) -> Any:
        commit = yield from super().reforming(change)
        yield from self.channel.gathered([0.0])  # all have come as far, as a group makes sure
        return commit


class Mean(Said):
    def __init__(self, make: Callable[..., Any], rank: int, transport: Any) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(827))]
        self.owner = Averaged()
        self.owner.connect(codec=make, min_numel=1, transport=transport)

    def begin(self, number: int, rank: int) -> None:
        pass

    def step(self, number: int, rank: int) -> Any:
        buffer = torch.cat([g.view(-1) for g in self.gradients(number, rank)])
        given = buffer.clone()
        yield from self.owner.averaging(buffer, self.owner.shapes)
        with torch.no_grad():
            self.weights[0] += buffer
        return given, buffer


def mean(codec: Any) -> Kind:
    return Kind(Mean, codec, (3,))


class Toy(Said):
    """An optimizer of the gallery, in which there is nothing about saving or other ranks."""


EF_MOMENTUM = gallery("ef_momentum").EFMomentum


def toy(**options: Any) -> Kind:
    return Kind(Toy, lambda p, t: EF_MOMENTUM(p, transport=t, min_numel=0, **options), (2, 5))


# ---------------------------------------------------------------- optimizers


class Optimizer(Rank):
    loads = ("own", "all", "parts")

    def ends(self) -> Any:
        return self.owner.synchronizing() if hasattr(self.owner, "synchronizing") else none()

    def residuals(self, state: Any) -> dict[str, Any]:
        part = state["commpress"]
        exchanges = (part[each]["residuals"] for each in ("full", "quantized"))
        return {f"{i} {k}": v for i, each in enumerate(exchanges) for k, v in each.items()}

    def means(self) -> Mapping[str, torch.Tensor]:
        return {name: each.double() for name, each in self.owner.waiting().items()}

    def alike(self) -> Mapping[str, Any]:
        states = self.owner.tensors
        found = {
            "steps": self.owner.steps_done,
            "frozen": [states.frozen.tolist(), states.frozen_at.tolist()],
            "chosen": self.owner.choice.state(),
        }
        return found | self.owner.quantized.choices() | self.moments()

    def moments(self) -> Mapping[str, Any]:
        inside = getattr(self.owner, "held", 0)
        anchor = {"anchor": self.owner.anchor.clone()} if inside else {}
        moments = {} if inside else {"momentum": self.owner.momentum.clone()}
        return moments | anchor | {"variance": self.owner.variance.clone()}


class Loud(Optimizer):
    """Gradients of the second tensor are far beyond its variance from step 6 on: it wakes up in
    step 9."""

    def gradients(self, number: int, rank: int) -> list[torch.Tensor]:
        gradients = super().gradients(number, rank)
        gradients[1] *= 1e4 if number >= 6 else 1.0
        return gradients


class Sharded(Optimizer):
    reforms = False

    def alike(self) -> Mapping[str, Any]:
        return {"steps": self.owner.steps_done, "frozen": self.owner.tensors.frozen_at.tolist()}

    def rows(self) -> Mapping[str, torch.Tensor]:
        found = {}
        for name in ("master", "momentum", "variance"):
            flat = self.owner.flat.new()
            for part in self.owner.parts:
                first = self.owner.flat.places[part.parameter][0] + part.begin
                flat[first : first + part.numel] = part.of(getattr(self.owner, name))
            found[name] = flat
        return found


class Owned(Rank):
    """Each matrix, with its momentum, has one owner."""

    reforms = False

    def residuals(self, state: Any) -> dict[str, Any]:
        return state["others"]["residuals"] | state["matrices"]["residuals"]

    def alike(self) -> Mapping[str, Any]:
        return {"steps": self.owner.steps_done, "copies": self.owner.copies()}

    def rows(self) -> Mapping[str, torch.Tensor]:
        flat = self.owner.flat
        found = {kind: flat.new() for kind in ("momentum_buffer", "lacking")}
        for name, kept in self.owner.owned().items():
            for kind, tensor in kept.items():
                flat.view(found[kind], flat.names.index(name)).copy_(tensor)
        return found


class Grown(Optimizer):
    """The last two parameters come before step 4."""

    def __init__(self, make: Callable[..., Any], rank: int, transport: Any) -> None:
        super().__init__(lambda p, t: make([{"params": p[:1]}], t), rank, transport)

    def grow_at(self, number: int) -> None:
        if number >= 4 and len(self.owner.param_groups) == 1:
            self.owner.add_param_group({"params": self.weights[1:], "lr": 5e-3})


class GrownSharded(Grown, Sharded):
    pass


class Held(Optimizer):
    """The last parameter lies on this rank alone."""

    joins = False

    def common(self) -> list[torch.Tensor]:
        return self.weights[:-1]

    loads = ("own", "parts")

    def __init__(self, make: Callable[..., Any], rank: int, transport: Any) -> None:
        def marked(weights: Any, transport: Any) -> Any:
            mark_held(weights[-1], range(transport.size), (transport.rank,), transport.rank)
            return make(weights, transport)

        super().__init__(marked, rank, transport)


class HeldSharded(Held, Sharded):
    loads = ("own", "parts")


COMMON = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "min_numel": 0}
FREEZES = COMMON | {"exact_steps": 3}
WINDOWS = COMMON | {"variance_updates": 1, "sync": Every(3)}


def optimizer(
    name: str, of: type[Rank] = Optimizer, ats: Any = (2, 6), dies: Any = None, **options: Any
) -> Kind:
    cls, windowed = getattr(commpress, name), "ZeroOne" in name
    defaults = WINDOWS if windowed else FREEZES
    facts = {"window": (7, 8), "dies": (8,)} if windowed else {"dies": dies}
    return Kind(of, lambda p, t: cls(p, transport=t, **defaults | options), ats, **facts)


# ---------------------------------------------------------------- local updates


class Local(Rank):
    """The ranks have together the mean of their weights less what they owe."""

    loads, sign, heals = ("own", "all"), -1, False

    def begin(self, number: int, rank: int) -> None:
        super().begin(number, rank)
        for each in self.owner.inner if not self.owner.warms_up else ():
            each.step()

    def step(self, number: int, rank: int) -> Any:
        return (self.owner.stepping if self.owner.warms_up else self.owner.steps)(tokens=1 + rank)

    def seen(self, state: Any) -> Any:
        state["facts"]["paces"], state["pace"] = [], []
        if state["flight"]:
            state["flight"]["pace"] = []
        return state

    def ends(self) -> Any:
        return self.owner.draining()

    def save(self) -> Any:
        return self.owner.saving()

    def kept(self) -> Any:
        return [p.detach().clone() for p in self.weights]

    def channels(self) -> list[Channel]:
        return [self.owner.channel, self.owner.control]

    def means(self) -> Mapping[str, torch.Tensor]:
        return {f"#{i:05}": p.detach().double().view(-1) for i, p in enumerate(self.weights)}

    def alike(self) -> Mapping[str, Any]:
        local = self.owner
        if not local.outer.equal:
            return {"exchanged": local.exchanged}
        outer = [dict(f.state) for f in local.fragments]
        return {"digest": local.digest(), "exchanged": local.exchanged, "outer": outer}


def local(ats: Sequence[int] = (3, 8), inner: Any = None, dies: Any = None, **options: Any) -> Kind:
    inner = inner or (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False))

    def make(weights: Any, transport: Any) -> Any:
        given = {name: v() if name == "store" else v for name, v in options.items()}
        return commpress.LocalUpdates(inner(weights), process_group=transport, **given)

    options = {"every": 4, "codec": None, "min_numel": 1, "feedback_decay": 1.0} | options
    options = options_of(**options)
    if dies is None:
        dies = (options["every"] // options.get("fragments", 1) * 2 - 1,)
    return Kind(Local, make, ats, dies=dies)


KINDS = {
    "mean, lazy signs": mean(SignCodec(block=0)),
    "mean, int4": mean("int4"),
    "mean, matrices": mean("powersgd-2"),
    "toy": toy(),
    "toy, matrices": toy(codec="powersgd-2"),
    "1-bit Adam": optimizer("OneBitAdam"),
    "clipped": optimizer("OneBitAdam", exact_codec="int8", max_grad_norm=1.0),
    "matrices": optimizer("OneBitAdam", codec="powersgd-2"),
    "matrices, 0/1": optimizer("ZeroOneAdam", ats=(6,), codec="powersgd-2"),
    "ranks of layers": optimizer("OneBitAdam", ats=(5, 6), codec=PerLayer("powersgd-2+fp8", 2)),
    "ranks of layers, 0/1": optimizer("ZeroOneAdam", ats=(8, 9), codec=PerLayer("powersgd-2", 2)),
    "codecs of layers": optimizer("OneBitLamb", ats=(5, 6), codec=PerLayer("int4", 2)),
    "1-bit LAMB": optimizer("OneBitLamb"),
    "loud 1-bit Adam": optimizer("OneBitAdam", Loud, (8, 12), dies=(9,)),
    "loud LAMB": optimizer("OneBitLamb", Loud, (8, 12), rates="frozen", dies=(9,)),
    "0/1 Adam": optimizer("ZeroOneAdam", ats=(6, 8)),
    "sharded 1-bit Adam": optimizer("ShardedOneBitAdam", Sharded),
    "sharded 0/1 Adam": optimizer("ShardedZeroOneAdam", Sharded, (6, 8)),
    "grown 1-bit Adam": optimizer("OneBitAdam", Grown, (5, 9)),
    "grown 0/1 Adam": optimizer("ZeroOneAdam", Grown, (5, 10)),
    "grown LAMB": optimizer("OneBitLamb", Grown, (5, 9)),
    "grown sharded": optimizer("ShardedOneBitAdam", GrownSharded, (5, 9)),
    "grown sharded 0/1": optimizer("ShardedZeroOneAdam", GrownSharded, (5, 10)),
    "held, 1-bit Adam": optimizer("OneBitAdam", Held, (6,)),
    "held, 0/1 Adam": optimizer("ZeroOneAdam", Held, (8,)),
    "held, sharded": optimizer("ShardedOneBitAdam", HeldSharded, (6,)),
    "held, sharded 0/1": optimizer("ShardedZeroOneAdam", HeldSharded, (8,)),
    "Muon": Kind(Owned, lambda p, t: commpress.Muon(p, transport=t, min_numel=0), (2, 6)),
    "local": local(outer=Average()),
    "local, fragments": local((3, 6), codec="int4", outer=Nesterov(), fragments=2),
    "local, overlap": local(
        (3, 7, 8),
        codec="int4",
        every=6,
        outer=Nesterov(),
        fragments=2,
        overlap=2,
        alpha=0.5,
        dies=(7,),
    ),
    "local, hidden": local((3, 8), every=HiddenOf(early=8), outer=None, dies=(5,)),
    "local, matrices": local(
        codec="powersgd-2", outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)
    ),
    "local, sparse": local(codec="topk-16+bits2", outer=SparseLoCo()),
    "local, gossip": local(outer=Gossip(), dies=()),
    "local, warm-up": local((2, 7), codec="int4", outer=Nesterov(), exact_steps=4),
}
