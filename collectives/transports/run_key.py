"""Key of a run: a secret by which its processes know each other although the store in which they
meet is open to others.

It never travels. Whoever calls at a door and whoever opens it prove to each other that they have
it, each by an HMAC over the door's address, the greeting and two fresh random numbers. Nothing is
encrypted, and what follows a greeting carries no proof.
"""

import hmac
import os
import secrets
from functools import cache
from pathlib import Path

from commpress.errors import InvalidArgument

VARIABLE, FILE = "COMMPRESS_RUN_KEY", "COMMPRESS_RUN_KEY_FILE"
SHORTEST, LONGEST = 32, 4096  # bytes of a key
NONCE, PROOF = 16, 32  # bytes of a random number and of an HMAC
CALLER, DOOR = b"c", b"d"  # who proves it
_MAKE = "make one with python -c 'import secrets; print(secrets.token_hex(32))'"


def run_key() -> bytes | None:
    """The key that this process was given in its environment or in a file, None if there is
    none."""
    text, file = os.environ.get(VARIABLE), os.environ.get(FILE)
    if text is not None and file is not None:
        raise InvalidArgument(f"{VARIABLE} and {FILE} are both set, expected one of them")
    return (
        _checked(text, VARIABLE) if text is not None else _read(file) if file is not None else None
    )


def new_run_key() -> str:
    """A key that nobody else has, as text for the environment."""
    return secrets.token_hex(32)


def nonce() -> bytes:
    """A number that was never used before."""
    return secrets.token_bytes(NONCE)


def proof(
    key: bytes, who: bytes, place: str, greeting: bytes, challenge: bytes, answer: bytes = b""
) -> bytes:
    """The HMAC by which one of both ends shows that it has the key.

    ``greeting`` ends with the caller's number, ``challenge`` is the door's. The one of an
    ``answer`` covers the answer too.
    """
    return hmac.digest(key, b"".join((who, greeting, challenge, answer, place.encode())), "sha256")


def proves(given: bytes, expected: bytes) -> bool:
    """True if both are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given, expected)


@cache
def _read(file: str) -> bytes:
    """The key in a file, which is read once."""
    try:
        with Path(file).open("rb") as source:
            text = source.read(LONGEST + 2).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"{FILE} is {file!r}, expected a file that holds the key of the run as text ({error})"
        ) from error
    return _checked(text, f"the key in {FILE}={file}")


def _checked(text: str, name: str) -> bytes:
    """The key itself is in no error: errors are logged."""
    key = text.strip().encode()
    if not SHORTEST <= len(key) <= LONGEST:
        raise InvalidArgument(
            f"{name} has {len(key)} bytes, expected {SHORTEST} to {LONGEST:,}: {_MAKE}"
        )
    return key
