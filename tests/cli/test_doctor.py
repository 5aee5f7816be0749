"""The doctor: what it finds here, and what it says on machines that are not at hand."""

import re
import socket

import pytest

from commpress.cli import doctor, main
from commpress.cli.doctor import Finding, looked_at


def commpress(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_one_screen(compiled, tmp_path, capsys):
    """Everything but MPI, which starts another process."""
    sections = [name for name in doctor.SECTIONS if name != "MPI"]
    status = commpress("doctor", "--directory", tmp_path, "--only", ",".join(sections))
    said = capsys.readouterr().out
    assert re.findall(r"^\w+$", said, re.M) == sections
    assert status == 0, said
    assert said.endswith(" 0 bad\n")
    for phrase in (
        "ok    Gloo connects and sums",
        "bytes equal the reference",
        '"commpress" is registered',
        "engine threads",
        "free of",
        "lo: MTU",
    ):
        assert phrase in said
    assert [*tmp_path.iterdir()] == []


def test_what_is_bad_is_exit_status_1(tmp_path, capsys):
    assert commpress("doctor", "--only", "disks", "--directory", tmp_path / "missing") == 1
    assert "cannot be used" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        commpress("doctor", "--only", "disk")
    assert "got 'disk', expected some of torch, backends" in capsys.readouterr().err


def test_a_section_that_cannot_look_says_so():
    def blind():
        raise PermissionError("hidden")

    (finding,) = looked_at(blind)
    assert (finding.state, finding.what) == ("note", "could not look: PermissionError: hidden")


def test_mpi_missing_or_dumb(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    assert [f.state for f in doctor.mpi()] == ["note"]
    monkeypatch.setattr(doctor, "installed", lambda package: "4.1")
    monkeypatch.setattr(doctor, "answer", lambda command: None)
    (finding,) = doctor.mpi()
    assert "does not start an MPI" in finding.what
    monkeypatch.setattr(doctor, "answer", lambda command: "Some MPI v1")
    assert next(doctor.mpi()) == Finding("ok", "mpi4py 4.1 on Some MPI v1")


def test_gloo_gets_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,none7")
    finding = doctor.own_name()
    assert finding.state == "bad"
    assert "names none7" in finding.what
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "GLOO_SOCKET_IFNAME=eth0" in doctor.own_name().cure


# ---------------------------------------------------------------- other machines, as files


def files(root, **content):
    for name, text in content.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("speed", "mtu", "carrier", "state", "says"),
    [
        ("25000", "1500", "1", "note", "eth9: MTU 1500, 25 Gbit/s"),
        ("25000", "9000", "1", "ok", "25 Gbit/s"),
        ("1000", "1500", "1", "ok", "1 Gbit/s"),
        ("-1", "1400", "1", "ok", "speed not told"),
        ("1000", "1500", "0", "note", "no carrier"),
    ],
)
def test_interfaces(tmp_path, speed, mtu, carrier, state, says):
    net = "class__net__eth9__"
    root = files(
        tmp_path,
        **{
            net + "flags": "0x1003",
            net + "speed": speed,
            net + "mtu": mtu,
            net + "carrier": carrier,
        },
    )
    (finding,) = doctor.network(root)
    assert finding.state == state
    assert says in finding.what
    files(tmp_path, **{net + "flags": "0x1002"})
    assert [f.state for f in doctor.network(root)] == ["bad"], "nothing is up"


def test_two_numa_nodes(tmp_path):
    node = "devices__system__node__node"
    root = files(tmp_path, **{node + "0__cpulist": "0-7", node + "1__cpulist": "8-15"})
    *_, finding = doctor.numa(root)
    assert finding.state == "note"
    assert "node0: processors 0-7, node1: processors 8-15" in finding.what


def test_memory_with_a_limit_and_without_huge_pages(tmp_path):
    root = files(
        tmp_path,
        meminfo="MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n",
        fs__cgroup__memory__max="",
    )
    (tmp_path / "fs/cgroup/memory.max").write_text(str(1 << 29))
    files(tmp_path, kernel__mm__transparent_hugepage__enabled="always madvise [never]")
    said = [f.what for f in doctor.memory(root, root)]
    assert said[:3] == [
        "512 MiB of 1 GiB available",
        "a control group ends this process beyond 512 MiB",
        "transparent huge pages are off",
    ]


def test_a_report_tells_no_secret_of_a_run(monkeypatch):
    """People paste it into issues: whoever has the key or the token of a run can join it."""
    monkeypatch.setenv("COMMPRESS_RUN_KEY", "a secret of this run, longer than 32 bytes")
    monkeypatch.setenv("COMMPRESS_JOIN", "10.0.0.1:4711#" + "0123456789abcdef" * 2)
    text = doctor.report({})
    assert "set: COMMPRESS_RUN_KEY=<key>" in text
    assert "#<token>" in text
    assert "secret" not in text
    assert "0123456789abcdef" not in text
