"""Published versions over HTTP: ranges of files, and a key that neither side sends.

Whoever has the key proves it: the reader by an HMAC over its request and the server's last random
number, the server by one over its answer and the reader's. So nobody else reads anything, nor is
read from. Nothing is encrypted.
"""

import http.client
import os
import time
from hashlib import blake2b
from urllib.parse import urlsplit

from commpress.collectives.transports.run_key import (
    CALLER,
    DOOR,
    LONGEST,
    NONCE,
    PROOF,
    SHORTEST,
    nonce,
    proof,
    proves,
    run_key,
)
from commpress.errors import CommunicationError, Corrupted, InvalidArgument
from commpress.integrations.weights.places import FolderPlace, ObjectPlace, ReadablePlace
from commpress.integrations.weights.weight_records import HEAD_NAME, LONGEST_HEAD

SCHEME, CHALLENGE, PROOF_HEADER = "Commpress", "X-Commpress-Challenge", "X-Commpress-Proof"
MOST = 8 << 20  # bytes of an answer
LONGEST_WAIT = 20.0  # seconds of an answer that waits for the next version
TRIES, PAUSE = 4, 0.25  # and seconds before the second try, twice as many before each further one


def reading_place(source: str | os.PathLike[str], key: bytes | None) -> ReadablePlace:
    """A source of versions by its folder or URL."""
    text = os.fspath(source)
    if text.startswith(("http://", "https://")):
        return HttpPlace(text, checked_key(key))
    return ObjectPlace(text) if "://" in text else FolderPlace(text)


def checked_key(key: bytes | None) -> bytes | None:
    """The key that was given, or that of the environment."""
    if key is None:
        return run_key()
    if not isinstance(key, bytes) or not SHORTEST <= len(key) <= LONGEST:
        raise InvalidArgument(f"key is no {SHORTEST} to {LONGEST:,} bytes: take new_run_key()")
    return key


def asked(name: str, first: int, last: int) -> bytes:
    """The part of a request that proofs cover."""
    return f"{name} {first}-{last}".encode()


def answered(status: int, total: int, body: bytes) -> bytes:
    """The part of an answer that its proof covers."""
    return b"%d %d " % (status, total) + blake2b(body, digest_size=32).digest()


class _Connection:
    """A connection, and the random number that the server's last answer on it brought."""

    def __init__(self, wire: http.client.HTTPConnection) -> None:
        self.wire, self.challenge = wire, b""


class HttpPlace(ReadablePlace):
    """A server's versions; a connection for each request that is under way, opened again where it
    breaks."""

    def __init__(self, url: str, key: bytes | None, *, timeout: float = 30.0) -> None:
        super().__init__()
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidArgument(f"{url!r} has no port that can be ({error})") from error
        if not self._host or parts.username or parts.query or parts.path.strip("/"):
            raise InvalidArgument(f"{url!r} is no server, expected such as http://trainer:9500")
        self._url, self._secure = url, parts.scheme == "https"
        self._key, self._timeout = key, timeout
        self._idle: list[_Connection] = []

    def __str__(self) -> str:
        return self._url

    def _fresh(self) -> _Connection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return _Connection(kind(str(self._host), self._port, timeout=self._timeout))

    def read(self, name: str, first: int, most: int) -> bytes:
        parts: list[bytes] = []
        total = first + most
        while most > 0 and first < total:
            part, total = self.range(name, first, first + min(most, MOST) - 1)
            if not part:
                break
            parts.append(part)
            first, most = first + len(part), most - len(part)
        return b"".join(parts)

    def head(self, after: int, seconds: float) -> bytes:
        wait = f"?after={after}&seconds={min(seconds, LONGEST_WAIT):.3f}" if seconds > 0 else ""
        return self.range(HEAD_NAME + wait, 0, LONGEST_HEAD - 1)[0]

    def range(self, name: str, first: int, last: int) -> tuple[bytes, int]:
        """(bytes, size of the whole file)."""
        for pause in (*(PAUSE * 2**i for i in range(TRIES - 1)), None):
            try:  # another thread may take the last one meanwhile
                connection = self._idle.pop()
            except IndexError:
                connection = self._fresh()
            try:
                found = self._ask(connection, name, first, last)
            except FileNotFoundError:
                self._idle.append(connection)
                raise
            except (http.client.HTTPException, OSError) as error:
                connection.wire.close()
                if pause is None:
                    what = f"{self._url} gave no {name} in {TRIES} tries: {error!r}"
                    raise CommunicationError(what) from error
                time.sleep(pause)
            except BaseException:
                connection.wire.close()
                raise
            else:
                self._idle.append(connection)
                return found
        raise AssertionError

    def _ask(self, connection: _Connection, name: str, first: int, last: int) -> tuple[bytes, int]:
        own, request = nonce(), asked(name, first, last)
        for _ in range(2):
            headers = {"Range": f"bytes={first}-{last}"}
            if self._key is not None and connection.challenge:
                shown = proof(self._key, CALLER, "", request, connection.challenge, own)
                headers["Authorization"] = f"{SCHEME} {own.hex()} {shown.hex()}"
            connection.wire.request("GET", f"/{name}", headers=headers)
            response = connection.wire.getresponse()
            body = response.read(MOST + 1)
            connection.challenge = _octets(response.headers.get(CHALLENGE, ""), NONCE)
            if response.status != 401 or not connection.challenge or "Authorization" in headers:
                break
            if self._key is None:
                cure = "set COMMPRESS_RUN_KEY, or pass key="
                raise InvalidArgument(f"{self._url} asks for the key of the run: {cure}")
        if response.status == 401:
            cure = "both sides need the same COMMPRESS_RUN_KEY"
            raise InvalidArgument(f"{self._url} has another key of the run: {cure}")
        end = response.headers.get("Content-Range", "").rpartition("/")[2]
        total = int(end) if end.isascii() and end.isdigit() and len(end) < 20 else 0
        if self._key is not None:
            answer = answered(response.status, total, body)
            shown = _octets(response.headers.get(PROOF_HEADER, ""), PROOF)
            if not proves(shown, proof(self._key, DOOR, "", request, own, answer)):
                what = "does not prove that it has the key of the run: nothing it sent is used"
                raise Corrupted(f"{self._url} {what}")
        if response.status == 404:
            raise FileNotFoundError(name)
        if response.status == 416:
            return b"", total
        if response.status != 206 or len(body) > last - first + 1:
            what = f"{response.status} with {len(body):,} bytes of {name}, expected 206"
            raise CommunicationError(f"{self._url} answered {what}")
        return body, total


def _octets(text: str, count: int) -> bytes:
    """The bytes of a hexadecimal number of so many, or none."""
    whole = len(text) == 2 * count and set(text) <= set("0123456789abcdef")
    return bytes.fromhex(text) if whole else b""
