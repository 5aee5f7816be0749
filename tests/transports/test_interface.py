"""The interface by which peers find a rank, with none named: hosts that know themselves as
127.0.1.1, several networks."""

import logging
import os
import socket
import subprocess
import sys

import pytest

from commpress.cli.hosts import Hosts
from commpress.collectives.transports import interface
from commpress.errors import CommpressError, InvalidArgument
from commpress.integrations.trainers.launch import own_address
from variants import first

DEBIAN = ("127.0.1.1", socket.AF_INET)
WIRE, LAN = ("10.0.0.7", socket.AF_INET), ("192.168.1.7", socket.AF_INET)
SCRIPT = """
import sys, torch, torch.distributed as dist, commpress
from torch.nn.parallel import DistributedDataParallel
if sys.argv[1] == "commpress":
    import commpress.backend
    dist.init_process_group("commpress")
else:
    commpress.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
state = commpress.compress(ddp)
ddp(torch.ones(2, 8)).sum().backward()
print("sent", state.counters.wire_bytes > 0)
dist.destroy_process_group()
"""


@pytest.fixture
def machine(monkeypatch):
    """A machine on two networks: ``routes`` says by which addresses it reaches what, ``name`` to
    what its name resolves."""

    def made(*, routes=(), name=DEBIAN, master="10.0.0.1", local="1", size="2"):
        for variable, value in (
            ("MASTER_ADDR", master),
            ("LOCAL_WORLD_SIZE", local),
            ("WORLD_SIZE", size),
        ):
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        ways = dict(routes)
        monkeypatch.setattr(interface, "route_to", lambda host=interface.OUTSIDE: ways.get(host))
        monkeypatch.setattr(interface, "_of_name", lambda: name)
        there = [("lo", ("127.0.0.1", socket.AF_INET)), ("eth0", LAN), ("eth1", WIRE)]
        monkeypatch.setattr(interface, "_interfaces", lambda: iter(there))
        return there

    return made


def test_the_interface_that_reaches_the_master_is_named_and_the_host_told_of_its_name(
    machine, caplog
):
    machine(routes={"10.0.0.1": WIRE})
    assert interface.own_address() == WIRE
    with caplog.at_level(logging.WARNING, "commpress"):
        assert interface.name_interface() == os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "resolves to 127.0.1.1" in caplog.text
    assert "eth1 (10.0.0.7)" in caplog.text


def test_a_name_that_others_can_reach_is_no_reason_to_speak(machine, caplog):
    machine(routes={"10.0.0.1": WIRE}, name=LAN)
    with caplog.at_level(logging.WARNING, "commpress"):
        assert interface.name_interface() == "eth1"
    assert not caplog.records


def test_the_first_machine_knows_itself_by_loopback_and_takes_its_way_out(machine):
    machine(routes={interface.OUTSIDE: LAN}, master="first")
    assert interface.own_address() == LAN
    assert interface.name_interface() == "eth0"


def test_without_a_way_out_its_only_interface_counts_and_of_two_none(machine):
    there = machine(master="first")
    assert interface.own_address() == DEBIAN
    assert interface.name_interface() == "" == os.environ["GLOO_SOCKET_IFNAME"]
    del there[1]
    assert interface.own_address() == WIRE


def test_on_one_machine_nothing_is_named(machine):
    machine(routes={interface.OUTSIDE: LAN}, master="127.0.0.1", local="2")
    assert interface.name_interface() == ""
    assert interface.own_address() == DEBIAN


def test_what_the_user_named_stays(machine, monkeypatch):
    machine(routes={"10.0.0.1": WIRE})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface.name_interface() == "lo"
    assert interface.own_address()[0] == "127.0.0.1"


def test_a_master_needs_an_address_that_others_reach(machine):
    machine(routes={interface.OUTSIDE: LAN}, master="", size="")
    assert own_address() == LAN[0]
    machine(master="", size="")
    with pytest.raises(InvalidArgument, match="set MASTER_ADDR"):
        own_address()


@pytest.mark.parametrize("backend", first(1, ["commpress", "gloo"]))
def test_hosts_whose_names_are_loopback_meet(backend, tmp_path):
    """The master is named by the first host's own name, which is 127.0.1.1 there; nobody names an
    interface."""
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        lab = Hosts(2)
    except CommpressError as error:
        pytest.skip(f"no hosts: {error}")
    with lab:
        processes = []
        for rank, name in enumerate(lab.names):
            known = tmp_path / f"hosts{rank}"
            others = [
                f"{a} {n}" for a, n in zip(lab.addresses, lab.names, strict=True) if n != name
            ]
            known.write_text(
                "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others]) + "\n"
            )
            subprocess.run(
                lab.command(rank, ["mount", "--bind", str(known), "/etc/hosts"]), check=True
            )
            told = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": lab.names[0],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "",
            }
            command = lab.command(rank, [sys.executable, str(tmp_path / "train.py"), backend])
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env={**os.environ, **told}, **streams))
        said = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in said] == ["sent True"] * 2, said
    assert all("resolves to 127.0.1.1" in err and "eth0" in err for _, err in said)
