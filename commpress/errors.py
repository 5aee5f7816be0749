"""Errors, in a tree.

CommpressError
├── InvalidArgument     a value the caller passed cannot work                  (ValueError)
├── StateMismatch       a loaded state does not belong to this model or codec  (ValueError)
├── MissingPackage      an optional package is needed; the message names it    (ImportError)
├── NonFiniteGradient   a rank has NaN or infinity and the policy is "raise"   (ArithmeticError)
├── CommunicationError  the ranks could not finish a collective                (RuntimeError)
│   ├── Mismatch        a peer is doing something else: codec, size or order differ
│   ├── Corrupted       bytes changed between a peer and this rank
│   ├── PeerFailure     a peer died or stayed silent beyond the timeout
│   ├── NoQuorum        too few ranks remain: others may continue elsewhere
│   └── Excluded        the others continue without this rank, which may join them again
└── StorageError        a tiered store could not do what was asked             (RuntimeError)
    ├── Damaged         committed bytes are missing or do not match their checksum
    ├── DirectoryRefused  a directory is in use, foreign, or not a store
    ├── DiskFull        no room left on a disk or in its budget
    ├── OverBudget      everything in a memory tier is in use
    └── DiskFailure     the operating system reported an error for a file

In parentheses: the error of Python that each is a subclass of, too. Every message names what was
given, what was expected and what to do.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from typing import Any


class CommpressError(Exception):
    """The root of the tree."""


class InvalidArgument(CommpressError, ValueError):
    """An argument cannot work."""


class StateMismatch(CommpressError, ValueError):
    """A loaded state does not belong to this model, codec or world size."""


class MissingPackage(CommpressError, ImportError):
    """An optional package is needed."""


class NonFiniteGradient(CommpressError, ArithmeticError):
    """A rank produced NaN or infinity; no residual and no parameter was changed."""


class CommunicationError(CommpressError, RuntimeError):
    """The ranks could not finish a collective; ``ranks`` are the peers at fault."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Mismatch(CommunicationError):
    """A peer is doing something else: codec, options, size or order differ."""


class Corrupted(CommunicationError):
    """Bytes changed between a peer and this rank. They have changed no residual and no
    parameter."""


class PeerFailure(CommunicationError):
    """A peer died, or stayed silent beyond the timeout."""


class NoQuorum(CommunicationError):
    """Too few ranks of a group remain to continue: others may continue elsewhere. ``ranks`` are the
    missing ones."""


class Excluded(CommunicationError):
    """The others continue without this rank; ``contact`` is the address at which it may join them
    again, "" if unknown."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), contact: str = "") -> None:
        super().__init__(message, ranks=ranks)
        self.contact = contact


class StorageError(CommpressError, RuntimeError):
    """A tiered store could not do what was asked; what was committed before is unchanged."""


class Damaged(StorageError):
    """Committed bytes are missing or do not match their checksum; they are never returned."""

    def __init__(
        self, message: str, *, names: tuple[str, ...] = (), file: str = "", offset: int = 0
    ) -> None:
        super().__init__(message)
        self.names, self.file, self.offset = names, file, offset


class DirectoryRefused(StorageError):
    """A directory is in use by another process, belongs to somebody else, or is not a store."""


class DiskFull(StorageError):
    """No room left on a disk, or in a limit on its use or on writes to it; ``missing`` is in
    bytes."""

    def __init__(self, message: str, *, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class OverBudget(StorageError):
    """Everything in a memory tier is in use and nothing can be evicted."""


class DiskFailure(StorageError):
    """The operating system reported an error for a file."""


def check_entries(state: Any, entries: Iterable[str], what: str) -> None:
    """Raise ``StateMismatch`` unless a state is a dictionary that has these entries."""
    known = state if isinstance(state, Mapping) else {}
    missing = [entry for entry in entries if entry not in known]
    if missing:
        raise StateMismatch(
            f"{what} has no {', '.join(map(repr, missing))}: it is only a part of a state, or of "
            "another version of commpress. Load all of what state_dict() or elastic_state_dict() "
            "of this version returned"
        )


def check_counts(least: int = 0, /, **values: object) -> None:
    """Raise ``InvalidArgument`` for an option that is not a whole number of at least ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            expected = f"expected a whole number of at least {least}"
            raise InvalidArgument(f"{name} is {value!r}, {expected}")


def refuse_model(params: object) -> None:
    """Raise ``InvalidArgument`` for a model where its parameters are expected."""
    if callable(getattr(params, "named_parameters", None)):
        raise InvalidArgument(
            f"params is a {type(params).__name__}, expected its parameters: model.parameters()"
        )


def refuse_unknown(
    where: str, options: Mapping[str, object], *takers: Callable[..., object]
) -> None:
    """Raise ``InvalidArgument`` for an option that none of ``takers`` has, and suggest the option
    that was meant."""
    known = {
        name
        for taker in takers
        for name, p in signature(taker).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            cure = (
                f"did you mean {near[0]}=?"
                if near
                else f"it takes {', '.join(sorted(known - {'self'}))}"
            )
            raise InvalidArgument(f"{where} got {name}={value!r}, which it does not take: {cure}")
