"""Serve published versions over HTTP, to readers that have the run's key."""

import ipaddress
import logging
import os
import re
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic
from typing import Any

from commpress.collectives.transports.run_key import CALLER, DOOR, nonce, proof, proves
from commpress.errors import CommpressError, InvalidArgument
from commpress.integrations.weights.http_place import (
    CHALLENGE,
    LONGEST_WAIT,
    MOST,
    PROOF_HEADER,
    SCHEME,
    HttpPlace,
    answered,
    asked,
    checked_key,
    reading_place,
)
from commpress.integrations.weights.places import PART, FolderPlace
from commpress.integrations.weights.relay import RelayPlace
from commpress.integrations.weights.weight_records import HEAD_NAME, is_plain

log = logging.getLogger("commpress")
AT_ONCE = 256  # connections, a thread each; strangers make room first
STRANGER_SECONDS = 5.0  # until a connection must have shown the key
IDLE_SECONDS = 120.0  # between its requests
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")
_AUTHORIZATION = re.compile(rf"{SCHEME} ([0-9a-f]{{32}}) ([0-9a-f]{{64}})")
ServedPlace = FolderPlace | RelayPlace
_VERSION = re.compile(r"v(\d{15})")
_WAIT = re.compile(HEAD_NAME + r"\?after=(\d{1,15})&seconds=(\d{1,3}\.\d{3})")


class WeightServer:
    """``server = WeightServer("/shared/run1", port=9500)``; readers take
    ``Receiver("http://this-machine:9500")``.

    ``source``: a folder of published versions or a copy, or the ``http://`` of another server, of
    which this one is then a relay: each byte crosses the link between them once for all readers.
    ``host``: an address of this machine. Without a key (``key`` or ``COMMPRESS_RUN_KEY``) only one
    that others cannot reach. ``port``: 0 takes a free one. ``readers``: by address, the version
    that each asked for last, and seconds since.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        key: bytes | None = None,
    ) -> None:
        key = checked_key(key)
        place = reading_place(source, key)
        if isinstance(place, HttpPlace):
            place = RelayPlace(place)
        elif not isinstance(place, FolderPlace):
            raise InvalidArgument(f"source is {source!r}, which readers can read without a server")
        if key is None and not _is_loopback(host):
            raise InvalidArgument(
                f"host is {host!r}, which others can reach, and there is no key: set "
                "COMMPRESS_RUN_KEY to the same secret here and at the readers, or serve on "
                "127.0.0.1"
            )
        self._server = _serve(host, port, place, key)
        self.host, self.port = host, self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        serve = partial(self._server.serve_forever, 0.1)
        threading.Thread(target=serve, name="commpress-weights", daemon=True).start()

    @property
    def readers(self) -> dict[str, tuple[int, float]]:
        now, found = monotonic(), dict(self._server.readers)
        return {address: (version, now - when) for address, (version, when) in found.items()}

    @property
    def sent_bytes(self) -> int:
        return self._server.sent_bytes

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(before=float("inf"), strangers=False, most=AT_ONCE)


class _WeightServer(ThreadingMixIn, TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    place: ServedPlace
    key: bytes | None

    def server_bind(self) -> None:
        self.readers: dict[str, tuple[int, float]] = {}
        self.sent_bytes = 0
        self.changing = threading.Lock()
        # When each was heard last, and True while it is a stranger.
        self._clients: dict[socket.socket, tuple[float, bool]] = {}
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= AT_ONCE:
            self.cut(before=float("inf"), strangers=True, most=1)
        if len(self._clients) >= AT_ONCE + 8:  # all of them readers, or not gone yet
            self.shutdown_request(request)
            return
        with self.changing:
            self._clients[request] = monotonic(), True
        super().process_request(request, client_address)

    def heard(self, request: Any, *, proven: bool) -> None:
        with self.changing:
            if request in self._clients and (proven or not self._clients[request][1]):
                self._clients[request] = monotonic(), False

    def service_actions(self) -> None:
        now = monotonic()
        self.cut(before=now - STRANGER_SECONDS, strangers=True, most=AT_ONCE)
        self.cut(before=now - IDLE_SECONDS, strangers=False, most=AT_ONCE)

    def cut(self, *, before: float, strangers: bool, most: int) -> None:
        with self.changing:  # a socket that is closed meanwhile would give its number to another
            late = [
                r
                for r, (heard, stranger) in self._clients.items()
                if heard < before and (stranger or not strangers)
            ]
            for request in late[:most]:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    log.debug("a reader of weights had gone already: %s", error)

    def shutdown_request(self, request: Any) -> None:
        with self.changing:
            self._clients.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A library does not print."""
        log.debug("a reader of weights went away: %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body follows its headers at once
    server: _WeightServer
    timeout = IDLE_SECONDS

    def setup(self) -> None:
        super().setup()
        self._challenge = nonce()

    def log_message(self, *_: Any) -> None:
        """Nothing: a library does not print."""

    def do_GET(self) -> None:
        name, found = self.path.removeprefix("/"), _RANGE.fullmatch(self.headers.get("Range", ""))
        wait = _WAIT.fullmatch(name)
        if not (wait or is_plain(name)) or name.endswith(PART) or found is None:
            self._answer(400, b"", 0, None)
            return
        first, last = int(found[1]), int(found[2])
        key, reader = self.server.key, None
        if key is not None:
            shown = _AUTHORIZATION.fullmatch(self.headers.get("Authorization", ""))
            reader = bytes.fromhex(shown[1]) if shown else b""
            expected = proof(key, CALLER, "", asked(name, first, last), self._challenge, reader)
            if shown is None or not proves(bytes.fromhex(shown[2]), expected):
                self._answer(401, b"", 0, None)
                return
        self.server.heard(self.request, proven=True)
        place, count = self.server.place, min(last - first + 1, MOST)
        try:
            if wait:
                whole = place.head(int(wait[1]), min(float(wait[2]), LONGEST_WAIT))
                body, total = whole[first : first + count], len(whole)
            else:
                body, total = place.range(name, first, first + count - 1)
            status = 206 if body else 416
        except CommpressError as error:  # of a relay, whose source has gone, or of a head
            log.warning("%s cannot be served: %s", name, error)
            status, total, body = 502, 0, b""
        except OSError:  # not there, or no file
            status, total, body = 404, 0, b""
        self._answer(status, body, total, (name, first, last, reader))
        self._note(name, len(body))

    def _answer(
        self, status: int, body: bytes, total: int, to: tuple[str, int, int, bytes | None] | None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status in (206, 416) and to is not None:
            place = f"{to[1]}-{to[1] + len(body) - 1}" if body else "*"
            self.send_header("Content-Range", f"bytes {place}/{total}")
        if (key := self.server.key) is not None:
            self._challenge = nonce()  # each is good for one request
            self.send_header(CHALLENGE, self._challenge.hex())
            if to is not None and to[3] is not None:
                answer = answered(status, total, body)
                shown = proof(key, DOOR, "", asked(*to[:3]), to[3], answer)
                self.send_header(PROOF_HEADER, shown.hex())
        self.end_headers()
        self.wfile.write(body)
        self.server.heard(self.request, proven=False)

    def _note(self, name: str, nbytes: int) -> None:
        with self.server.changing:
            self.server.sent_bytes += nbytes
            if version := _VERSION.fullmatch(name):
                readers, address = self.server.readers, str(self.client_address[0])
                if address in readers or len(readers) < 4096:
                    readers[address] = int(version[1]), monotonic()


def _serve(
    host: str, port: int, place: FolderPlace | RelayPlace, key: bytes | None
) -> _WeightServer:
    try:
        if not host:
            raise OSError("an empty name")
        (family, *_, (address, *_)), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        options = {"address_family": family, "place": place, "key": key}
        server: _WeightServer = type("Server", (_WeightServer,), options)(
            (str(address), port), _Handler
        )
    except (OSError, OverflowError) as error:
        raise InvalidArgument(
            f"host is {host!r} and port {port}, and the system does not let this process listen "
            f"there ({error}): expected an address of this machine such as 127.0.0.1, ::1 or "
            "0.0.0.0, and a free port, or 0 for any"
        ) from error
    return server


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
