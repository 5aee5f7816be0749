"""Number of connections between two ranks and the kernel's congestion control on them: all ranks
agree.

A TCP flow that loses a share p of its packets carries about 1.22 · segment / (round trip · √p)
under cubic or reno, and never more than a window a round trip. Several flows carry as many times
that. So two ranks far apart keep one connection for headers and short rows (as near ones do), one
for receipts, and several among which long payloads are divided.
"""

import contextlib
import json
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from commpress.errors import InvalidArgument, Mismatch

CONNECTIONS, CONGESTION = "COMMPRESS_CONNECTIONS", "COMMPRESS_CONGESTION"
SAID = 1024  # bytes in which a rank says what it wishes, at most
MOST, MOST_UNASKED = 16, 8
# seconds of round trip for each connection: one carries 240 Mbit/s with this one and a loss of 1e-4
ROUND_TRIP = 0.006
UNSENT = 128 << 10  # bytes that wait in the kernel for their turn; more are another connection's
_KERNEL_HAS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_MIN_RTT, _NONE = 148, 2**32 - 1  # its place in struct tcp_info, in microseconds


def agreed(connections: Mapping[int, socket.socket], share: Callable[[bytes], list[bytes]]) -> int:
    """Connections for long payloads between any two ranks; 1: no others than these.

    ``share`` gives every rank what all say. All raise the same error where the environment of one
    asks for what cannot be.
    """
    wish, control = (os.environ.get(name, "")[:20] for name in (CONNECTIONS, CONGESTION))
    refused = congest(connections.values())
    far = max(map(round_trip, connections.values()), default=0.0)
    # half of what this process may open, for two more than those that divide payloads
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 // max(len(connections), 1) - 2
    words = json.dumps([wish, control, refused, far, room]).encode()
    said = [json.loads(each) for each in share(words.ljust(SAID))]
    for r, (_, control, refused, _, _) in enumerate(said):
        if refused:
            raise InvalidArgument(f"{CONGESTION} is {control!r} on rank {r}, where {refused}")
    wishes = [each[0] for each in said]
    if len(set(wishes)) > 1:
        usual = max(wishes, key=wishes.count)
        raise Mismatch(
            f"{CONNECTIONS} differs: by rank it is {', '.join(each or 'unset' for each in wishes)}."
            " Set it alike on every rank, or nowhere",
            ranks=tuple(r for r, each in enumerate(wishes) if each != usual),
        )
    if wish:
        if not (wish.isdecimal() and 1 <= int(wish) <= MOST):
            raise InvalidArgument(
                f"{CONNECTIONS} is {wish!r}, expected a number from 1 to {MOST}, the same on every "
                "rank; unset, the round trip decides"
            )
        return int(wish)
    far, room = max(each[3] for each in said), min(each[4] for each in said)
    return max(1, min(-int(-far // ROUND_TRIP), MOST_UNASKED, room))


def congest(connections: Iterable[socket.socket]) -> str:
    """Set the congestion control that the user has named; why the kernel refuses it, or ""."""
    if not (name := os.environ.get(CONGESTION, "")):
        return ""
    try:
        for each in connections:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        has = _KERNEL_HAS.read_text().split() if _KERNEL_HAS.exists() else []
        return (
            f"the kernel refuses it ({error.strerror}); it has: {', '.join(has)[:300]}. Name one, "
            f"load its module (modprobe tcp_{name[:20]}), or allow it to processes without rights "
            "(net.ipv4.tcp_allowed_congestion_control)"
        )
    return ""


def round_trip(connection: socket.socket) -> float:
    """Seconds of the shortest that the kernel has seen, which the other process has no part in; 0.0
    where it says none."""
    with contextlib.suppress(OSError):  # no TCP
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
        if len(info) == _MIN_RTT + 4:
            (least,) = struct.unpack_from("=I", info, _MIN_RTT)
            return 0.0 if least == _NONE else least / 1e6
    return 0.0


def for_pieces(connection: socket.socket, seconds: float) -> None:
    """Have a connection take a piece only when it can send it soon, so that those that lose packets
    get fewer; and give up what nobody acknowledges for so long.

    Note: buffers. The kernel makes them as large as a flow can use; setting one would fix it.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
    congest([connection])
