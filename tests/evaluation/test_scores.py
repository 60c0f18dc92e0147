"""The streamed counts against the whole matrix in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.evaluation import error_rates, score_tiles

FARS = (1e-4, 1e-3, 1e-2, 1e-1, 0.5)

# Sets are of one size, 150 images, where none is needed: its programs compile once.


def make_set(num, dim, num_ids, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(num_ids, size=num)
    features = random.standard_normal((num, dim)) + labels[:, None] % 7 - 3
    return features.astype(np.float32), labels


def dense_pairs(features, labels, is_row):
    """(positives, negatives) of the whole matrix, float32 cosines."""
    x = np.asarray(score_tiles.unit_length(jnp.asarray(features)))
    cosines = np.asarray(jnp.dot(x, x.T, precision="highest"))
    first, second = np.triu_indices(len(x), 1)
    wanted = is_row[first] | is_row[second]
    first, second = first[wanted], second[wanted]
    is_mated = labels[first] == labels[second]
    values = cosines[first, second]
    return values[is_mated], values[~is_mated]


@pytest.mark.parametrize(
    "rows, columns, share, seed",
    [(1, 53, 0.1, 0), (40, 1, 0.5, 1), (7, 13, 0.5, 2), (23, 70, 1.0, 3)],
)
def test_any_block_size_counts_each_pair_once(rows, columns, share, seed):
    features, labels = make_set(53, 4, 6, seed)
    is_row = np.random.default_rng(seed).random(53) < share
    is_row[seed] = True
    stream = score_tiles.pair_tiles(features, labels, is_row, tile_size=(rows, columns))
    found = {score_tiles.NEGATIVE: [], score_tiles.POSITIVE: []}
    for block in stream():
        for kind, values in found.items():
            values.append(np.asarray(block.scores)[np.asarray(block.kinds) == kind])
    positives, negatives = dense_pairs(features, labels, is_row)
    for kind, expected in (
        (score_tiles.POSITIVE, positives),
        (score_tiles.NEGATIVE, negatives),
    ):
        got = np.sort(np.concatenate(found[kind]))
        np.testing.assert_allclose(got, np.sort(expected), atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([-1.0, -0.5, -0.0, 0.0, 1e-30, -1e-30, 0.25, 0.2500001, 1.0])
        | st.floats(-1, 1, width=32),
        min_size=16,
        max_size=16,
    ),
    positives=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
)
def test_every_order_statistic_is_exact_with_ties_and_zeros(values, positives):
    values, positives = np.float32(values), np.float32(positives)
    # XLA flushes subnormals to zero, in scores as in their comparison.
    values, positives = (np.where(np.abs(x) < 1e-37, 0, x) for x in (values, positives))
    block = score_tiles.ScoreTile(
        jnp.asarray(np.append(values, positives), jnp.float32)[None],
        jnp.asarray(np.repeat([0, 1], [16, 8]), jnp.int8)[None],
    )
    points = error_rates.exact_points(lambda: iter([block]), lambda n: range(n))
    expected = np.sort(values)[::-1]
    np.testing.assert_array_equal(points.thresholds, expected)
    np.testing.assert_array_equal(
        points.tar, [np.mean(positives > t) for t in expected]
    )
    np.testing.assert_array_equal(points.far, [np.mean(values > t) for t in expected])


@pytest.mark.parametrize(
    ("far", "negatives", "rank"),
    [(0.29, 100, 29), (0.1, 30, 3), (1e-6, 631_920_000, 631), (1e-3, 999, 0)],
)
def test_far_ranks_floor_the_true_product(far, negatives, rank):
    assert error_rates.far_ranks([far])(negatives) == [rank]


def test_counters_are_flushed_before_they_overflow(monkeypatch):
    features, labels = make_set(80, 4, 8)
    stream = score_tiles.pair_tiles(
        features, labels, np.ones(80, bool), tile_size=(16, 16)
    )
    whole = error_rates.cosine_histogram(stream)
    monkeypatch.setattr(error_rates, "_MAX_COUNT", 300)
    np.testing.assert_array_equal(error_rates.cosine_histogram(stream), whole)
    assert whole.sum() == 80 * 79 // 2 and whole.dtype == np.int64


def test_memory_of_a_block_does_not_grow_with_the_set():
    def temporary(num):
        shape = jax.ShapeDtypeStruct
        lowered = score_tiles._pair_tile.lower(
            shape((num, 64), jnp.float32),
            shape((num,), jnp.int32),
            shape((num,), bool),
            shape((128,), jnp.int32),
            shape((), jnp.int32),
            num_columns=512,
        )
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert temporary(2_000_000) <= temporary(2_000)
    assert temporary(2_000_000) < 2 << 20


def test_bad_sets_are_refused():
    features, labels = make_set(10, 4, 2)
    rows = np.ones(10, bool)
    broken = features.copy()
    broken[3, 1] = np.nan
    refused = [
        (broken, labels, rows, "finite"),
        (features[:0], labels[:0], rows[:0], "at least one feature"),
    ]
    for *arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            score_tiles.pair_tiles(*arguments)


def test_scores_that_change_between_the_passes_are_noticed():
    kinds = jnp.asarray([[0, 0, 1]], jnp.int8)
    values = iter([0.3, 0.4])

    def stream():
        yield score_tiles.ScoreTile(jnp.asarray([[next(values), 0.1, 0.5]]), kinds)

    with pytest.raises(RuntimeError, match="equal in both passes"):
        error_rates.exact_points(stream, lambda n: [0])
