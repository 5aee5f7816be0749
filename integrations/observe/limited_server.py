"""HTTP servers that strangers cannot exhaust: a thread for each connection, a limit on their number
and on their time."""

import ipaddress
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
LOOKS, LOOK = 400, 0.005  # attempts to find room, and seconds between two
LIMITS = 0.1  # seconds between two looks for connections whose time is over


class LimitedServer(ThreadingMixIn, TCPServer):
    """Server with at most ``at_once`` connections: a new one closes the oldest stranger's.

    A connection is a stranger's until ``heard`` is called for it with ``proven``. ``clients`` maps
    each to the time at which it is closed, and to True if it is a stranger's.
    """

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
        """Give a connection that has proven itself another ``idle_seconds``."""
        with self.changing:
            if request in self.clients and (proven or not self.clients[request][1]):
                self.clients[request] = monotonic() + self.idle_seconds, False

    def service_actions(self) -> None:
        """Close connections whose time is over; ``serve_forever`` calls this every ``LIMITS``."""
        now = monotonic()
        self.cut(lambda ends, stranger: ends < now)

    def cut(self, late: Callable[[float, bool], bool], most: int | None = None) -> None:
        """Close up to ``most`` connections for which ``late`` is true: wake their threads."""
        with self.changing:  # a socket closed meanwhile could have given its number to another
            for request in [each for each, state in self.clients.items() if late(*state)][:most]:
                with suppress(OSError):  # already closed
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self.changing:
            self.clients.pop(request, None)
            super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self.cut(lambda ends, stranger: True)

    def start(self, name: str, host: str) -> str:
        """Serve in a background thread; return the server's URL."""
        threading.Thread(target=self.serve_forever, args=(LIMITS,), name=name, daemon=True).start()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log instead of printing."""
        log.debug("%s disconnected", client_address, exc_info=True)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def listening(host: str, port: int, make: Callable[[socket.AddressFamily, str], T]) -> T:
    """Return ``make(family, address)`` for the address of ``host``.

    Raises ``InvalidArgument`` if the system refuses to listen there.
    """
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
