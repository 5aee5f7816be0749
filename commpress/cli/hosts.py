"""Hosts of their own on one Linux machine: network namespaces joined by a switch, with links of a
given rate and delay.

A host has an address, a name that the others resolve, and one interface, ``eth0``. Nothing of it is
visible outside: firewall rules and queues live in the namespaces, and the namespaces live as long
as the processes that hold them, which end when this one does, however it ends. Needs root or
unprivileged user namespaces, and the tools of util-linux and iproute2.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from commpress.errors import CommpressError, InvalidArgument, MissingPackage

SUBNET = "10.93.0."
MOST = 250  # hosts of one subnet
# variables by which torch finds a host's interface
INTERFACE = {
    name: "eth0" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
}
_QUEUE = 0.02  # seconds of a link's traffic that wait at most
_BURST = 250e-6  # seconds of a link's traffic that pass at once
_NO_DELAY = "this kernel cannot delay packets (netem, CONFIG_NET_SCH_NETEM): leave the delay out"
_HOLD = (
    "import socket, sys; socket.sethostname(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
)


class HostsUnavailable(CommpressError, RuntimeError):
    """This machine does not let this user have hosts of his own, or lacks what was asked of their
    links."""


class Hosts:
    """``count`` hosts, numbered from 0; each link carries ``rate`` bits per second each way and
    takes ``delay`` seconds.

    Use it as a context manager: at its end no process of a host, namespace or rule is left.
    """

    def __init__(
        self, count: int, *, rate: float | None = None, delay: float = 0.0, name: str = "host"
    ) -> None:
        if not 1 <= count <= MOST:
            raise InvalidArgument(f"count is {count}, expected 1 to {MOST} hosts")
        need("unshare", "nsenter", "mount", "ip", "tc")
        self.names = [f"{name}{i}" for i in range(count)]
        self.addresses = [f"{SUBNET}{i + 1}" for i in range(count)]
        self.rate, self.delay = rate, delay
        self._root = os.geteuid() == 0
        self._folder = tempfile.TemporaryDirectory(prefix="commpress-hosts-")
        self._holders: list[subprocess.Popen[str]] = []  # the switch's, then one of each host
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.names)

    # ---------------------------------------------------------------- commands

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on ``host``, in this folder; it keeps the process id
        that it is started with."""
        return [*self._enter(self._holders[1 + host]), "env", "-C", os.getcwd(), *command]

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any
    ) -> "subprocess.Popen[Any]":
        """A process on ``host``; ``more`` goes to ``subprocess.Popen``."""
        there = {**(os.environ if env is None else env), **INTERFACE}
        return subprocess.Popen(self.command(host, command), env=there, **more)

    def python(self, host: int) -> str:
        """An executable file that is Python on ``host``."""
        told = [f"{name}={value}" for name, value in INTERFACE.items()]
        words = shlex.join([*self.command(host, ["env", *told]), sys.executable])
        file = Path(self._folder.name, f"python{host}")
        file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        file.chmod(0o700)
        return str(file)

    def sent_bytes(self, host: int) -> int:
        """Bytes that the host's interface has sent, headers included."""
        said = self.on(1 + host, "ip -s -j link show eth0")
        return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

    # ---------------------------------------------------------------- links

    def shape(self, host: int, rate: float | None, delay: float = 0.0) -> None:
        """Give a host's link another rate and delay, each way; a rate of None is as fast as the
        machine."""
        for holder, interface in ((1 + host, "eth0"), (0, f"p{host}")):
            self.on(holder, _shaping(interface, rate, delay))

    # ---------------------------------------------------------------- namespaces

    def close(self) -> None:
        """End every process that is still on a host, and the hosts."""
        inside = {space for holder in self._holders if (space := _network(holder.pid)) is not None}
        inside.discard(_network(os.getpid()) or -1)
        for entry in Path("/proc").iterdir():
            if (
                entry.name.isdigit()
                and int(entry.name) != os.getpid()
                and _network(int(entry.name)) in inside
            ):
                with contextlib.suppress(OSError):
                    os.kill(int(entry.name), 9)
        for holder in self._holders:
            holder.kill()
            holder.wait()
            for stream in (holder.stdin, holder.stdout):
                if stream is not None:
                    stream.close()
        self._holders.clear()
        self._folder.cleanup()

    def _build(self) -> None:
        known = Path(self._folder.name, "hosts")
        here = [
            "127.0.0.1 localhost",
            *(f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True)),
        ]
        known.write_text("\n".join(here) + "\n")
        self._hold("switch")
        self.on(0, "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._hold(name)
            pid = self._holders[-1].pid
            self.on(
                0,
                f"ip link add p{i} type veth peer name eth0 netns {pid}; ip link set p{i} master "
                "br0 up",
            )
            self.on(
                1 + i,
                f"mount --bind {known} /etc/hosts; ip link set lo up; ip addr add {address}/24 dev "
                "eth0; ip link set eth0 up",
            )
            if self.rate is not None or self.delay:
                self.shape(i, self.rate, self.delay)

    def _hold(self, name: str) -> None:
        """Namespaces of a host, which end with a process that waits for the end of this one."""
        spaces = ["unshare", "--net", "--uts", "--mount"]
        if not self._root:
            first = not self._holders
            spaces = (
                [*spaces, "--user", "--map-root-user"]
                if first
                else [*self._enter(self._holders[0], "-U"), *spaces]
            )
        holder = subprocess.Popen(
            [*spaces, "--", sys.executable, "-SE", "-c", _HOLD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline().strip() != "up":
            why = holder.stderr.read().strip().splitlines()
            raise HostsUnavailable(
                f"no namespaces for {name}: {why[-1] if why else 'no answer'}. Run as root, or let "
                "users have namespaces (sysctl user.max_user_namespaces, "
                "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
            )
        holder.stderr.close()

    def _enter(self, holder: "subprocess.Popen[str]", *only: str) -> list[str]:
        """The beginning of a command inside a holder's namespaces."""
        user = [] if self._root else ["-U", "--preserve-credentials"]
        spaces = [] if only else ["-n", "-u", "-m"]
        return ["nsenter", "-t", str(holder.pid), *user, *spaces, "--"]

    def on(self, holder: int, script: str, *, feed: str = "") -> str:
        """Run a script inside the namespaces of a host, numbered from 1, or of the switch, 0, and
        return its output."""
        command = [*self._enter(self._holders[holder]), "sh", "-ec", script]
        done = subprocess.run(command, input=feed, capture_output=True, text=True, cwd="/")
        if done.returncode:
            why = (done.stderr or done.stdout).strip().splitlines()
            raise HostsUnavailable(f"hosts: {why[-1] if why else script}")
        return done.stdout


def _shaping(interface: str, rate: float | None, delay: float) -> str:
    """Commands for one end of a link: a token bucket, and netem's queue where packets shall be
    late."""
    parent, segment, steps = "root", 65536, []
    if rate is not None:
        # the longest packet that the kernel leaves whole
        segment = max(6056, min(segment, int(rate / 8 * _BURST / 2)))
        burst = max(2 * segment + 2000, int(rate / 8 * _BURST))
        queue = max(int(rate / 8 * _QUEUE), 4 * burst, 1 << 18)
        steps.append(
            f"tc qdisc add dev {interface} root handle 1: tbf rate {int(rate)}bit burst {burst} "
            f"limit {queue}"
        )
        parent = "parent 1:1"
    if delay and interface == "eth0":  # the delay of a link is the sender's
        late = (
            f"tc qdisc add dev {interface} {parent} netem delay {round(delay * 1e6)}us limit 100000"
        )
        steps.append(f"{late} 2>/dev/null || {{ echo '{_NO_DELAY}' >&2; exit 1; }}")
    before = [
        f"tc qdisc del dev {interface} root 2>/dev/null || true",
        f"ip link set dev {interface} gso_max_size {segment}",
    ]
    return "; ".join(before + steps)


def need(*tools: str) -> None:
    if not sys.platform.startswith("linux"):
        raise HostsUnavailable(
            f"hosts of one machine are namespaces of Linux, this is {sys.platform}"
        )
    for tool in tools:
        if shutil.which(tool) is None:
            package = {"nft": "nftables", "ip": "iproute2", "tc": "iproute2"}.get(
                tool, "util-linux"
            )
            raise MissingPackage(f"hosts need the command {tool!r}: install {package}")


def _network(pid: int) -> int | None:
    """The network namespace of a process; None if it has gone or is somebody else's."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
