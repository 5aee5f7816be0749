"""Published versions over HTTP: ranges of files, and a key that neither side sends.

Whoever has the key proves it: the reader by an HMAC over its request and the server's last random
number, the server by one over its answer and the reader's. So nobody else reads anything, nor is
read from. Nothing is encrypted.
"""

import threading
import time
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from commpress.collectives.transports import run_key as keys
from commpress.errors import CommunicationError, Corrupted, InvalidArgument
from commpress.integrations.weights import places
from commpress.integrations.weights import weight_records as records

SCHEME, CHALLENGE, PROOF_HEADER = "Commpress", "X-Commpress-Challenge", "X-Commpress-Proof"
LONGEST_WAIT = 20.0  # seconds of an answer that waits for the next version
TIMEOUT = 30.0
TRIES, PAUSE = 3, 0.25  # after the first; seconds before the second, twice as many before the next
Part = tuple[bytes, int]  # and the size of the whole file
KEPT = 1024  # parts of files that a relay keeps


def checked_key(key: bytes | None) -> bytes | None:
    """The key that was given, or that of the environment."""
    if key is None:
        return keys.run_key()
    if not isinstance(key, bytes) or not keys.SHORTEST <= len(key) <= keys.LONGEST:
        raise InvalidArgument(
            f"key is no {keys.SHORTEST} to {keys.LONGEST:,} bytes: take new_run_key()"
        )
    return key


def asked(name: str, first: int, last: int) -> bytes:
    """The part of a request that proofs cover."""
    return f"{name} {first}-{last}".encode()


def answered(status: int, total: int, body: bytes) -> bytes:
    """The part of an answer that its proof covers."""
    return b"%d %d " % (status, total) + blake2b(body, digest_size=32).digest()


class HttpPlace(places.ReadablePlace):
    """A server's versions; a connection for each request that is under way, opened again where it
    breaks."""

    def __init__(self, url: str, key: bytes | None) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        try:
            self._at = str(parts.hostname), parts.port
        except ValueError as error:
            raise InvalidArgument(f"{url!r} has no port that can be ({error})") from error
        if not parts.hostname or parts.username or parts.query or parts.path.strip("/"):
            raise InvalidArgument(f"{url!r} is no server, expected such as http://trainer:9500")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._key = key
        self._idle: list[tuple[HTTPConnection, bytes]] = []  # and the server's last random number

    def look(self, after: int, seconds: float) -> bytes:
        wait = f"?after={after}&seconds={min(seconds, LONGEST_WAIT):.3f}" if seconds > 0 else ""
        return HttpPlace.range(self, records.HEAD_NAME + wait, 0, records.LONGEST_HEAD)[0]

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        for pause in (*(PAUSE * 2**i for i in range(TRIES)), None):
            try:  # another thread may take the last one meanwhile
                wire, challenge = self._idle.pop()
            except IndexError:
                wire, challenge = self._kind(*self._at, timeout=TIMEOUT), b""
            try:
                found, total, challenge = self._ask(wire, challenge, name, first, most)
            except BaseException as error:
                wire.close()
                if not isinstance(error, (HTTPException, OSError)):
                    raise
                if pause is None:
                    what = f"{self} gave no {name} in {TRIES + 1} tries: {error!r}"
                    raise CommunicationError(what) from error
                time.sleep(pause)
                continue
            self._idle.append((wire, challenge))
            if found is None:
                raise FileNotFoundError(name)
            return found, total
        raise AssertionError

    def _ask(
        self, wire: HTTPConnection, challenge: bytes, name: str, first: int, most: int
    ) -> tuple[bytes | None, int, bytes]:
        """(bytes, or None if there is no such file; size of the file; the server's next random
        number)."""
        own, last = keys.nonce(), first + most - 1
        request = asked(name, first, last)
        for _ in range(2):
            headers = {"Range": f"bytes={first}-{last}"}
            if self._key is not None and challenge:
                shown = keys.proof(self._key, keys.CALLER, "", request, challenge, own)
                headers["Authorization"] = f"{SCHEME} {own.hex()} {shown.hex()}"
            wire.request("GET", f"/{name}", headers=headers)
            response = wire.getresponse()
            body = response.read(places.MOST + 1)
            challenge = _octets(response.headers.get(CHALLENGE, ""), keys.NONCE)
            if response.status != 401 or not challenge or "Authorization" in headers:
                break
            if self._key is None:
                cure = "set COMMPRESS_RUN_KEY, or pass key="
                raise InvalidArgument(f"{self} asks for the key of the run: {cure}")
        if response.status == 401:
            cure = "both sides need the same COMMPRESS_RUN_KEY"
            raise InvalidArgument(f"{self} has another key of the run: {cure}")
        end = response.headers.get("Content-Range", "").rpartition("/")[2]
        total = int(end) if end.isascii() and end.isdigit() and len(end) < 20 else 0
        if self._key is not None:
            answer = answered(response.status, total, body)
            shown = _octets(response.headers.get(PROOF_HEADER, ""), keys.PROOF)
            if not keys.proves(shown, keys.proof(self._key, keys.DOOR, "", request, own, answer)):
                what = "does not prove that it has the key of the run: nothing it sent is used"
                raise Corrupted(f"{self} {what}")
        if response.status in (404, 416):
            return b"" if response.status == 416 else None, total, challenge
        if response.status != 206 or len(body) > most:
            what = f"{response.status} with {len(body):,} bytes of {name}, expected 206"
            raise CommunicationError(f"{self} answered {what}")
        return body, total, challenge


class RelayPlace(HttpPlace):
    """Versions of another server as a relay has them: each part of a file is fetched once, however
    many ask for it, also while it is still on its way, and kept in memory."""

    def __init__(self, url: str, key: bytes | None) -> None:
        super().__init__(url, key)
        self._parts = dict[tuple[str, str, int], Future[Part]]()  # the last one asked for is last
        self._asking, self._run = threading.Lock(), ""

    def look(self, after: int, seconds: float) -> bytes:
        head = super().look(after, seconds)
        found = records.unpack(records.HeadRecord, head)  # files of others have the same names
        self._run = f"{found.run}/{found.epoch}"
        return head

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        key, fetch = (self._run, name, first), partial(super().range, name, first, places.CHUNK)
        with self._asking:
            self._parts[key] = part = self._parts.pop(key, None) or self._readers.submit(fetch)
            if len(self._parts) > KEPT:
                del self._parts[next(iter(self._parts))]
        try:
            body, total = part.result()
        except BaseException:
            self._parts.pop(key, None)  # whoever comes next asks again
            raise
        return body[:most], total


def reading_place(
    source: places.StrPath, key: bytes | None, kind: type[HttpPlace] = HttpPlace
) -> places.ReadablePlace:
    """A source of versions by its folder or URL; ``kind``: of place for a server."""
    if (text := places.url_of(source)).startswith(places.HTTP):
        return kind(text, checked_key(key))
    return places.stored_place(source)


def _octets(text: str, count: int) -> bytes:
    """The bytes of a hexadecimal number of so many, or none."""
    whole = len(text) == 2 * count and set(text) <= set("0123456789abcdef")
    return bytes.fromhex(text) if whole else b""
