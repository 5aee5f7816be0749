"""The commands on published weights, at toy size."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import weight_bytes
import weight_speed
from commpress.cli import main, weight_copies
from commpress.integrations.weights import http_place, mirror
from commpress.weights import Publisher, Receiver, WeightServer, verify


@pytest.fixture
def folder(tmp_path):
    weights = {"w": torch.arange(5000, dtype=torch.int32), "v": torch.zeros(3).bfloat16()}
    with Publisher(weights, tmp_path / "run") as publisher:
        for _ in range(3):
            publisher.publish()
            weights["w"][::50] += 1
    return tmp_path / "run"


def test_a_folder_is_described_verified_and_copied(folder, tmp_path, capsys):
    server, copy = WeightServer(folder), str(tmp_path / "copy")
    assert main(["weights", "stat", server.url, "--json", str(tmp_path / "stat.json")]) == 0
    assert [each["version"] for each in json.loads((tmp_path / "stat.json").read_text())] == [
        1,
        2,
        3,
    ]
    assert "2.00 %" in capsys.readouterr().out
    assert main(["weights", "verify", str(folder)]) == 0
    assert "3 versions, all of them whole" in capsys.readouterr().out
    assert (
        main(
            [
                "weights",
                "pull",
                server.url,
                copy,
                "--safetensors",
                str(tmp_path / "all.safetensors"),
            ]
        )
        == 0
    )
    server.close()
    reader = Receiver(copy)
    reader.prepare()
    reader.install()
    saved = load_file(tmp_path / "all.safetensors")
    assert saved.keys() == reader.weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in reader.weights.items())
    next((tmp_path / "copy").glob("*.anchor")).write_bytes(b"rubbish")
    assert main(["weights", "verify", copy]) == 2
    assert "anchor ends before byte" in capsys.readouterr().err


def test_nothing_published_is_said(tmp_path, capsys):
    assert main(["weights", "verify", str(tmp_path)]) == 1
    assert main(["weights", "pull", str(tmp_path), str(tmp_path / "copy")]) == 1
    assert main(["weights", "stat", str(tmp_path)]) == 2
    assert main(["weights", "serve", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_a_copy_is_followed_and_a_relay_of_its_server_read(folder, tmp_path, capfd):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    command = [sys.executable, "-m", "commpress", "weights", "pull", str(folder), one, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as copying:
        try:
            assert "version 3" in [copying.stdout.readline() for _ in range(3)][-1]
            weights = {"w": torch.zeros(5000, dtype=torch.int32), "v": torch.ones(3).bfloat16()}
            with Publisher(weights, folder) as publisher:
                publisher.publish()
            assert "version 4" in copying.stdout.readline()
        finally:
            copying.terminate()
    server = WeightServer(one)
    command = [*command[:4], "serve", server.url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relaying:
        try:
            url = relaying.stdout.readline().split()[-1]
            assert main(["weights", "pull", url, two]) == 0
        finally:
            relaying.terminate()
    server.close()
    assert "has version 4" in capfd.readouterr().out


def test_a_copy_goes_on_when_its_server_is_back(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(http_place, "PAUSE", 0.001)
    server = WeightServer(folder)
    url, place = server.url, str(tmp_path / "copy")
    server.close()
    assert main(["weights", "pull", url, place]) == 2
    assert "gave no head in 4 tries" in capsys.readouterr().err

    def back(seconds):
        nonlocal server
        assert "asking again" in capsys.readouterr().out
        server = WeightServer(folder, int(url.rpartition(":")[2]))
        monkeypatch.setattr(mirror, "pull", stopped)

    def stopped(*given, real=mirror.pull, **options):
        assert real(*given, **options) == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(weight_copies, "sleep", back)
    assert main(["weights", "pull", url, place, "--follow"]) == 130
    server.close()
    assert len(verify(place)) > 0


def test_serving_says_who_reads(folder, capsys, monkeypatch):
    looks, urls = iter(range(100)), []

    def look(seconds):
        turn = next(looks)
        if turn == 0:
            urls.append(capsys.readouterr().out.split()[-1])
            reading = threading.Thread(target=lambda: Receiver(urls[0]).prepare())
            reading.start()
            reading.join()
        elif turn == 40:
            raise KeyboardInterrupt
        time.sleep(0.05)  # the server may note a reader after its answer

    monkeypatch.setattr(weight_copies, "sleep", look)
    assert main(["weights", "serve", str(folder), "--port", "0"]) == 130
    assert "127.0.0.1 reads version 3" in capsys.readouterr().out


def test_the_benchmark_counts_what_codes_take():
    lines = weight_bytes.measure(5, {"width": 32, "layers": 1, "length": 16})
    assert len(lines) == 12
    for line in lines:
        assert 0.7 * line.bound < line.difference  # places next to each other may cluster
        assert line.index_value == pytest.approx(48 * line.changed)
    assert weight_bytes.markdown(lines).count("\n") == 13
    assert len(weight_bytes.judge(lines)) == 18


def test_the_benchmark_of_speed_measures_each_call():
    lines = weight_speed.measure(1)
    shares = [line.changed for line in lines[:-1]]
    assert shares == sorted(shares)
    assert 0.002 < shares[0] < 0.005
    assert shares[2] < weight_speed.BELOW < shares[3]
    assert lines[-1].changed is None
    assert lines[0].bits < lines[1].bits < lines[2].bits < lines[-1].bits < 12
    assert all(line.encode > 0 and line.decode > 0 for line in lines)
    assert len(weight_speed.judge(lines)) == 6
