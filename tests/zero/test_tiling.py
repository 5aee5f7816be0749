"""Linear layers cut into tiles: the plain layer's values, and no more than a tile of it in memory
when streamed."""

import pytest
import torch
from torch import nn

import commpress
from commpress.errors import InvalidArgument
from commpress.integrations.zero.tiling import Tile, TiledLinear
from small_store import open_store
from stream_twin import OPTIONS, groups, made, offloaded, train


def net(bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Tanh(), nn.Linear(40, 5, bias=bias))


def tiled(model: nn.Module, rows: int = 7) -> nn.Module:
    return commpress.tile(model, tile_mb=4 * 24 * rows / 1e6)


@pytest.mark.parametrize("bias", [True, False])
def test_whole_numbers_give_the_same_bits(bias):
    """Sums of whole numbers are exact in any order: results and all gradients."""
    plain, cut = net(bias)[0], tiled(net(bias))[0]
    assert [len(tile.weight) for tile in cut.tiles] == [7, 7, 7, 7, 7, 5]
    x = torch.randint(-9, 9, (3, 11, 24)).float().requires_grad_()
    y = x.detach().clone().requires_grad_()
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randint(-9, 9, p.shape))
    cut.load_state_dict(plain.state_dict())
    seed = torch.randint(-9, 9, (3, 11, 40)).float()
    one, other = plain(x), cut(y)
    assert torch.equal(one, other)
    one.backward(seed)
    other.backward(seed)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(plain.weight.grad, torch.cat([tile.weight.grad for tile in cut.tiles]))
    assert not bias or torch.equal(plain.bias.grad, cut.bias.value.grad)


def test_plain_and_tiled_load_each_other():
    plain, cut = net(), tiled(net())
    assert plain.state_dict().keys() == cut.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(cut.state_dict()[name], value)
    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 5))
    cut.load_state_dict(other.state_dict())
    plain.load_state_dict(cut.state_dict())
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in plain.state_dict().items()
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        cut.load_state_dict(
            nn.Sequential(nn.Linear(24, 41), nn.Tanh(), nn.Linear(40, 5)).state_dict()
        )
    with pytest.raises(RuntimeError, match="Missing key"):
        cut.load_state_dict(
            {name: value for name, value in other.state_dict().items() if name != "0.weight"}
        )


def test_first_values_of_a_tiled_model_on_the_meta_device(tmp_path):
    """A seed gives those of the plain model built in memory."""
    with torch.device("meta"):
        cut = tiled(net())
    with open_store(tmp_path / "store", host="2MiB") as store:
        torch.manual_seed(3)
        state, wanted = commpress.stream(cut, store=store).state_dict(), net().state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.slow  # bits of tiles stand above, streaming in test_streamed.py
def test_streamed_tiles_train_as_the_plain_model(tmp_path):
    """Rounding differs in the last bits of a sum; what is in memory at once is a tile and the rest
    of its layer."""
    safetensors = pytest.importorskip("safetensors.torch")
    cut, plain, again = commpress.tile(made(), tile_mb=0.002), made(), made(seed=6)
    sizes = [4 * tile.weight.numel() for tile in cut.modules() if isinstance(tile, Tile)]
    assert len(sizes) > 40
    twin = torch.optim.AdamW(groups(plain), **OPTIONS)
    most = 0
    with open_store(tmp_path / "store", host="2MiB") as store:
        streamed = commpress.stream(cut, store=store, chunk_mb=0.04)
        rest = max(unit.nbytes for unit in streamed.groups if ".tiles." not in unit.name)

        def look(*_):
            nonlocal most
            most = max(most, sum(unit.nbytes for unit in streamed.groups if unit.present))

        for module in cut.modules():
            if isinstance(module, Tile):
                module.register_forward_hook(look)
                if module.weight.requires_grad:
                    module.weight.register_post_accumulate_grad_hook(look)
        optimizer = offloaded(cut, store)
        losses = train(cut, optimizer, 0, 4)
        assert losses == pytest.approx(train(plain, twin, 0, 4), rel=1e-5)
        streamed.save(tmp_path / "weights.safetensors")
        values = streamed.state_dict()
        plain.load_state_dict(values)
        again.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
        assert all(torch.equal(value, values[name]) for name, value in again.state_dict().items())
        streamed.load(tmp_path / "weights.safetensors")
    assert most <= rest + max(sizes)


def test_what_cannot_be_cut_stays_or_is_refused(tmp_path):
    tied = made()
    commpress.tile(tied, tile_mb=1e-6)
    assert isinstance(tied.head, nn.Linear)
    assert isinstance(tied.layers[0].up, TiledLinear)
    encoder = commpress.tile(nn.TransformerEncoderLayer(8, 2, 16), tile_mb=1e-6)
    assert not any(isinstance(module, TiledLinear) for module in encoder.modules())
    assert isinstance(commpress.tile(nn.Linear(8, 9), tile_mb=1e-4), TiledLinear)
    with pytest.raises(InvalidArgument, match="tile_mb"):
        commpress.tile(net(), tile_mb=0)
    hooked = net()
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InvalidArgument, match="hooks"):
        tiled(hooked)
    with open_store(tmp_path / "store", host="2MiB") as store:
        commpress.stream(streamed := net(), store=store)
        with pytest.raises(InvalidArgument, match="before stream"):
            tiled(streamed)
