"""Serve published versions over HTTP, to readers that have the run's key."""

import logging
import re
import socket
from http.server import BaseHTTPRequestHandler
from time import monotonic
from typing import Any

from commpress.collectives.transports.run_key import CALLER, DOOR, nonce, proof, proves
from commpress.errors import CommpressError, InvalidArgument
from commpress.integrations.observe.limited_server import LimitedServer, is_loopback, listening
from commpress.integrations.weights import http_place, places
from commpress.integrations.weights.weight_records import HEAD_NAME, is_plain, version_of

log = logging.getLogger("commpress")
AT_ONCE = 256  # connections, a thread each; strangers make room first
STRANGER_SECONDS = 5.0  # until a connection must have shown the key
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")
_AUTHORIZATION = re.compile(rf"{http_place.SCHEME} ([0-9a-f]{{32}}) ([0-9a-f]{{64}})")
_HEAD = re.compile(HEAD_NAME + r"(?:\?after=(\d{1,15})&seconds=(\d{1,3}\.\d{3}))?")


class WeightServer(LimitedServer):
    """``server = WeightServer("/shared/run1", port=9500)``; readers take
    ``Receiver("http://this-machine:9500")``.

    ``source``: a folder of published versions, or the ``http://`` of another server, of which this
    one is then a relay. ``host``: an address of this machine; without a key (``key`` or
    ``COMMPRESS_RUN_KEY``) one that others cannot reach. ``port``: 0 takes a free one. ``readers``:
    by address, the version that each asked for last, and seconds since.
    """

    at_once, stranger_seconds = AT_ONCE, STRANGER_SECONDS

    def __init__(
        self,
        source: places.StrPath,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        key: bytes | None = None,
    ) -> None:
        self.key = key = http_place.checked_key(key)
        self.sent_bytes, self.heard_from = 0, dict[str, tuple[int, float]]()
        self.place = http_place.reading_place(source, key, http_place.RelayPlace)
        if isinstance(self.place, places.ObjectPlace):
            raise InvalidArgument(f"source is {source!r}, which readers can read without a server")

        def listen(family: socket.AddressFamily, address: str) -> None:
            if key is None and not is_loopback(address):
                raise InvalidArgument(
                    f"host is {host!r}, which others can reach, and there is no key: set "
                    "COMMPRESS_RUN_KEY to the same secret here and at the readers, or serve on "
                    "127.0.0.1"
                )
            self.address_family = family
            super(WeightServer, self).__init__((address, port), _Handler)

        listening(host, port, listen)
        self.host, self.port = host, self.server_address[1]
        self.url = self.start("commpress-weights", host)

    @property
    def readers(self) -> dict[str, tuple[int, float]]:
        now, found = monotonic(), dict(self.heard_from)
        return {address: (version, now - when) for address, (version, when) in found.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body follows its headers at once
    server: WeightServer

    def setup(self) -> None:
        super().setup()
        self._challenge = nonce()

    def log_message(self, *_: Any) -> None:
        """Nothing: a library does not print."""

    def do_GET(self) -> None:
        name, found = self.path.removeprefix("/"), _RANGE.fullmatch(self.headers.get("Range", ""))
        head = _HEAD.fullmatch(name)
        if not (head or is_plain(name)) or name.endswith(places.PART) or found is None:
            return self._answer(400, b"", {})
        first, last = int(found[1]), int(found[2])
        key, place, own = self.server.key, self.server.place, b""
        request = http_place.asked(name, first, last)
        if key is not None:
            shown = _AUTHORIZATION.fullmatch(self.headers.get("Authorization", ""))
            own, given = map(bytes.fromhex, shown.groups()) if shown else (b"", b"")
            if not proves(given, proof(key, CALLER, "", request, self._challenge, own)):
                return self._answer(401, b"", {})
        self.server.heard(self.request, proven=True)
        most, status, body, total = min(last - first + 1, places.MOST), 206, b"", 0
        try:
            if head:
                wait = min(float(head[2] or 0), http_place.LONGEST_WAIT)
                whole = place.head(int(head[1] or 0), wait)
                body, total = whole[first : first + most], len(whole)
            else:
                body, total = place.range(name, first, most)
            status = 206 if body else 416
        except CommpressError as error:  # of a relay, whose source has gone, or of a head
            log.warning("%s cannot be served: %s", name, error)
            status = 502
        except OSError:  # not there, or no file
            status = 404
        at = f"{first}-{first + len(body) - 1}" if body else "*"
        headers = {"Content-Range": f"bytes {at}/{total}"}
        if key is not None:
            answer = http_place.answered(status, total, body)
            headers[http_place.PROOF_HEADER] = proof(key, DOOR, "", request, own, answer).hex()
        self._answer(status, body, headers)
        self._note(name, len(body))

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.server.key is not None:
            self._challenge = nonce()  # each is good for one request
            headers[http_place.CHALLENGE] = self._challenge.hex()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.server.heard(self.request, proven=False)

    def _note(self, name: str, nbytes: int) -> None:
        with self.server.changing:
            self.server.sent_bytes += nbytes
            if version := version_of(name) if "-" not in name else 0:
                readers, address = self.server.heard_from, str(self.client_address[0])
                if address in readers or len(readers) < 4096:
                    readers[address] = version, monotonic()
