"""Roster of a group that is to be: its members in their order, and the epoch that they come from.

Whoever leads an agreement decides on it, by what all have reported; no rule of it talks to anybody.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from commpress.collectives.transports.conversation import Message
from commpress.collectives.transports.membership import Epoch


@dataclass(frozen=True)
class Roster:
    """Members from now on."""

    base: Epoch  # that goes on
    adopt: int  # the key of the epoch that counts as complete for those who are ready for it
    places: tuple[str, ...]  # the members' doors, by rank
    sources: tuple[int | None, ...]  # rank of each in ``base``, None for a newcomer

    @classmethod
    def merged(
        cls, base: Epoch, adopt: int, members: Sequence[Message], joining: Sequence[Message]
    ) -> "tuple[Roster, list[tuple[str, str]]]":
        """Of ``base`` and of groups that want to join, whose ranks follow as newcomers; where all
        members yield, the group that has trained longest goes on. With it the doors of those who
        must not, and why."""
        here = {report["place"] for report in members}
        present = [place for place in base.places if place in here]
        others: dict[int, list[Message]] = {}
        for report in joining:
            others.setdefault(report["epoch"]["key"], []).append(report)
        winner, oldest = base, max(report["age"] for report in members)
        yields = all(report["yields"] for report in members)
        refused: list[tuple[str, str]] = []
        for group in sorted(others.values(), key=lambda group: max(r["age"] for r in group)):
            epoch, years = Epoch.of(group[0]["epoch"]), max(report["age"] for report in group)
            if epoch.lineage == base.lineage or years < oldest or years == 0:
                continue
            whole = 2 * len(group) > len(epoch.places)
            if years == oldest or not whole or not yields:
                text = (
                    (
                        f"only {len(group)} of {len(epoch.places)} ranks of a group that has "
                        "trained longer want to join"
                    )
                    if not whole
                    else f"both groups have trained for {years} steps, so neither can be the "
                    "other's newcomer: give age=0 to "
                    "reform() on the ranks that are to take the other's weights"
                    if years == oldest
                    else f"this group has trained for {years} steps and the members for "
                    f"{oldest}, so its weights are not given "
                    "up, and the members do not yield: give age=0 to reform() here to take "
                    "their weights, or yields=True to "
                    "reform() on all members to have them take these"
                )
                refused += [(report["place"], text) for report in group]
                continue
            winner, oldest = epoch, years
        out = {place for place, _ in refused}
        joined = [
            report["place"]
            for report in sorted(joining, key=_seniority)
            if report["place"] not in out
        ]
        survivors = [place for place in winner.places if place in {*present, *joined}]
        newcomers = [place for place in [*present, *joined] if place not in survivors]
        sources = [winner.rank(place) for place in survivors] + [None] * len(newcomers)
        return cls(winner, adopt, (*survivors, *newcomers), tuple(sources)), refused

    @classmethod
    def appointed(cls, reports: Mapping[str, Message], *, ordered: bool) -> "Roster":
        """Of the members whom somebody else has chosen, by their doors: from the epoch of which
        most keep their order."""
        found: list[tuple[int, int, int, Roster]] = []
        for base in (Epoch.of(report["epoch"]) for report in reports.values()):
            rank = {
                place: base.rank(place) if base.key in keys_of(report) else None
                for place, report in reports.items()
            }
            places = list(reports)
            if not ordered:
                places.sort(key=partial(_before, rank))
            kept = 0  # ranks that keep their order, from the first on
            while kept < len(places) and _follows([rank[place] for place in places[: kept + 1]]):
                kept += 1
            sources = [rank[place] for place in places[:kept]] + [None] * (len(places) - kept)
            found.append(
                (kept, base.number, -len(found), cls(base, base.key, tuple(places), tuple(sources)))
            )
        *_, best = max(found, key=lambda each: each[:3])
        return best


def base_of(members: Sequence[Message]) -> tuple[Epoch, int]:
    """The epoch from which to go on, and its key if it is to be adopted by those who are ready for
    it."""
    last = max((Epoch.of(report["epoch"]) for report in members), key=lambda epoch: epoch.number)
    doubted = [Epoch.of(report["ready"]) for report in members if report["ready"]]
    for epoch in sorted(doubted, key=lambda epoch: epoch.number, reverse=True):
        concerned = [report for report in members if report["place"] in epoch.places]
        if epoch.number > last.number and all(
            (report["ready"] or {}).get("key") == epoch.key for report in concerned
        ):
            return epoch, epoch.key
    return last, last.key


def may_go_on(
    base: Epoch, members: Sequence[Message], dead: Iterable[str], linked: Iterable[str]
) -> bool:
    """True where no others of ``base`` can go on without these members: they are more than half of
    it, or half with its first; or the processes of all others are ``dead``, who had not begun to
    agree by themselves, or with one of the ``linked``."""
    size, here = len(base.places), {report["place"] for report in members}
    lost = [place for place in base.places if place not in here]
    present = size - len(lost)
    if 2 * present > size or (2 * present == size and base.places[0] in here):
        return True
    began = {place for report in members for place in report["began"]}
    met = set(linked).union(*(report["linked"] for report in members))
    return all(place in dead and (place not in began or place in met) for place in lost)


def keys_of(report: Message) -> tuple[int, int]:
    """Of the epoch that a member is of, and of the one that it may be of by now."""
    return report["epoch"]["key"], (report["ready"] or {}).get("key", 0)


def _before(ranks: Mapping[str, int | None], place: str) -> tuple[bool, int]:
    """Survivors in their order come before newcomers."""
    rank = ranks[place]
    return rank is None, rank or 0


def _follows(ranks: Sequence[int | None]) -> bool:
    """True if the last of them is a rank, and above the one before it."""
    last = ranks[-1]
    before = ranks[-2] if len(ranks) > 1 else None
    return last is not None and (before is None or last > before)


def _seniority(report: Message) -> tuple[int, int]:
    """Newcomers of one group stay together, in their order."""
    places = report["epoch"]["places"]
    return report["epoch"]["key"], places.index(report["place"]) if report[
        "place"
    ] in places else len(places)
