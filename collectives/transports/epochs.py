"""Membership of the processes of a group on who is in it from now on, over their doors, without a
store.

Everybody asks the first of the last epoch that runs; that one leads: it waits until every member
has come, is known to be dead or has been silent for too long, proposes an epoch, and has all of its
members build their connections. An epoch is complete when all have said that they are ready, and
the leader says so. Whoever is ready and does not hear it is in doubt until the next agreement: if
everybody in reach is ready it is complete, because someone out of reach may have heard; else it
never was. If the leader dies the next one leads.

Two halves of a divided group cannot both go on: that takes more than half of the last epoch's
members, or half with its first; or that the processes of all others are known to be dead, who did
not go on by themselves before.
"""

import gc
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from commpress.collectives.change import Change
from commpress.collectives.transports.connection import Conversation, Message
from commpress.collectives.transports.meeting import (
    DIFFERS,
    ENLIST,
    GIVE_ALL,
    GONE_ON,
    JOIN,
    PING,
    WELCOME,
    Heartbeat,
    knock,
)
from commpress.collectives.transports.membership import (
    Epoch,
    Membership,
    Proposal,
    Roster,
    base_of,
    contact_of,
    keys_of,
    may_go_on,
    new_key,
)
from commpress.errors import CommunicationError, Excluded, InvalidArgument, NoQuorum, PeerFailure

TICK = 0.05  # seconds between two looks at what is not a message
CANDIDATES = 8  # members asked at the same time whether they run
SILENCE = 5.0  # seconds without an answer after which a process counts as stopped, at most
OTHER_VERSION = "this process is of another version of commpress than the members: install theirs"
DEAD, SILENT, LATE, LEFT = (
    "its process is gone",
    "its process does not answer",
    "it did not come",
    "it gave up",
)


@dataclass(frozen=True)
class Terms:
    """Terms on which one process comes to an agreement."""

    age: int = 0
    said: bytes = b""
    minimum: int = 1
    admits: bool = True  # newcomers, where this process leads; else they wait at the door
    # of the objects that are to be connected: the same for everybody
    labels: Callable[[], Sequence[str]] = tuple
    count: int = 0  # of groups that it has named; the largest goes on
    contacts: Callable[[], Sequence[str]] | None = None  # doors of a group to join
    began: tuple[str, ...] = ()  # doors of members that had begun to agree before this one did
    # doors of those who are to be the members, where somebody else has agreed on them
    appointed: tuple[str, ...] = ()
    ordered: bool = True  # they are by rank
    key: int = 0  # of the epoch, then


class Builder(Protocol):
    """Builder of the group that is agreed on, as one process has it."""

    @property
    def refusal(self) -> str:
        """The reason why an object of this process cannot go on with what was built, or nothing."""

    def offer(self, places: Sequence[str]) -> Message:
        """Facts that a leader gives to all who are to build."""

    def build(self, proposal: Proposal, watch: Callable[[], object]) -> Callable[[], None]:
        """Connect, stage; what to do once everybody has. May be called again, after ``undo``.

        ``watch``: to be called while others are awaited; it raises when that is in vain.
        """

    def undo(self) -> None:
        """Let go of what ``build`` has made or begun."""


class Agreement:
    """One agreement, as one process takes part in it.

    ``run`` returns the change on which all have agreed and which they have built, and what some of
    their objects have against it; or raises one of the named errors, in ``timeout`` seconds, or
    little more where building takes longer.
    """

    def __init__(self, mine: Membership, terms: Terms, builder: Builder, timeout: float) -> None:
        self.mine, self.terms, self.builder, self.timeout = mine, terms, builder, timeout
        self.here, self.patience = mine.here, min(SILENCE, timeout / 5)
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.late = self.started + timeout * (0.8 if terms.appointed else 0.5)
        self.links: dict[str, Conversation] = {}
        self.reports: dict[str, Message] = {}
        self.fresh: list[Conversation] = []  # callers that have not said who they are
        self.gone: dict[str, tuple[str, float]] = {}  # doors at which nobody leads: why, since when
        self.probes: dict[str, Heartbeat] = {}
        self.linked: set[str] = set()  # members that agreed with this one, at any time
        self.proposal: Proposal | None = None
        self.contacts: deque[str] = deque()
        self.tried: dict[str, str] = {}  # contacts at which nobody leads: why
        self.swept = False  # objects that nobody holds any more are gone
        # members whose garbage is being collected, which stops all threads of a process
        self.sweeping: set[str] = set()
        self.moved = False  # sent to another leader
        self.too_few = False  # to go on without those who are missing
        self.change: Change | None = None  # since this agreement began
        mine.expected = terms.key

    def run(self) -> tuple[Change, str]:
        try:
            while True:
                leader = self._leader()
                outcome = self._lead() if leader == self.here else self._follow(leader)
                if outcome is not None:
                    return outcome
        except BaseException:
            self.mine.expected = 0
            if self.mine.ready is None:
                self.builder.undo()
            raise
        finally:
            # members among them call again, when this process can be told of it
            self.fresh += self.mine.callers()
            # who has been silent for long would hold up the next one as well
            now, admits = time.monotonic(), self.terms.admits
            later = [
                link
                for link in self.fresh
                if link.kind == JOIN and (not admits or now < link.since + self.patience)
            ]
            self.mine.give_back(later)
            for link in [*self.links.values(), *(link for link in self.fresh if link not in later)]:
                link.close()
            for probe in self.probes.values():
                probe.close()

    def _leader(self) -> str:
        """The door of who is to lead: the first that runs."""
        if self.terms.appointed:
            return self.terms.appointed[0]
        if self.terms.contacts is not None and self.mine.ready is None:
            while not self.contacts:
                self.contacts.extend(self.terms.contacts())
                self._check()
                if not self.contacts:
                    self._listen([], TICK)
            return self.contacts[0]
        return next((place for place in self._order() if place not in self.gone), self.here)

    def _next(self) -> list[str]:
        """Some of those who lead if others do not: they are asked at the same time, so as not to
        wait for each in turn."""
        return [place for place in self._order() if place not in self.gone and place != self.here][
            :CANDIDATES
        ]

    def _order(self) -> tuple[str, ...]:
        if self.terms.appointed:
            return self.terms.appointed
        return self.mine.ready[0].epoch.places if self.mine.ready else self.mine.epoch.places

    def _report(self) -> Message:
        ready, terms = self.mine.ready, self.terms
        return {
            "place": self.here,
            "epoch": asdict(self.mine.epoch),
            "ready": asdict(ready[0].epoch) if ready else None,
            "age": terms.age,
            "said": terms.said,
            "minimum": terms.minimum,
            "labels": list(terms.labels()),
            "count": terms.count,
            "patience": self.late - time.monotonic(),
            "join": terms.contacts is not None,
            "began": list(terms.began),
            "linked": list(self.linked),
            "brings": self.mine.waiting,
            "appointed": list(terms.appointed),
            "ordered": terms.ordered,
            "describes": dict(self.mine.description()) if terms.contacts is not None else {},
        }

    # ------------------------------------------------------------ waiting

    def _check(self) -> None:
        if time.monotonic() < self.deadline:
            return
        if self.tried and self.mine.ready is None:
            doors = ", ".join(f"{contact_of(place)} ({why})" for place, why in self.tried.items())
            raise PeerFailure(
                f"rank {self.mine.rank} waited {self.timeout:g} s to join the group of {doors}. "
                "Pass as join= the contact of a member that runs, or a store that outlives the "
                "members"
            )
        waited = [
            place for place in self._order() if place != self.here and place not in self.reports
        ]
        if self.terms.appointed and self.here != self.terms.appointed[0]:
            waited = [self.terms.appointed[0]]
        raise PeerFailure(
            f"rank {self.mine.rank} waited {self.timeout:g} s for agreement on who goes on. "
            f"{self._names(waited) or 'Nobody answered.'}",
            ranks=self._ranks(waited),
        )

    def _listen(self, links: Iterable[Conversation], seconds: float) -> None:
        """Wait for news from these links and at the door, and answer whoever is there."""
        with self.mine.attending, selectors.DefaultSelector() as news:
            news.register(self.mine.door, selectors.EVENT_READ)
            for link in links:
                if link.open:
                    news.register(link, selectors.EVENT_READ)
            news.select(max(seconds, 0.0))
            self.mine.listen()

    def _probe(self, place: str) -> Heartbeat:
        probe = self.probes.get(place)
        if probe is None:
            probe = self.probes[place] = Heartbeat(place, lambda: self.mine.keys)
            probe.dead = place in self.mine.dead
        probe.look()
        (self.mine.dead.add if probe.dead else self.mine.dead.discard)(place)
        return probe

    def _swept(self, place: str) -> None:
        """Take note that a member speaks: its door was not attended while it collected garbage."""
        if place in self.sweeping:
            self.sweeping.discard(place)
            self._probe(place).hear()

    def _state(self, place: str) -> str:
        """The reason not to wait for a member, "" if there is none."""
        probe = self._probe(place)
        # a newcomer is of an epoch of its own
        if probe.gone_on and place in self.mine.epoch.places:
            raise self._excluded(place)
        if probe.dead:
            return DEAD
        if probe.silent > self.patience and place not in self.sweeping:
            return SILENT
        return LATE if time.monotonic() > self.late else ""

    def _excluded(self, place: str) -> Excluded:
        others = [each for each in self._order() if each != self.here]
        return Excluded(
            f"rank {self.mine.rank}: the others went on without this rank, which was stopped, cut "
            "off or too late. group.reform(join=error.contact) takes it in again, as a newcomer.",
            ranks=self._ranks(others),
            contact=contact_of(place),
        )

    def _ranks(self, places: Iterable[str]) -> tuple[int, ...]:
        found = (self._rank(place) for place in places)
        return tuple(sorted(rank for rank in found if rank is not None))

    def _rank(self, place: str) -> int | None:
        """The number by which errors name a member: that of now, or the appointed one."""
        if self.terms.appointed and self.terms.ordered:
            return self.terms.appointed.index(place) if place in self.terms.appointed else None
        return self.mine.epoch.rank(place)

    def _names(self, places: Iterable[str]) -> str:
        """Sentences about members that are missing."""
        said = []
        for place in places:
            rank = self._rank(place)
            probe = self.probes.get(place)
            why = self.gone[place][0] if place in self.gone else "it runs, but did not come"
            if probe is not None and place not in self.gone:
                why = (
                    DEAD
                    if probe.dead
                    else SILENT
                    if not probe.heard_since(time.monotonic() - self.patience)
                    else why
                )
            said.append(f"Rank {rank}: {why}." if rank is not None else f"A newcomer: {why}.")
        return " ".join(said)

    # ------------------------------------------------------------ following

    def _follow(self, place: str) -> tuple[Change, str] | None:
        """Do what the process behind ``place`` says; None if it does not lead, or no more."""
        self._check()
        kind = JOIN if self.terms.contacts is not None and self.mine.ready is None else ENLIST
        try:
            left = min(self.patience, self.deadline - time.monotonic())
            call = knock(place, kind, self.mine.rank, self.mine.keys, left)
        except OSError as error:
            self._leave(place, DEAD if isinstance(error, ConnectionRefusedError) else SILENT)
            return None
        link, welcomed, since = Conversation(call.socket, place, kind), False, time.monotonic()
        try:
            while link.open:
                self._check()
                self._listen([link], TICK)
                if not welcomed:
                    answer = call.look()
                    if answer == DIFFERS:
                        raise InvalidArgument(
                            f"this process and the one at {contact_of(place)} are not of one run: "
                            f"{GIVE_ALL}"
                        )
                    if (
                        answer == GONE_ON
                        and not self.terms.appointed
                        and place in self.mine.epoch.places
                    ):
                        raise self._excluded(place)
                    if answer is not None and answer != WELCOME:
                        break
                    welcomed = answer == WELCOME
                    if welcomed:
                        self.linked.add(place)
                        link.tell("report", **self._report())
                for message in link.receive() if welcomed else []:
                    outcome = self._obey(message, link)
                    if outcome is not None:
                        return outcome
                if kind == JOIN:
                    if (
                        not welcomed
                        and len(self.contacts) > 1
                        and time.monotonic() > since + self.patience
                    ):
                        break
                elif why := self._lost(link):
                    self._leave(place, why)
                    return None
                for other in self._next():
                    self._probe(other)
                if welcomed and not self.terms.appointed:
                    self._send_on(place)
        finally:
            link.close()
        if self.moved:
            self.moved = False
            return None
        self._leave(place, self._why(place))
        return None

    def _why(self, place: str) -> str:
        """The way in which the process ended that has hung up."""
        try:
            knock(place, PING, self.mine.rank, self.mine.keys, self.patience).close()
        except ConnectionRefusedError:
            return DEAD
        except OSError:
            return SILENT
        return LEFT

    def _leave(self, place: str, why: str) -> None:
        time.sleep(TICK / 2 if why != DEAD else 0)
        if self.terms.appointed:
            if why == DEAD and time.monotonic() > self.started + self.patience:
                self._probe(place).dead = True
                raise PeerFailure(
                    f"the group cannot be formed. {self._names([place])}",
                    ranks=self._ranks([place]),
                )
        elif self.contacts and place == self.contacts[0]:
            self.tried[self.contacts.popleft()] = why
        else:
            self.gone[place] = why, time.monotonic()

    def _send_on(self, leader: str) -> None:
        """Tell those who have called here who leads."""
        for link in self.mine.callers():
            link.tell("goto", place=leader, places=list(self._order()))
            link.close()

    def _obey(self, message: Message, link: Conversation) -> tuple[Change, str] | None:
        self._swept(link.place)
        match message:
            case {"is": "propose"}:
                self._settle(message["adopt"])
                self.proposal = _proposal(message)
                self.linked.update(self.proposal.epoch.places)
                link.tell("accept", key=self.proposal.epoch.key)
            case {"is": "go"} if self.proposal is not None:
                key = self.proposal.epoch.key
                failed = self._build(self.proposal, partial(self._still_led, link))
                if failed is None:
                    link.tell("ready", key=key, refusal=self.builder.refusal)
                else:
                    link.tell("failed", key=key, text=failed)
            case {"is": "sweep"}:
                self.sweeping.add(link.place)
                gc.collect()
                link.tell("report", **self._report())
            case {"is": "abort"}:
                self._settle(0)
            case {"is": "done"}:
                return self._complete(), message["refusal"]
            case {"is": "goto"}:
                self.moved = True
                if self.terms.contacts is not None and self.mine.ready is None:
                    self.contacts = deque(
                        [message["place"], *(p for p in message["places"] if p != message["place"])]
                    )
                else:
                    self.gone.pop(message["place"], None)
                    self.probes.pop(message["place"], None)
                link.close()
            case {"is": "refused"}:
                kind, ranks = _ERRORS[message["kind"]], tuple(message["ranks"])
                raise _error(kind, message["text"], ranks)
        return None

    def _lost(self, leader: Conversation) -> str:
        """The reason why a leader leads no more, "" if there is none; whoever joins waits longer,
        and so do the appointed."""
        if leader.kind == JOIN or self.terms.appointed:
            return ""
        why = self._state(leader.place)
        return why if why in (DEAD, SILENT) else ""

    def _still_led(self, link: Conversation) -> None:
        """Raise if the leader has given up what it had proposed, or is gone."""
        self._check()
        self._require(not link.news and not self._lost(link))

    def _require(self, all_here: bool) -> None:
        if not all_here:
            raise PeerFailure(
                f"rank {self.mine.rank}: somebody went, or failed, while the group was connected."
            )

    def _build(self, proposal: Proposal, watch: Callable[[], object]) -> str | None:
        """Build; what went wrong, or None: then this process is ready."""
        try:
            commit = self.builder.build(proposal, watch)
        except (CommunicationError, OSError, RuntimeError) as error:
            self.builder.undo()
            return f"{type(error).__name__}: {error}"
        self.mine.ready = proposal, commit
        return None

    def _complete(self) -> Change:
        change = self.mine.complete()
        self.change = change if self.change is None else change.after(self.change)
        return self.change

    def _settle(self, adopt: int) -> None:
        """Decide on what is in doubt: it was completed if it is to be adopted, else it never
        was."""
        if self.mine.ready is None:
            return
        if self.mine.ready[0].epoch.key == adopt:
            self._complete()
        else:
            self.mine.ready = None
            self.builder.undo()

    # ------------------------------------------------------------ leading

    def _lead(self) -> tuple[Change, str] | None:
        """Gather the members, propose, carry out; None if another is to lead."""
        while True:
            self._check()
            self._listen([*self.links.values(), *self.fresh], TICK)
            self._collect()
            if self._gives_way():
                return None
            roster = self._roster()
            if roster is not None:
                outcome = self._carry_out(roster)
                if outcome is not None:
                    return outcome

    def _collect(self) -> None:
        """Take reports; forget who has hung up."""
        self.fresh += self.mine.callers()
        for link in [link for link in self.fresh if self.terms.admits or link.kind != JOIN]:
            for message in link.receive():
                if message["is"] != "report":
                    continue
                if not self._report().keys() <= message.keys():
                    link.tell("refused", kind="InvalidArgument", text=OTHER_VERSION, ranks=[])
                    link.close()
                    break
                self.fresh.remove(link)
                place = link.place = message["place"]
                if place in self.links:
                    self.links[place].close()
                message["came"] = time.monotonic()
                self.links[place], self.reports[place] = link, message
                self.linked.add(place)
                self._swept(place)
                self.late = min(self.late, time.monotonic() + max(message["patience"], 0.0))
            if not link.open and link in self.fresh:
                self.fresh.remove(link)
        for place, link in list(self.links.items()):
            link.receive()
            if not link.open:
                self._drop(place)

    def _drop(self, place: str) -> None:
        self.links.pop(place).close()
        del self.reports[place]

    def _gives_way(self) -> bool:
        """True if one before this in the order runs after all."""
        for place in self._order():
            if place == self.here:
                return False
            in_time = time.monotonic() < self.late or self.too_few
            if (
                place in self.gone
                and self._probe(place).heard_since(self.gone[place][1])
                and in_time
            ):
                del self.gone[place]
                for link in self.links.values():
                    link.tell("goto", place=place, places=list(self._order()))
                    link.close()
                self.links.clear()
                self.reports.clear()
                return True
        return False

    def _roster(self) -> Roster | None:
        """The members from now on; None while somebody is awaited."""
        own = self._report()
        if self.terms.appointed:
            return self._appointed(own)
        keys = {key for key in self.mine.keys if key}
        members = [
            own,
            *(report for report in self.reports.values() if keys & set(keys_of(report))),
        ]
        base, adopt = base_of(members)
        here = {report["place"] for report in members}
        lost = {place: self._state(place) for place in base.places if place not in here}
        joining = [report for report in self.reports.values() if report["place"] not in here]
        for report in [report for report in joining if not report["join"]]:
            self._refuse(
                report["place"],
                "Excluded",
                "the others went on without this rank. Let it join them again.",
            )
        unlike = {report["place"]: self.mine.unlike(report) for report in joining if report["join"]}
        for place in [place for place, text in unlike.items() if text]:
            self._refuse(place, "InvalidArgument", unlike[place])
        joining = [report for report in joining if report["join"] and not unlike[report["place"]]]
        overdue = time.monotonic() > self.late
        if not all(lost.values()) or self._awaits(joining, members):
            return None
        size, dead = len(base.places), {place for place, why in lost.items() if why == DEAD}
        self.too_few = not may_go_on(base, members, dead, self.linked)
        if self.too_few:
            if overdue and self._final(lost):
                text = (
                    f"{size - len(lost)} of {size} ranks are left, which is no majority: the "
                    f"others may go on elsewhere, so these must not. {self._names(lost)}"
                )
                self._end(NoQuorum, text, lost)
            return None
        if not self.swept and any(
            report["labels"] != own["labels"] for report in (*members, *joining)
        ):
            self._sweep()
            return None
        for report in members:
            if report["labels"] != own["labels"]:
                self._end(InvalidArgument, _different(own, report), {})
        for report in [report for report in joining if report["labels"] != own["labels"]]:
            joining.remove(report)
            self._refuse(report["place"], "InvalidArgument", _different(own, report))
        there = size - len(lost) + len(joining)
        minimum = max(report["minimum"] for report in members)
        if there < minimum:
            if overdue and self._final(lost):
                self._end(
                    NoQuorum,
                    f"{there} ranks are here, and minimum is {minimum}. {self._names(lost)}",
                    lost,
                )
            return None
        roster, refused = Roster.merged(base, adopt, members, joining)
        for place, text in refused:
            self._refuse(place, "InvalidArgument", text)
        return roster

    def _final(self, lost: dict[str, str]) -> bool:
        """True if none of these can come any more: their processes are gone, or have not answered
        to the end."""
        reasons = set(lost.values())
        return reasons <= {DEAD} or (
            reasons <= {DEAD, SILENT} and time.monotonic() > self.deadline - self.patience
        )

    def _sweep(self) -> None:
        """Have all report again without objects that only the garbage collector would find."""
        self.swept = True
        for place, link in self.links.items():
            link.tell("sweep")
            self.sweeping.add(place)
        gc.collect()
        self.fresh += self.links.values()
        self.links.clear()
        self.reports.clear()

    def _awaits(self, joining: Sequence[Message], members: Sequence[Message]) -> bool:
        """True while newcomers are to be waited for: sent here by members, or of a group of which
        others have come."""
        now = time.monotonic()
        if not self.terms.admits:
            return False
        if any(
            link.kind == JOIN and now < min(self.started, link.since) + self.patience
            for link in self.fresh
        ):
            return True
        for report in [r for r in joining if r["epoch"]["lineage"] != self.mine.epoch.lineage]:
            group = [r for r in joining if r["epoch"]["key"] == report["epoch"]["key"]]
            if (
                len(group) < len(report["epoch"]["places"])
                and now < min(r["came"] for r in group) + self.patience
            ):
                return True
        brought = [r for r in members if r["brings"] and now < r.get("came", 0.0) + self.patience]
        return len(joining) < sum(report["brings"] for report in brought)

    def _appointed(self, own: Message) -> Roster | None:
        """Members are those whom somebody else has chosen: all of them come, or nobody goes on."""
        terms = self.terms
        for report in self.reports.values():
            if (report["appointed"], report["ordered"]) != (own["appointed"], own["ordered"]):
                self._end(
                    InvalidArgument,
                    "ranks were given different handles for the same uuid: give all the same ones",
                    {},
                )
        missing = [
            place for place in terms.appointed if place != self.here and place not in self.reports
        ]
        if missing:
            if all([self._probe(place).dead for place in missing]) or time.monotonic() > self.late:
                text = (
                    f"a group of {len(terms.appointed)} ranks was to be formed. "
                    f"{self._names(missing)}"
                )
                self._end(PeerFailure, text, missing)
            return None
        reports = {
            place: own if place == self.here else self.reports[place] for place in terms.appointed
        }
        different = [report for report in reports.values() if report["labels"] != own["labels"]]
        if different and not self.swept:
            self._sweep()
            return None
        if different:
            self._end(InvalidArgument, _different(own, different[0]), {})
        return Roster.appointed(reports, ordered=terms.ordered)

    # ------------------------------------------------------------ carrying out

    def _carry_out(self, roster: Roster) -> tuple[Change, str] | None:
        places = roster.places
        self._settle(roster.adopt)
        reports = [
            self._report() if place == self.here else self.reports[place] for place in places
        ]
        number = max(report["epoch"]["number"] for report in reports) + 1
        epoch = Epoch(number, self.terms.key or new_key(), roster.base.lineage, places)
        try:
            facts = self.builder.offer(places)
        except (OSError, RuntimeError):
            return None
        common = {
            "epoch": asdict(epoch),
            "sources": roster.sources,
            "size_before": len(roster.base.places),
            "said": [report["said"] for report in reports],
            "adopt": roster.adopt,
            "facts": facts,
            "count": max(report["count"] for report in reports),
        }
        links = {place: self.links[place] for place in places if place != self.here}
        for place, link in links.items():
            link.tell("propose", rank=places.index(place), **common)
        if self._answers(links, "accept", epoch.key, self.patience) is None:
            self._abort(links)
            return None
        for link in links.values():
            link.tell("go")
        found: dict[str, str] = {}
        watch = partial(self._still_whole, links, epoch.key, found)
        failed = self._build(_proposal({"rank": places.index(self.here), **common}), watch)
        left = self.deadline - time.monotonic()
        answers = (
            None if failed is not None else self._answers(links, "ready", epoch.key, left, found)
        )
        if answers is None:
            self._abort(links)
            return None
        refusal = next((text for text in [self.builder.refusal, *answers] if text), "")
        change = self._complete()
        for link in links.values():
            link.tell("done", refusal=refusal)
        return change, refusal

    def _still_whole(self, links: dict[str, Conversation], key: int, found: dict[str, str]) -> None:
        """Raise if somebody has failed, hung up or is silent while this process builds as well."""
        self._check()
        self._require(self._hear(links, "ready", key, found))

    def _answers(
        self,
        links: dict[str, Conversation],
        kind: str,
        key: int,
        seconds: float,
        found: dict[str, str] | None = None,
    ) -> list[str] | None:
        """The answers of all, of which some may be ``found``; None if somebody has failed, hung up
        or is silent."""
        found = {} if found is None else found
        until = time.monotonic() + seconds
        while len(found) < len(links):
            silent = [place for place in links if place not in found]
            if time.monotonic() > until:
                for place in silent:
                    self._drop(place)
                return None
            self._listen(links.values(), TICK)
            if not self._hear(links, kind, key, found):
                return None
        return [found[place] for place in links]

    def _hear(
        self, links: dict[str, Conversation], kind: str, key: int, found: dict[str, str]
    ) -> bool:
        """Take the answers that have come; False if somebody has failed, hung up or is silent."""
        for place, link in links.items():
            for message in link.receive():
                if message.get("key") != key:
                    continue
                if message["is"] == "failed":
                    return False
                if message["is"] == kind:
                    found[place] = message.get("refusal", "")
            gone = not link.open
            if gone or (
                place not in found
                and not self.terms.appointed
                and self._state(place) in (DEAD, SILENT)
            ):
                self._drop(place)
                return False
        return True

    def _abort(self, links: dict[str, Conversation]) -> None:
        self._settle(0)
        for link in links.values():
            link.tell("abort")

    def _refuse(self, place: str, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
        self.links[place].tell("refused", kind=kind, text=text, ranks=list(ranks))
        self._drop(place)

    def _end(self, kind: type[Exception], text: str, lost: Iterable[str]) -> None:
        """All of this group end with the same error."""
        for place in list(self.links):
            self._refuse(place, kind.__name__, text, self._ranks(lost))
        raise _error(kind, text, self._ranks(lost))


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Excluded, NoQuorum, PeerFailure, InvalidArgument)
}


def _error(kind: type[Exception], text: str, ranks: tuple[int, ...]) -> Exception:
    return kind(text, ranks=ranks) if issubclass(kind, CommunicationError) else kind(text)


def _proposal(message: Message) -> Proposal:
    said = tuple(message["said"])
    epoch = Epoch.of(message["epoch"])
    change = Change(
        epoch.number, message["rank"], message["size_before"], tuple(message["sources"]), said
    )
    return Proposal(epoch, change, message["facts"], message["count"])


def _different(own: Message, other: Message) -> str:
    return (
        f"a rank has the objects {other['labels']} over its group, and those that it meets have "
        f"{own['labels']}: construct the same ones, in the same order, on every rank before they "
        "reform"
    )
