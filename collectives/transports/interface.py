"""Network interface by which peers find this rank: the named one, else the one that reaches
``MASTER_ADDR``.

Debian and Ubuntu give a host's own name the address 127.0.1.1. torch's Gloo tells peers that
address, which only the host itself can reach.
"""

import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from commpress.errors import CommunicationError

log = logging.getLogger("commpress")

VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_TABLE = Path("/proc/net/if_inet6")  # Linux: address, index, prefix, scope, flags, interface
_LINK = 0x20  # the scope of an address that holds on one link only; the others are smaller
OUTSIDE = "192.0.2.1"  # an address of the internet that nobody has

Address = tuple[str, socket.AddressFamily]
_addresses: dict[str, Address] = {}  # by host name


def named() -> str:
    """The interface that the user named, or ""."""
    return os.environ.get(VARIABLE, "").split(",")[0]


def own_address() -> Address:
    """The address by which peers find this rank.

    That of the named interface; else the one from which ``MASTER_ADDR`` is reached; else what the
    host's name resolves to, as Gloo does, unless that is loopback and ranks are on several
    machines.
    """
    if name := named():
        return address_of_interface(name)
    return _reaching_peers() or _of_name() or ("127.0.0.1", socket.AF_INET)


def name_interface() -> str:
    """Name the interface that reaches ``MASTER_ADDR`` to Gloo, if ranks are on several machines and
    nobody has named one.

    Sets ``GLOO_SOCKET_IFNAME`` for this process; returns the name, or "" where nothing is to be
    named.
    """
    if named() or (found := _reaching_peers()) is None:
        return named()
    name = next((each for each, address in _interfaces() if address == found), "")
    if name:
        os.environ[VARIABLE] = name
        said = _of_name()
        if said is None or is_loopback(said[0]):
            log.warning(
                "this host's name resolves to %s, which other hosts cannot reach: using the "
                "interface %s (%s). Set %s to choose another one",
                said[0] if said else "no address",
                name,
                found[0],
                VARIABLE,
            )
    return name


def route_to(host: str = OUTSIDE) -> Address | None:
    """The address from which this machine sends to ``host``, or out; None if that is itself by
    loopback, or there is no way."""
    with contextlib.suppress(OSError, UnicodeError):  # a name that nobody knows
        for family, *_, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            # sends nothing
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
                if not is_loopback(address):
                    return address, family
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def address_of_interface(interface: str) -> Address:
    """Its IPv4 address, else the IPv6 address that reaches furthest."""
    try:
        return _ipv4_of(interface), socket.AF_INET
    except OSError as error:
        found = sorted((scope, address) for scope, address, name in _ipv6() if name == interface)
        if not found:
            raise CommunicationError(
                f"{VARIABLE} is {interface!r}, but that network interface has no address ({error})"
            ) from error
    scope, text = found[0]
    return text + (f"%{interface}" if scope == _LINK else ""), socket.AF_INET6


def for_connect(host: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """An address for ``connect``. One that holds on one link only is reached over our own
    interface, whatever the peer says."""
    address, on_link, theirs = host.partition("%")
    return (
        (address, port, 0, socket.if_nametoindex(named() or theirs)) if on_link else (address, port)
    )


def several_machines(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher says that some ranks are elsewhere."""
    size, here = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
    return size.isdigit() and here.isdigit() and int(size) > int(here)


def _reaching_peers() -> Address | None:
    """None where ranks are on one machine, or no other address than the name's is known.

    Note: the first machine may know itself by a name for loopback. Then its way out counts, or its
    only interface.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if master and (found := route_to(master)):
        return found
    said = _of_name()
    if not several_machines() or (said is not None and not is_loopback(said[0])):
        return None
    if found := route_to():
        return found
    others = [address for _, address in _interfaces() if not is_loopback(address[0])]
    return others[0] if len(others) == 1 else None


def _of_name() -> Address | None:
    """The address to which the host's name resolves, if this host has it: name servers may take
    seconds, and are asked once."""
    name = socket.gethostname()
    known = _addresses.get(name)
    if known is not None and _is_ours(*known):
        return known
    with contextlib.suppress(OSError):
        for family, *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            if _is_ours(str(where[0]), family):
                _addresses[name] = str(where[0]), family
                return _addresses[name]
    return None


def _is_ours(address: str, family: socket.AddressFamily) -> bool:
    """True if this machine has that address."""
    with contextlib.suppress(OSError), socket.create_server((address, 0), family=family):
        return True
    return False


def _interfaces() -> Iterator[tuple[str, Address]]:
    """Every interface with each of its addresses that holds on more than one link."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no IPv4 address
            yield name, (_ipv4_of(name), socket.AF_INET)
    for scope, address, name in _ipv6():
        if scope != _LINK:
            yield name, (address, socket.AF_INET6)


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(
            probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15])
        )
        return socket.inet_ntoa(answer[20:24])


def _ipv6() -> Iterator[tuple[int, str, str]]:
    """Scope, address and interface."""
    for line in (_TABLE.read_text() if _TABLE.exists() else "").splitlines():
        address, _, _, scope, _, name = line.split()
        yield int(scope, 16), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)), name
