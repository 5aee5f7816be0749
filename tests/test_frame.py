"""The header of a message: its bytes, what is agreed and what is not, and the complaint when ranks differ."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs.family import NAMES
from commpress.collectives.frame import (
    ALL_GATHER,
    ALL_TO_ALL,
    FLAGS,
    HEADER,
    NOT_FINITE,
    Frame,
    same,
    stamp,
    unpack,
    verify,
)
from commpress.errors import CommunicationError, Mismatch

FRAME = Frame(ALL_TO_ALL, 4, "sign/l1/2048", 1000, 7, 0x89ABCDEF)
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
)


def wire(frame: Frame = FRAME, rows: int = 4, *, flag: int = 0, checksum: bool = False) -> torch.Tensor:
    """What arrives when every rank sends ``frame`` before a payload of its own."""
    made = torch.arange(rows * (HEADER + PAYLOAD), dtype=torch.uint8).view(rows, -1)
    stamp(made, frame.pack(), torch.tensor([flag], dtype=torch.uint8), checksum=checksum)
    return made


def test_golden_bytes():
    """A layout change breaks jobs whose ranks run different versions: it must change the version number, too."""
    body = bytes.fromhex(
        "6370 01 01 00 00 0400"  # magic, version, operation, flags, zero, world size
        "7369676e2f6c312f32303438 000000000000000000000000"  # sign/l1/2048
        "e803000000000000 07000000 efcdab89"  # elements, sequence number, label
    )
    assert len(body) == 48
    packed = FRAME.pack().numpy().tobytes()
    assert packed == body + zlib.crc32(body).to_bytes(4, "little") + bytes(12)
    assert packed[48:52].hex() == "a328a72d"


@given(frames)
def test_a_header_says_what_was_packed(frame):
    packed = frame.pack()
    assert packed.numel() == HEADER
    assert unpack(packed.numpy()) == frame


@given(frames, frames)
def test_headers_are_the_same_exactly_when_frames_are_equal(one, two):
    assert same(one.pack().numpy(), two.pack().numpy()) == (one == two)


@pytest.mark.parametrize(
    "other",
    [
        Frame(ALL_GATHER, 4, "sign/l1/2048", 1000, 7, 0x89ABCDEF),
        Frame(ALL_TO_ALL, 3, "sign/l1/2048", 1000, 7, 0x89ABCDEF),
        Frame(ALL_TO_ALL, 4, "sign/rms/2048", 1000, 7, 0x89ABCDEF),
        Frame(ALL_TO_ALL, 4, "sign/l1/2048", 1001, 7, 0x89ABCDEF),
        Frame(ALL_TO_ALL, 4, "sign/l1/2048", 1000, 8, 0x89ABCDEF),
        Frame(ALL_TO_ALL, 4, "sign/l1/2048", 1000, 7, 0x89ABCDEE),
    ],
    ids=["operation", "size", "codec", "numel", "sequence", "label"],
)
def test_a_difference_names_rank_operation_expected_and_got(other):
    arrived = wire()
    arrived[2, :HEADER] = other.pack()
    with pytest.raises(Mismatch) as caught:
        verify(arrived, FRAME, FRAME.pack(), 1)
    message = str(caught.value)
    assert message.startswith(f"rank 1 expected {FRAME.describe()}, but rank 2 sent {other.describe()}")
    assert "same codec, options and model" in message
    assert caught.value.ranks == (2,)


@settings(max_examples=300)
@given(at=st.integers(0, 51).filter(lambda i: i != FLAGS), bit=st.integers(0, 7), rank=st.integers(0, 3))
def test_any_flipped_agreed_bit_is_detected(at, bit, rank):
    arrived = wire()
    arrived[rank, at] ^= 1 << bit
    with pytest.raises(Mismatch) as caught:
        verify(arrived, FRAME, FRAME.pack(), 0)
    assert caught.value.ranks == (rank,)
    assert "bytes that are no header" in str(caught.value)


@given(flags=st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_flags_are_not_agreed(flags):
    """Each rank has its own: one that is not finite must not look like one that does something else."""
    arrived = wire()
    arrived[:, FLAGS] = torch.tensor(flags, dtype=torch.uint8)
    verify(arrived, FRAME, FRAME.pack(), 0)
    assert [unpack(row) for row in arrived[:, :HEADER].numpy()] == [FRAME] * 4


def test_the_flag_is_stamped_and_the_payload_left_alone():
    plain, flagged = wire(), wire(flag=NOT_FINITE)
    assert flagged[:, FLAGS].tolist() == [NOT_FINITE] * 4
    assert plain[:, FLAGS].tolist() == [0] * 4
    untouched = torch.arange(4 * (HEADER + PAYLOAD), dtype=torch.uint8).view(4, -1)
    assert torch.equal(plain[:, HEADER:], untouched[:, HEADER:])


@given(at=st.integers(HEADER, HEADER + PAYLOAD - 1), bit=st.integers(0, 7), rank=st.integers(0, 3))
def test_with_a_checksum_any_flipped_payload_bit_is_detected(at, bit, rank):
    arrived = wire(checksum=True)
    verify(arrived, FRAME, FRAME.pack(), 0)
    arrived[rank, at] ^= 1 << bit
    with pytest.raises(CommunicationError, match=f"payload of rank {rank} in all_to_all number 7 .* damaged") as caught:
        verify(arrived, FRAME, FRAME.pack(), 0)
    assert caught.value.ranks == (rank,)
    assert not isinstance(caught.value, Mismatch)


def test_without_a_checksum_payloads_are_not_read():
    arrived = wire()
    arrived[1, HEADER:] = 0
    verify(arrived, FRAME, FRAME.pack(), 0)


def test_one_rank_may_check_while_another_does_not():
    """The checksum is no agreed option: a rank that was started without it still gets along."""
    arrived = wire(checksum=True)
    arrived[2] = wire()[2]
    verify(arrived, FRAME, FRAME.pack(), 0)


def test_a_description_that_does_not_fit_is_refused():
    assert unpack(Frame(ALL_TO_ALL, 2, "x" * 24, 1, 0).pack().numpy()).codec == "x" * 24
    with pytest.raises(ValueError, match="longer than 24 bytes"):
        Frame(ALL_TO_ALL, 2, "x" * 25, 1, 0).pack()


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_fits_the_header(name):
    spec = NAMES[name].spec
    assert unpack(Frame(ALL_TO_ALL, 2, spec, 1, 0).pack().numpy()).codec == spec


def test_the_sequence_number_wraps():
    frame = Frame(ALL_TO_ALL, 2, "none", 1, 2**32 + 5)
    assert unpack(frame.pack().numpy()).sequence == 5


@given(st.binary(min_size=HEADER, max_size=HEADER))
def test_noise_is_no_header(noise):
    assert unpack(np.frombuffer(noise, np.uint8)) is None
