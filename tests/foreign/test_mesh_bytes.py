"""A Llama on 2 × 2 × 2 hosts: what leaves each host for each other, with codecs and without, as the
kernel counts it.

Hosts are network namespaces. On a mesh of two ranks in each dimension a host has one peer in each
of dp, tp and pp, so their traffic is told apart by addresses.
"""

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import sources
from commpress.cli.hosts import Hosts
from commpress.codecs import codec_named
from commpress.errors import CommpressError

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROTOCOL = 0.005  # headers of TCP and IP and acknowledgements, as a share of what is sent
# bytes a step beside that: acknowledgements of what comes, agreement of all ranks, a barrier
SMALL = 4_000
# of the ways of the script
CODECS = {"dp": {"dp": "sign"}, "pp": {"pp": "int4"}, "both": {"dp": "int4", "pp": "int4"}}
DIMS = {"pp": 4, "dp": 2, "tp": 1}  # by how much the peer's rank differs


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By way: of each rank the bytes for each peer, those of the counters and a checksum of the
    weights."""
    if shutil.which("nft") is None:
        pytest.skip("no nft, with which the kernel counts bytes by peer: install nftables")
    try:
        lab = Hosts(8)
    except CommpressError as error:
        pytest.skip(f"no hosts: {error}")
    path = tmp_path_factory.mktemp("bytes") / "found.json"
    with lab:
        processes = []
        for rank in range(8):
            told = {
                "RANK": str(rank),
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": lab.addresses[0],
                "MASTER_PORT": "29500",
                "PYTHONPATH": f"{sources.SUPPORT}:{HERE}",
            }
            command = [sys.executable, str(HERE / "mesh_bytes_script.py"), str(path)]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(lab.start(rank, command, env=os.environ | told, **streams))
        said = [process.communicate(timeout=280)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(
        text[-2000:] for text in said
    )
    every = json.loads(path.read_text())
    return {way: [rank[way] for rank in every] for way in every[0]}


def over(ranks, dim):
    """Bytes that each rank sent over this dimension in a step."""
    return [one["bytes"][rank ^ DIMS[dim]] for rank, one in enumerate(ranks)]


def allowed(counted):
    return PROTOCOL * counted + SMALL


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_the_interface_carries_what_codecs_leave(found, kind):
    """Each rank's bytes for its peer in dp and in pp are those of our counters and protocol; of tp
    they are torch's in all."""
    ways = [way.split()[1] for way in found if way.split()[0] == kind and "torch" not in way]
    assert {"none", "both"} <= set(ways)
    for way, dim in product(ways, ("dp", "pp")):
        ranks = found[f"{kind} {way}"]
        for rank, carried in enumerate(over(ranks, dim)):
            counted = ranks[rank]["counters"][dim]
            assert 0 <= carried - counted < allowed(counted), (way, dim, rank)
    for way in ways:
        for mine, theirs in zip(
            over(found[f"{kind} {way}"], "tp"), over(found[f"{kind} torch"], "tp"), strict=True
        ):
            assert abs(mine - theirs) < allowed(theirs)


def test_bytes_fall_by_the_ratio_of_the_codec(found):
    """Of the codec's own sizes: 31 times with one bit, 7.8 with four; of stages, which send less,
    protocol takes more."""
    for way, dims in CODECS.items():
        for dim, name in dims.items():
            ratio = 4 * 2**16 / codec_named(name).row_bytes(2**16)
            for less, exact in zip(
                over(found[f"plain {way}"], dim), over(found["plain torch"], dim), strict=True
            ):
                assert exact / less == pytest.approx(ratio, rel=0.03, abs=0.3)
        for dim in {"dp", "pp"} - dims.keys():
            for same, exact in zip(
                over(found[f"plain {way}"], dim), over(found["plain torch"], dim), strict=True
            ):
                assert same == pytest.approx(exact, rel=0.01, abs=SMALL)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_without_a_codec_bits_are_torchs_and_bytes_no_more(found, kind):
    torchs, ours = found[f"{kind} torch"], found[f"{kind} none"]
    assert [one["weights"] for one in ours] == [one["weights"] for one in torchs]
    assert found[f"{kind} both"][0]["weights"] != torchs[0]["weights"]
    for dim in ("dp", "pp"):
        for mine, theirs in zip(over(ours, dim), over(torchs, dim), strict=True):
            assert mine < theirs + allowed(theirs)
            assert kind == "fsdp" or mine > theirs - 2 * allowed(theirs)
