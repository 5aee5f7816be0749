"""TCP connections of this process, as the kernel sees them: the bytes that they sent, and the rate
that they are held to."""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator

HEADERS = 52  # IP and TCP with time stamps, per segment
# offsets of tcpi_total_retrans, _segs_out, _bytes_sent in struct tcp_info
_REPEATED, _SEGMENTS, _BYTES = 100, 136, 200
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE, of Linux


def sent_bytes() -> int | None:
    """Bytes this process has sent on sockets that are open now, headers and acknowledgements
    included.

    Segments sent again count once: a busy machine repeats some that were only acknowledged late.
    None where the system does not tell (anything but Linux from 4.19 on). Unlike an interface's
    counters these hold nothing of other processes. Over loopback segments are longer than on a
    network: there headers weigh more.
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _BYTES + 16:
            return None
        sent, sent_again = struct.unpack_from("=QQ", info, _BYTES)
        (segments,), (again,) = (
            struct.unpack_from("=I", info, offset) for offset in (_SEGMENTS, _REPEATED)
        )
        total += sent - sent_again + HEADERS * (segments - again)
    return total


def pace(rate: float) -> int:
    """Let each connection that is open now send ``rate`` bits per second at most; how many there
    are. Linux only.

    The kernel lets the first ten segments of a connection pass as they come.
    """
    count = 0
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("=Q", int(rate / 8)))
        count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Each open TCP socket of this process, for as long as the caller looks at it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        with contextlib.closing(socket.socket(fileno=duplicate)) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                yield connection
