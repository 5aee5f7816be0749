"""One line of the doctor's report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """``note``: works without it, or more slowly. ``bad``: something commpress needs does not work. ``cure``: what to do."""

    state: Literal["ok", "note", "bad"]
    what: str
    cure: str = ""


def looked_at(section: Callable[P, list[Finding]], *args: P.args, **kwargs: P.kwargs) -> list[Finding]:
    """A section that cannot look is a finding, not the end of the report."""
    try:
        return section(*args, **kwargs)
    except Exception as error:
        return [Finding("note", f"could not look: {type(error).__name__}: {error}", "this machine hides it; nothing follows")]
