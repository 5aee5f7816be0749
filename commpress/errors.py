"""What can go wrong, as a tree.

CommpressError
├── InvalidArgument     a value the caller passed cannot work                     (also a ValueError)
├── StateMismatch       a loaded state does not belong to this model or codec     (also a ValueError)
├── MissingPackage      an optional package is needed; the message names it       (also an ImportError)
├── NonFiniteGradient   a rank produced NaN or infinity and the policy is "raise" (also an ArithmeticError)
└── CommunicationError  the ranks could not finish a collective                   (also a RuntimeError)
    ├── Mismatch        a peer is doing something else: codec, size or order differ
    └── PeerFailure     a peer died or stayed silent beyond the timeout

Every message says what came, what was expected and what to do.
"""


class CommpressError(Exception):
    """The root of the tree."""


class InvalidArgument(CommpressError, ValueError):
    """A value the caller passed cannot work."""


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


class PeerFailure(CommunicationError):
    """A peer died, or stayed silent beyond the timeout."""
