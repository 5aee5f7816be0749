"""Methods that need few lines beside their papers' models: each learns, and its ranks stay
alike."""

from itertools import pairwise

import pytest

from gallery import alike, flat, gallery

pytestmark = pytest.mark.slow
STAGES = 4


def curriculum(steps):
    losses, model, owed = gallery("length_curriculum").train(steps)
    return losses, owed, alike(flat(model))


def test_a_curriculum_of_lengths_owes_no_more_when_it_ends_than_in_its_middle(pool):
    names = gallery("length_curriculum")
    lengths = [names.length_of(step, 30) for step in range(30)]
    assert (lengths[0], lengths[-1]) == (8, 64)
    assert lengths == sorted(lengths)
    for losses, owed, same in pool.run(curriculum, 30, size=2):
        assert same
        assert losses[-1] < losses[0] - 0.3
        assert max(owed[20:]) < 3 * max(owed[5:15]), "rows that no sequence reaches do not pile up"


def momentum(codec):
    model, error, sent = gallery("ef_momentum").solve(codec)
    return error, alike(model), sent


def test_one_bit_of_gradients_reaches_the_solution_of_momentum(pool):
    exact, coded = (pool.run(momentum, codec, size=2) for codec in ("none", "sign"))
    for (far, _, whole), (off, same, sent) in zip(exact, coded, strict=True):
        assert same
        assert off < 1.2 * far
        assert sent < whole / 25


def adversarial(radius):
    names = gallery("adversarial_lamb")
    losses, model = names.train(80, radius=radius)
    return losses, names.worst(model, 0.3), alike(flat(model))


def test_adversarial_noise_makes_large_batches_of_lamb_robust(pool):
    clean, noisy = (pool.run(adversarial, radius, size=2) for radius in (0.0, 0.3))
    for losses, _, same in clean + noisy:
        assert same
        assert losses[-1] < 0.6 * losses[0]
    assert noisy[0][1] < clean[0][1], "the loss under noise"


def pissa(same, codec):
    names = gallery("hd_pissa")
    losses, model, updates = names.train(60, codec, same=same)
    return losses, [names.directions(update) for update in updates], alike(flat(model))


def test_different_adapters_on_every_rank_reach_more_directions_than_the_same(pool):
    for (apart, wide, equal), (together, narrow, also_equal) in zip(
        pool.run(pissa, False, "int8", size=3), pool.run(pissa, True, "int8", size=3), strict=True
    ):
        assert equal
        assert also_equal
        assert apart[-1] < 0.9 * apart[0]
        assert apart[-1] < together[-1]
        assert min(wide) > max(narrow)


def in_parallel(name):
    """Losses with two codecs, those of one process, and how many times fewer bytes int8 takes."""
    names = gallery(name)
    (exact, one), (coded, other) = (names.train(20, codec) for codec in ("none", "int8"))
    return exact, coded, names.train(20)[0], one.sent_bytes / other.sent_bytes


@pytest.mark.parametrize("name", ["ring_attention", "ulysses"])
def test_a_model_over_parts_of_sequences_trains_as_in_one_process(pool, name):
    for exact, coded, alone, ratio in pool.run(in_parallel, name, size=3):
        assert exact == pytest.approx(alone, abs=1e-4)
        assert coded == pytest.approx(alone, abs=0.05)
        assert exact[-1] < 0.2 * exact[0]
        assert ratio > 2.5


def skipping(skip, codec):
    return gallery("skip_pipe").train(41, skip=skip, codec=codec)


@pytest.mark.parametrize("skip", [0.25, 0.5])
def test_routes_use_every_stage_as_often_one_micro_batch_at_a_time_and_take_less_time(skip):
    names = gallery("skip_pipe")
    whole, found = names.routes(6, 12, 0.0), names.routes(6, 12, skip)
    assert names.length(whole) == 12 + 6 - 1
    assert names.length(found) < names.length(whole)
    taken = [place for way in found for place in way]
    assert len(set(taken)) == len(taken)
    uses = [sum(stage == s for stage, _ in taken) for s in range(1, 5)]
    assert max(uses) - min(uses) <= 1
    assert all((way[0][0], way[-1][0]) == (0, 5) for way in found)
    assert all(a < b for way in found for (_, a), (_, b) in pairwise(way))
    assert len({tuple(stage for stage, _ in way) for way in found}) > 2, (
        "ways differ in what they leave out, or in order"
    )


def test_a_pipeline_that_skips_stages_learns_what_the_whole_one_does(pool):
    exact, skipped = (
        pool.run(skipping, 0.0, "none", size=STAGES),
        pool.run(skipping, 0.5, "int8", size=STAGES),
    )
    for losses in exact + skipped:
        assert losses[-1] < 0.8 * losses[0]
    assert skipped[0] == skipped[3]
    assert skipped[0][-1] < 1.5 * exact[0][-1]


def seen_again(codec, direct):
    return gallery("aq_sgd").train(400, codec, direct=direct)


def test_changes_of_activations_leave_out_less_and_less(pool):
    """As many bits as without differences, a fraction of their error, and a lower loss."""
    ((_, error, sent), (losses, _, _)), ((_, coarse, as_many), (direct, _, _)) = (
        pool.run(seen_again, "int4", direct, size=2) for direct in (False, True)
    )
    assert error < 0.1 * coarse
    assert as_many < sent < 1.2 * as_many  # the first time as they are
    assert sum(losses[-8:]) < sum(direct[-8:]) < 0.2 * sum(direct[:8])
