"""Faults of a step: the failed communication behind an error, and what errors keep alive."""

from collections.abc import Sequence

from commpress.errors import CommunicationError


def fault_of(error: BaseException) -> CommunicationError | None:
    """The failed communication behind an error, if there is one."""
    seen: Sequence[BaseException | None] = [error]
    while seen and seen[0] is not None:
        if isinstance(seen[0], CommunicationError):
            return seen[0]
        seen = [seen[0].__cause__ or seen[0].__context__]
    return None


def without_frames(error: BaseException | None) -> None:
    """Forget where an error, and what it came of, was raised: the frames hold all that their
    functions worked with."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            waiting += [each.__cause__, each.__context__]
