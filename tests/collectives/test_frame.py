"""The header of a message: its bytes, what is agreed and what is not, and the complaint when ranks
differ."""

import zlib

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs.family import NAMES
from commpress.collectives.frame import (
    ALL_GATHER,
    ALL_TO_ALL,
    FLAGS,
    FLAT,
    HEADER,
    Frame,
    pack_rows,
    same,
    stamp,
    stamp_rows,
    unpack,
    verify,
    verify_rows,
)
from commpress.errors import Corrupted, Mismatch

FRAME = Frame(ALL_TO_ALL, 4, "sign/l1/2048", 1000, 7, 0x89ABCDEF, checked=True)
UNCHECKED = FRAME._replace(checked=False)
PAYLOAD = 40

frames = st.builds(
    Frame,
    st.sampled_from([ALL_TO_ALL, ALL_GATHER]),
    st.integers(1, 0xFFFF),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=24),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)


class Me:
    """The receiving transport."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.reason = rank, ""

    def abandon(self, reason: str) -> None:
        self.reason = reason


def arriving(frame: Frame = FRAME, rows: int = 4, *, flag: int = 0) -> torch.Tensor:
    """The rows that arrive when every rank sends ``frame`` before a payload of its own."""
    made = torch.arange(rows * (HEADER + PAYLOAD), dtype=torch.uint8).view(rows, -1)
    stamp(made, frame.pack(), torch.tensor([flag], dtype=torch.uint8))
    return made


def check(arrived: torch.Tensor, frame: Frame = FRAME, rank: int = 0) -> None:
    """``verify``; peers are told of damage, and only of damage."""
    me, expected = Me(rank), ""
    try:
        verify(arrived, frame, frame.pack(), me)
    except Corrupted as error:
        expected = str(error)
        raise
    finally:
        assert me.reason == expected


def test_golden_bytes():
    """A layout change breaks jobs whose ranks run different versions: it must change the version
    number, too."""
    body = bytes.fromhex(
        "6370 02 01 00 01 0400"  # magic, version, operation, flags, with a checksum, world size
        "7369676e2f6c312f32303438 000000000000000000000000"  # sign/l1/2048
        "e803000000000000 07000000 efcdab89"  # elements, sequence number, label
        "0000000000000000"  # bytes that go the other way
    )
    assert len(body) == 56
    packed = FRAME.pack().numpy().tobytes()
    assert packed == body + zlib.crc32(body).to_bytes(4, "little") + bytes(4)
    (row,) = arriving(rows=1, flag=1).numpy()
    assert row[60:64].tobytes() == (
        xxhash.xxh3_64_intdigest(bytes(range(64, 104)), 1) & 0xFFFFFFFF
    ).to_bytes(4, "little")


@given(frames, frames)
def test_headers_are_the_same_exactly_when_frames_are_equal(one, two):
    assert unpack(one.pack().numpy()) == one
    assert same(one.bytes(), two.bytes()) == (one == two)


@pytest.mark.parametrize(
    "change",
    [
        {"operation": ALL_GATHER},
        {"size": 3},
        {"codec": "sign/rms/2048"},
        {"numel": 1001},
        {"sequence": 8},
        {"label": 0x89ABCDEE},
        {"back": 1},
        {"checked": False},
    ],
    ids=str,
)
def test_a_difference_names_rank_operation_expected_and_got(change):
    arrived, other = arriving(), FRAME._replace(**change)
    arrived[2, :HEADER] = other.pack()
    with pytest.raises(Mismatch) as caught:
        check(arrived, rank=1)
    message = str(caught.value)
    assert message.startswith(
        f"rank 1 expected {FRAME.describe()}, but rank 2 sent {other.describe()}"
    )
    assert "same codec, options and model" in message
    assert caught.value.ranks == (2,)


@settings(max_examples=500)
@given(
    at=st.integers(0, HEADER + PAYLOAD - 1),
    bit=st.integers(0, 7),
    rank=st.integers(0, 3),
    flag=st.integers(0, 1),
)
def test_any_flipped_bit_is_detected_and_its_sender_named(at, bit, rank, flag):
    """All senders of damaged payloads, unless there is a damaged header."""
    arrived, other = arriving(flag=flag), (rank + 1) % 4
    check(arrived)
    arrived[rank, at] ^= 1 << bit
    arrived[other, HEADER] ^= 1
    with pytest.raises(Corrupted) as caught:
        check(arrived)
    in_payload = at >= HEADER or at == FLAGS or at >= 60
    assert set(caught.value.ranks) == ({rank, other} if in_payload else {rank})
    told = (
        f"payload of rank {rank} in all_to_all number 7 "
        if in_payload
        else f"rank {rank} sent bytes that are no header"
    )
    assert told in str(caught.value)


@given(
    at=st.integers(0, 59).filter(lambda i: i != FLAGS),
    bit=st.integers(0, 7),
    rank=st.integers(0, 3),
)
def test_without_checksums_headers_are_checked_all_the_same(at, bit, rank):
    arrived = arriving(UNCHECKED)
    arrived[:, HEADER:] = 0
    arrived[:, 60:HEADER] = 7
    check(arrived, UNCHECKED)
    arrived[rank, at] ^= 1 << bit
    with pytest.raises(Corrupted):
        check(arrived, UNCHECKED)


def test_a_header_of_another_version_is_refused_by_its_name():
    """Though it is whole, and the same in everything else."""
    arrived = arriving()
    body = bytearray(FRAME.bytes()[:56])
    body[2] += 1
    other = body + zlib.crc32(body).to_bytes(4, "little") + bytes(4)
    assert unpack(np.frombuffer(other, np.uint8)) is None
    arrived[2, :60] = torch.frombuffer(other, dtype=torch.uint8)[:60]
    with pytest.raises(Mismatch, match="rank 2 sent a header of version 3, which is not 2"):
        check(arrived)


@given(flags=st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_flags_are_not_agreed(flags):
    """Each rank has its own: one that is not finite must not look like one that does something
    else."""
    arrived = torch.cat([arriving(flag=flag)[r : r + 1] for r, flag in enumerate(flags)])
    check(arrived)
    assert arrived[:, FLAGS].tolist() == flags
    assert torch.equal(arrived[:, HEADER:], arriving()[:, HEADER:])
    assert [unpack(row) for row in arrived[:, :HEADER].numpy()] == [FRAME] * 4


# ---------------------------------------------------------------- rows of any length


def exchanged(lengths, **changes):
    """Headers and payloads as they arrive, and the frames that are due."""
    frames = {r: Frame(FLAT, 4, "none", n, 3, back=8, checked=True) for r, n in lengths.items()}
    payloads = {r: torch.arange(n, dtype=torch.uint8) for r, n in lengths.items()}
    said = {r: frame._replace(**changes) if r == 2 else frame for r, frame in frames.items()}
    headers = pack_rows(said, 4)
    stamp_rows(headers, payloads)
    return headers, payloads, frames, pack_rows(frames, 4)


LENGTHS = {0: 5, 2: 0, 3: 70}


@pytest.mark.parametrize(
    "change",
    [{"numel": 1}, {"back": 9}, {"label": 1}, {"codec": "int8"}, {"checked": False}],
    ids=str,
)
def test_such_rows_name_who_does_something_else(change):
    headers, payloads, frames, packed = exchanged(LENGTHS, **change)
    me = Me()
    with pytest.raises(
        Mismatch, match=r"rank 0 expected rank 2 to send flat all_to_all number 3 .*, but it sent "
    ) as caught:
        verify_rows(headers, payloads, frames, packed, me)
    assert caught.value.ranks == (2,)
    assert me.reason == ""


@given(st.binary(min_size=HEADER, max_size=HEADER))
def test_noise_is_no_header(noise):
    assert unpack(np.frombuffer(noise, np.uint8)) is None


@given(st.sampled_from([0, 2, 3]), st.integers(0, HEADER + 69), st.integers(0, 7))
def test_any_flipped_bit_of_rows_of_any_length_is_detected(rank, at, bit):
    headers, payloads, frames, packed = exchanged(LENGTHS)
    verify_rows(headers, payloads, frames, packed, Me())
    at %= HEADER + LENGTHS[rank]
    row, place = (headers[rank], at) if at < HEADER else (payloads[rank], at - HEADER)
    row[place] ^= 1 << bit
    me = Me()
    with pytest.raises(Corrupted) as caught:
        verify_rows(headers, payloads, frames, packed, me)
    assert caught.value.ranks == (rank,)
    assert me.reason == str(caught.value)


def test_every_codec_fits_the_header_and_numbers_wrap():
    for spec in ("x" * 24, *(codec.spec for codec in NAMES.values())):
        packed = Frame(ALL_TO_ALL, 2, spec, 1, 2**32 + 5).pack().numpy()
        assert unpack(packed) == Frame(ALL_TO_ALL, 2, spec, 1, 5)
    with pytest.raises(ValueError, match="longer than 24 bytes"):
        Frame(ALL_TO_ALL, 2, "x" * 25, 1, 0).pack()
