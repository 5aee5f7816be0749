"""Names of the files of a store. Whatever is named otherwise is not ours: it is never written, moved or removed."""

import re

IDENTITY, MANIFEST, LOCK = "identity", "manifest", "lock"
TEMPORARY = ".tmp"
SNAPSHOT = re.compile(r"snapshot-(?!.*\.tmp$)([A-Za-z0-9][A-Za-z0-9._-]{0,99})")
PROBE = "direct" + TEMPORARY  # written once, to see what the file system takes
SEGMENTS = 10**9  # numbers that a segment may have

_SEGMENT = re.compile(r"segment-([0-9]{6,9})")


def segment_name(number: int) -> str:
    return f"segment-{number:06d}"


def segment_number(name: str) -> int | None:
    """None if it is not the name of a segment."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and name == segment_name(int(match[1])) else None


def snapshot_name(name: str) -> str:
    return f"snapshot-{name}"


def is_temporary(name: str) -> bool:
    """What an interrupted run has left behind."""
    whole = name.removesuffix(TEMPORARY)
    return name == PROBE or (whole != name and (whole in (IDENTITY, MANIFEST) or bool(SNAPSHOT.fullmatch(whole))))


def holds_state(name: str) -> bool:
    """Tensors, or which of them there are."""
    return name == MANIFEST or segment_number(name) is not None or bool(SNAPSHOT.fullmatch(name))
