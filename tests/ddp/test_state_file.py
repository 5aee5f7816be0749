"""States as safetensors files: they come back in every bit, other readers see them, and what is no
such file is refused."""

import json

import pytest
import torch

import commpress
from commpress.errors import CommpressError, InvalidArgument, StateMismatch

STATE = {
    "step": 3,
    "ratio": 0.5,
    "codec": "int8",
    "none": None,
    "yes": True,
    7: {"exp_avg": torch.arange(6.0).view(2, 3).t()},
    "parts": [torch.ones((), dtype=torch.bfloat16), (torch.zeros(0), "x")],
    "a/b": torch.ones(2, dtype=torch.uint8),
    "a": {"b": torch.zeros(3, dtype=torch.int64)},
    "infinite": float("inf"),
    "__metadata__": torch.ones(1),
}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_a_state_comes_back(tmp_path):
    commpress.save_safetensors(STATE, tmp_path / "state.safetensors")
    assert same(STATE, commpress.load_safetensors(tmp_path / "state.safetensors"))
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_the_package_safetensors_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    commpress.save_safetensors(STATE, tmp_path / "state.safetensors")
    found = safetensors.load_file(tmp_path / "state.safetensors")
    assert found.keys() == {"7/exp_avg", "parts/0", "parts/1/0", "a/b", "a/b'", "__metadata__'"}
    assert torch.equal(found["7/exp_avg"], STATE[7]["exp_avg"])


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {1, 2}}, "a is a set"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        ({"a": [torch.ones(2, device="meta")]}, "a/0 is a Tensor on meta"),
    ],
)
def test_other_things_are_refused_and_leave_no_file(tmp_path, state, says):
    with pytest.raises(InvalidArgument, match=says):
        commpress.save_safetensors(state, tmp_path / "state.safetensors")
    assert not list(tmp_path.iterdir())


def written(path, header, values=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
OURS = {"commpress": json.dumps({"dict": [["a", {"tensor": "a"}]]})}
LYING = {
    "no file of ours": {"a": ONE},
    "no JSON": b"{" * 40,
    "no header": b"",
    "deep JSON": b"[" * 100_000,
    "a list": [1],
    "longer than the file": {"a": ONE | {"shape": [1 << 40], "data_offsets": [0, 4 << 40]}},
    "negative": {"a": ONE | {"shape": [-2], "data_offsets": [8, 0]}},
    "no numbers": {"a": ONE | {"data_offsets": ["0", "8"]}},
    "an unknown type": {"a": ONE | {"dtype": "F4"}},
    "other sizes": {"a": ONE | {"shape": [3]}},
    "overlapping": {str(i): ONE | {"shape": [16], "data_offsets": [0, 64]} for i in range(50)},
    "a tensor that is missing": {"b": ONE},
    "no dictionary": {"a": ONE, "__metadata__": {"commpress": '{"tensor":"a"}'}},
    "an unknown outline": {"a": ONE, "__metadata__": {"commpress": '{"dict":[["a",{"set":[]}]]}'}},
    "a deep outline": {"a": ONE, "__metadata__": {"commpress": '{"list":[' * 5000 + "]}" * 5000}},
}


@pytest.mark.parametrize("kind", LYING)
def test_a_file_that_lies_is_refused(tmp_path, kind):
    header = LYING[kind]
    if isinstance(header, dict) and kind != "no file of ours":
        header = {"__metadata__": OURS} | header
    with pytest.raises(StateMismatch):
        commpress.load_safetensors(written(tmp_path / "state", header))


def test_any_prefix_and_any_flipped_byte_is_read_or_refused(tmp_path):
    commpress.save_safetensors({"a": torch.ones(2), "step": 1}, path := tmp_path / "state")
    whole = path.read_bytes()
    for at in range(len(whole)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            path.write_bytes(data)
            try:
                assert isinstance(commpress.load_safetensors(path), dict)
            except CommpressError:
                continue
            assert len(data) == len(whole)
