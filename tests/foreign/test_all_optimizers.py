"""Every optimizer of the packages that people use: refused when it is wrapped, or with the weights
that it has by itself.

``python tests/foreign/test_all_optimizers.py`` prints a table of all packages that are installed.
"""

import importlib
import inspect
import sys
import tempfile
import warnings

import pytest
import torch

import commpress
from commpress.errors import InvalidArgument

PACKAGES = {
    "torch.optim": "torch.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm": "timm.optim",
    "torch_optimizer": "torch_optimizer",
    "prodigyopt": "prodigyopt",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "transformers": "transformers.optimization",
}
STEPS = 60  # of the table; tests take fewer


def classes(module):
    """Optimizers that the module names, once each."""
    found = {}
    for name, kind in vars(module).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
        ):
            found.setdefault(kind, name)
    return sorted((name, kind) for kind, name in found.items() if not name.startswith("_"))


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64), torch.nn.Linear(64, 10)
    )


def train(model, optimizer, steps):
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 64, generator=draw)
        torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def outcome(kind, steps=STEPS):
    """``(word, detail)``: "refused", "equal", "whole" where a store alone takes it, as whole
    tensors, "different", or "unusable" where the optimizer cannot train by itself."""
    takes_rate = "lr" in inspect.signature(kind).parameters
    for options in [{"lr": 1e-3}, {}] if takes_rate else [{}]:
        word, detail = compared(kind, options, steps)
        if word not in ("equal", "whole"):
            break
    return word, detail


def compared(kind, options, steps):
    """With these options."""
    model = net()
    try:
        torch.manual_seed(0)
        plain = kind(model.parameters(), **options)
        wrapped, taken = {}, "equal"
        for wrap in (in_a_store, over_ranks):
            torch.manual_seed(0)
            other = net()
            if wrap is over_ranks and wrapped["in_a_store"][1].by_tensor:
                taken = "whole"
                continue
            wrapped[wrap.__name__] = other, wrap(other, kind, options)
    except InvalidArgument as error:
        return "refused", str(error).split(": ", 1)[-1][:90]
    except Exception as error:
        return unusable(error)
    try:
        torch.manual_seed(0)
        wanted = train(model, plain, steps)
    except Exception as error:
        return unusable(error)
    for name, (other, optimizer) in wrapped.items():
        torch.manual_seed(0)
        got = train(other, optimizer, steps)
        unit = torch.nextafter(wanted.abs(), torch.tensor(torch.inf)) - wanted.abs()
        bound = 4 * unit + 1e-4 * (plain.param_groups[0].get("lr") or 1e-3) * steps
        if not bool(((got - wanted).abs() <= bound).all()):
            return "different", f"{name} by {float((got - wanted).abs().max()):.2g}"
    return taken, ""


def unusable(error):
    return "unusable", f"{type(error).__name__}: {error}".splitlines()[0][:90]


def in_a_store(model, kind, options):
    store = commpress.TieredStore.open(tempfile.mkdtemp(), host="16MiB")
    return commpress.Offloaded(model.parameters(), kind, store=store, chunk_mb=0.03, **options)


def over_ranks(model, kind, options):
    return commpress.Partitioned(model.parameters(), kind, bucket_mb=0.03, **options)


@pytest.mark.slow  # tests/zero/test_elementwise.py takes and refuses one of each kind
@pytest.mark.parametrize("package", PACKAGES)
def test_every_optimizer_is_refused_or_has_its_own_weights(package):
    pytest.importorskip(package)
    seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in classes(importlib.import_module(PACKAGES[package])):
            seen[name] = outcome(kind, steps=12)
    assert not {name: found for name, found in seen.items() if found[0] == "different"}
    if package == "torch.optim":
        assert {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop"} <= {
            name for name, (word, _) in seen.items() if word == "equal"
        }


@pytest.mark.parametrize("shape", [(40, 30), (1200,)])
def test_adafactor_of_transformers_looks_across_elements_however_it_is_set(shape):
    """Factors of matrices find no place in a store; of vectors it keeps moments, a root mean square
    and a number of steps, each vector its own."""
    kind = pytest.importorskip("transformers").Adafactor
    fixed = {"lr": 1e-3, "relative_step": False}
    for options in ({}, fixed, fixed | {"scale_parameter": False, "beta1": 0.9}):
        for wrap in (in_a_store, over_ranks):
            models = [torch.nn.ParameterList([torch.ones(shape)]) for _ in range(2)]
            if wrap is in_a_store and len(shape) == 1:
                wrapped, plain = (
                    wrap(models[0], kind, options),
                    kind(models[1].parameters(), **options),
                )
                for step in range(3):
                    for model, optimizer in zip(models, (wrapped, plain), strict=True):
                        model[0].grad = torch.linspace(-1, step + 1, shape[0])
                        optimizer.step()
                assert torch.equal(models[0][0], models[1][0])
                continue
            with pytest.raises(InvalidArgument, match="is not element-wise"):
                wrap(models[0], kind, options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for package in sys.argv[1:] or PACKAGES:
        try:
            module = importlib.import_module(PACKAGES[package])
        except ImportError as error:
            print(f"{package}: {error}")
            continue
        for name, kind in classes(module):
            print(f"{package:18} {name:28} {' '.join(outcome(kind))}", flush=True)
