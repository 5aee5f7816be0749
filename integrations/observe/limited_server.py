"""Servers of HTTP that strangers cannot fill: a thread for each connection, no more than so many at
once, and none of them for ever."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic, sleep
from typing import Any, TypeVar

from commpress.errors import InvalidArgument

log = logging.getLogger("commpress")
T = TypeVar("T")
LOOKS, LOOK = 400, 0.005  # for a connection that was cut off to be gone; seconds between them


class LimitedServer(ThreadingMixIn, TCPServer):
    """The oldest stranger makes room. A connection is one until it is ``heard`` with a proof of
    whatever kind; ``clients`` has when each is cut off, and True for strangers."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128
    at_once, stranger_seconds, idle_seconds = 8, 10.0, 120.0

    def server_bind(self) -> None:
        self.changing = threading.Lock()
        self.clients: dict[socket.socket, tuple[float, bool]] = {}  # the oldest first
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        for _ in range(LOOKS):
            if len(self.clients) < self.at_once:
                break
            self.cut(lambda ends, stranger: stranger, most=1)
            sleep(LOOK)
        else:  # all of them are in use
            super().shutdown_request(request)
            return
        with self.changing:
            self.clients[request] = monotonic() + self.stranger_seconds, True
        super().process_request(request, client_address)

    def heard(self, request: Any, *, proven: bool) -> None:
        with self.changing:
            if request in self.clients and (proven or not self.clients[request][1]):
                self.clients[request] = monotonic() + self.idle_seconds, False

    def service_actions(self) -> None:
        """Called by ``serve_forever`` again and again, and after every connection."""
        now = monotonic()
        self.cut(lambda ends, stranger: ends < now)

    def cut(self, late: Callable[[float, bool], bool], most: int | None = None) -> None:
        """Wake the threads that read from these or write to them."""
        with self.changing:  # a socket that is closed meanwhile would give its number to another
            for request in [each for each, state in self.clients.items() if late(*state)][:most]:
                with suppress(OSError):  # it had gone already
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self.changing:
            self.clients.pop(request, None)
            super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self.cut(lambda ends, stranger: True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A library does not print."""
        log.debug("%s went away", client_address, exc_info=True)


def listening(host: str, port: int, make: Callable[[socket.AddressFamily, str], T]) -> T:
    """``make(family, address)`` of a host's name; InvalidArgument where the system refuses."""
    try:
        if not host:
            raise OSError("an empty name")
        (family, *_, (address, *_)), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return make(family, str(address))
    except (OSError, OverflowError) as error:
        raise InvalidArgument(
            f"host is {host!r} and port {port}, and the system does not let this process listen "
            f"there ({error}): expected an address of this machine such as 127.0.0.1, ::1 or "
            "0.0.0.0, and a free port, or 0 for any"
        ) from error
