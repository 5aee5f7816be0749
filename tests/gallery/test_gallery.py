"""Every file of ``examples/gallery``: short, named where its paper is, and its main pieces run."""

import pytest

import sources
from gallery import FOLDER, alike, flat, gallery

LINES = 300
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PIECES = {}  # name of the file → what runs on two ranks, and what must be true of its result


def piece(name):
    """The function below runs on two ranks with the names of ``examples/gallery/<name>.py``."""

    def keep(function):
        PIECES[name] = function
        return function

    return keep


def test_every_file_has_a_quick_test_and_a_slow_one_and_stands_beside_its_paper():
    papers = (sources.ROOT / "docs" / "papers.md").read_text()
    tests = "".join(
        path.read_text() for path in sorted((sources.ROOT / "tests" / "gallery").glob("*.py"))
    )
    assert sorted(PIECES) == NAMES
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) <= LINES, f"{name}.py is longer than {LINES} lines"
        assert f"examples/gallery/{name}.py" in papers, f"{name}.py is not on the page of papers"
        assert tests.count(f'gallery("{name}")') >= 1, f"no slow test runs {name}.py"
        assert "torchrun --nproc-per-node" in text, f"{name}.py does not say how to run it"
        private = [line for line in text.splitlines() if "commpress" in line and "import _" in line]
        assert not private


def run(name):
    return PIECES[name](gallery(name))


@pytest.mark.parametrize("name", NAMES)
def test_its_pieces_run_on_two_ranks(pool, name):
    for found in pool.run(run, name, size=2):
        assert found is True


@piece("aq_sgd")
def aq_sgd(names):
    losses, error, sent = names.train(40)
    return (losses[-1] < losses[0] if losses else 0 < error < 0.1) and sent > 0


@piece("masha")
def masha(names):
    errors, optimizer = names.play(8, codec="topk-4", lr=0.2, tau=0.75)
    sent = [hook.counters.wire_bytes for hook in optimizer.hooks]
    return errors[-1] < errors[0] and alike(optimizer.point()) and min(sent) > 0


@piece("demo_optimizer")
def demo_optimizer(names):
    losses, model, bits = names.train(8)
    return losses[-1] < losses[0] and alike(flat(model)) and 0 < bits < 1


@piece("ef_momentum")
def ef_momentum(names):
    model, error, sent = names.solve("sign", 40)
    return error < 0.5 and alike(model) and 0 < sent < 40 * 4 * model.numel() / 16


def as_alone(found, names, exact=1e-4):
    losses, _ = found
    return all(abs(a - b) < exact for a, b in zip(losses, names.train(len(losses))[0], strict=True))


@piece("ring_attention")
def ring_attention(names):
    return as_alone(names.train(4, "none"), names)


@piece("ulysses")
def ulysses(names):
    return as_alone(names.train(4, "none"), names)


@piece("lasp")
def lasp(names):
    return as_alone(names.train(4, "none"), names)


@piece("flexsp")
def flexsp(names):
    found = names.train(4, "none")
    return as_alone(found, names) and found[1] == [((0,), (0,)), ((1,), (1, 2, 3))]


@piece("sketched_sgd")
def sketched_sgd(names):
    losses, model, share = names.train(8, k=9000)
    return losses[-1] < losses[0] and alike(flat(model)) and share < 0.4


@piece("lsh_moe")
def lsh_moe(names):
    losses, sent, _ = names.train(6, 0.2)
    return losses[-1] < losses[0] and sent < 0.25


@piece("length_curriculum")
def length_curriculum(names):
    losses, model, owed = names.train(5)
    return alike(flat(model)) and len(losses) == len(owed) == 5


@piece("adversarial_lamb")
def adversarial_lamb(names):
    losses, model = names.train(8)
    return losses[-1] < losses[0] and alike(flat(model))


@piece("hd_pissa")
def hd_pissa(names):
    losses, model, updates = names.train(8)
    return losses[-1] < losses[0] and alike(flat(model)) and names.directions(updates[0]) > 4


@piece("skip_pipe")
def skip_pipe(names):
    losses = names.train(5)
    return losses[-1] < losses[0]
