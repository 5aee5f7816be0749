"""The exact block code: loops give the bytes of the law, blocks come back whole, no code does
harm."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exact_law as law
from commpress.errors import Damaged
from commpress.kernels.cpu import exact

FORMS = [
    (np.uint8, law.PLAIN),
    (np.uint16, law.PLAIN),
    (np.uint16, law.BFLOAT16),
    (np.uint32, law.PLAIN),
    (np.uint32, law.FLOAT32),
]


def weights(rng, dtype, kind, numel):
    """Patterns of numbers as models have them, or any."""
    if kind == law.PLAIN:
        return rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, numel).astype(dtype)
    patterns = (rng.standard_normal(numel) * 0.02).astype(np.float32).view(np.uint32)
    return (patterns >> 16).astype(dtype) if kind == law.BFLOAT16 else patterns


def moved(rng, old, share, most):
    """``old`` after a share of it has moved by up to ``most`` units in the last place."""
    new = old.copy()
    which = rng.random(len(old)) < share
    new[which] += rng.integers(-most, most + 1, int(which.sum())).astype(old.dtype)
    return new


def decoded(code, old, kind, by=exact):
    target = old.copy()
    by.decode(code, target, kind)
    return target


@pytest.mark.parametrize(("dtype", "kind"), FORMS)
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000, 5003])
def test_loops_give_the_bytes_of_the_law_and_read_them(dtype, kind, numel):
    rng = np.random.default_rng(numel)
    old = weights(rng, dtype, kind, numel)
    for share in (0, 0.01, 0.4, 1):
        for most in (1, 40, 1 << 20):
            new = moved(rng, old, share, most)
            for before in (old, None):
                code = exact.encode(before, new, kind)
                assert code == law.encode(before, new, kind, law.classes_of(code))
                base = np.zeros_like(old) if before is None else old
                assert np.array_equal(decoded(code, base, kind), new)
                assert np.array_equal(decoded(code, base, kind, by=law), new)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_two_blocks_come_back_whatever_their_bits(data):
    dtype, kind = data.draw(st.sampled_from(FORMS))
    top = (1 << 8 * np.dtype(dtype).itemsize) - 1
    numbers = st.lists(
        st.tuples(st.integers(0, top), st.integers(0, top)), min_size=1, max_size=200
    )
    old, new = (np.array(side, dtype) for side in zip(*data.draw(numbers), strict=True))
    code = exact.encode(old, new, kind)
    assert code == law.encode(old, new, kind, law.classes_of(code))
    assert np.array_equal(decoded(code, old, kind), new)
    assert len(code) <= new.nbytes + 1


def test_every_pattern_of_bfloat16_and_adversarial_exponents_survive_and_never_grow():
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    for block in (
        every,
        rng.permutation(every),
        np.repeat(every[:: 1 << 7], 64),
        every[::-1].copy(),
    ):
        code = exact.encode(None, block, law.BFLOAT16)
        assert code == law.encode(None, block, law.BFLOAT16)
        assert len(code) <= block.nbytes + block.nbytes // 4096
        assert np.array_equal(decoded(code, np.zeros_like(block), law.BFLOAT16), block)


def test_zeros_of_both_signs_and_payloads_of_nan_are_differences_like_others():
    old = np.array([0.0, -0.0, np.nan, np.inf, 1.0], np.float32).view(np.uint32)
    new = np.array([-0.0, 0.0, np.nan, -np.inf, 1.0], np.float32).view(np.uint32)
    new[2] ^= 5
    code = exact.encode(old, new)
    assert np.array_equal(decoded(code, old, law.PLAIN), new)
    assert exact.encode(old, old.copy()) == bytes([law.SAME])


def test_weights_of_a_model_take_the_bytes_that_the_law_promises():
    """Those of a normal distribution lie in a window of 7 exponents but for 3 %."""
    rng = np.random.default_rng(1)
    block = weights(rng, np.uint16, law.BFLOAT16, law.BLOCK)
    assert 1.38 < block.nbytes / len(exact.encode(None, block, law.BFLOAT16)) < 1.45
    which = rng.random(law.BLOCK) < 0.01
    bits = 8 * len(exact.encode(block, block + which.astype(np.uint16), law.BFLOAT16))
    entropy = -(0.01 * np.log2(0.01) + 0.99 * np.log2(0.99)) * law.BLOCK + 1 * which.sum()
    assert bits < 1.15 * entropy  # places, and a sign for each


def stepped(rng, old, rate):
    """Weights in bfloat16 after a step of about this size in the floats behind them."""
    exact_ones = (old.astype(np.uint32) << 16).view(np.float32)
    exact_ones += rate * rng.standard_normal(len(old)).astype(np.float32)
    return (exact_ones.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


@pytest.mark.parametrize(("rate", "least"), [(1e-6, 0.7), (1e-5, 0.75), (1e-4, 0.92)])
def test_a_step_of_one_size_takes_fewer_bytes_than_places_and_moves_without_their_exponents(
    rate, least
):
    rng = np.random.default_rng(3)
    old = weights(rng, np.uint16, law.BFLOAT16, 1 << 18)
    new = stepped(rng, old, rate)
    _, counts = np.unique(law.signed(new - old), return_counts=True)
    shares = counts / counts.sum()
    without = -(shares * np.log2(shares)).sum() * len(old)
    code = exact.encode(old, new, law.BFLOAT16)
    assert 8 * len(code) < least * without
    assert np.array_equal(decoded(code, old, law.BFLOAT16), new)


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.03])
def test_moves_are_found_however_far_they_lie_apart(share):
    rng = np.random.default_rng(5)
    old = weights(rng, np.uint16, law.BFLOAT16, law.BLOCK - 7)
    new = moved(rng, old, share, 2)
    code = exact.encode(old, new, law.BFLOAT16)
    assert code[0] == law.SPARSE
    assert np.array_equal(decoded(code, old, law.BFLOAT16), new)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMS),
    st.sampled_from([0, 0.01, 0.3, 1]),
    st.sampled_from([0, 0.01, 0.3, 1]),
)
def test_codes_of_steps_lead_to_the_last_block_and_fold_into_one(seed, form, share, later):
    dtype, kind = form
    rng = np.random.default_rng(seed)
    first = weights(rng, dtype, kind, 300)
    second = moved(rng, first, share, 3)
    third = moved(rng, second, later, 3)
    if rng.random() < 0.3:
        third[:50] = first[:50]  # changes that are taken back
    one, two = exact.encode(first, second, kind), exact.encode(second, third, kind)
    both = decoded(two, decoded(one, first, kind), kind)
    assert np.array_equal(both, third)
    assert np.array_equal(decoded(exact.encode(first, both, kind), first, kind), third)


# ---------------------------------------------------------------- codes of somebody else


class Guarded:
    """NumberType in front of a page that nobody may touch: a loop that goes too far ends the
    process."""

    def __init__(self, numel, dtype):
        page, size = mmap.PAGESIZE, numel * np.dtype(dtype).itemsize
        whole = -(-size // page) * page
        self._map = mmap.mmap(-1, whole + page)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert protect(self.address + whole, page, 0) == 0
        memory = (ctypes.c_char * size).from_address(self.address + whole - size)
        self.numbers = np.frombuffer(memory, dtype)


def agree(code, old, kind):
    """True if law and loops take a code alike, False if both refuse it.

    It lies in front of a forbidden page, as the block does.
    """
    guarded, block = Guarded(len(code), np.uint8), Guarded(len(old), old.dtype)
    guarded.numbers[:], block.numbers[:] = np.frombuffer(code, np.uint8), old
    expected = old.copy()
    try:
        law.decode(code, expected, kind)
    except ValueError:
        with pytest.raises(Damaged, match="is damaged"):
            exact.decode(guarded.numbers, block.numbers, kind)
        return False
    exact.decode(guarded.numbers, block.numbers, kind)
    assert np.array_equal(block.numbers, expected)
    return True


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(FORMS), st.sampled_from([0.01, 0.5, 1]), st.booleans()
)
def test_a_code_that_was_changed_is_read_as_the_law_reads_it_and_never_out_of_bounds(
    seed, form, share, anew
):
    dtype, kind = form
    rng = np.random.default_rng(seed)
    old = weights(rng, dtype, kind, int(rng.integers(1, 300)))
    code = bytearray(
        exact.encode(
            None if anew else old, moved(rng, old, share, 1 << int(rng.integers(1, 30))), kind
        )
    )
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(code)))
        match int(rng.integers(4)):
            case 0:
                code[at] ^= 1 << int(rng.integers(8))
            case 1:
                code[at] = int(rng.integers(256))
            case 2:
                del code[at:]
            case 3:
                code[at:at] = rng.bytes(int(rng.integers(1, 9)))
        if not code:
            break
    agree(bytes(code), old, kind)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.sampled_from(FORMS), st.integers(0, 3), st.integers(1, 200))
def test_any_bytes_at_all_are_read_as_the_law_reads_them(content, form, first, numel):
    dtype, kind = form
    agree(bytes([first]) + content, np.arange(numel).astype(dtype), kind)


def test_every_truncation_is_refused():
    rng = np.random.default_rng(2)
    old = weights(rng, np.uint16, law.BFLOAT16, 500)
    for code in (
        exact.encode(old, moved(rng, old, 0.1, 4), law.BFLOAT16),
        exact.encode(None, old, law.BFLOAT16),
    ):
        assert not any(agree(code[:length], old, law.BFLOAT16) for length in range(len(code)))


def test_bits_and_moves_behind_the_last_of_a_class_are_refused():
    rng = np.random.default_rng(4)
    old = weights(rng, np.uint16, law.BFLOAT16, 256)
    new = old.copy()
    new[[10, 200]] += 1
    for k, m in ((5, 0), (5, 1), (law.EVERY, 0)):
        code = bytearray(law.sparse(old, new, [(255, k, m)]))
        assert agree(bytes(code), old, law.PLAIN)
        code[2] -= 1  # of both, say one, which is all that 128 numbers can have
        assert not agree(bytes(code), old[:128], law.PLAIN)
        code[2] += 1
        code[law.SPARSE_HEAD.size + 3] += 1  # a byte more
        assert not agree(bytes(code) + bytes(1), old, law.PLAIN)


def test_a_block_is_refused_that_no_code_is_for():
    for block in (
        np.zeros(0, np.uint16),
        np.zeros(law.BLOCK + 1, np.uint16),
        np.zeros(3, np.int64),
    ):
        with pytest.raises(ValueError, match="expected 1 to"):
            exact.encode(None, block)
