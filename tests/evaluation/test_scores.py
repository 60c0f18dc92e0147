"""The streamed counts against the whole matrix in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
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


def dense_tar(positives, negatives, fars):
    negatives = np.sort(negatives)[::-1]
    thresholds = [negatives[int(np.floor(far * len(negatives)))] for far in fars]
    return np.array([np.mean(positives > t) for t in thresholds])


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


@pytest.mark.parametrize("rows, columns", [(3, 9), (17, 4), (50, 3)])
def test_any_block_size_meets_each_gallery_entry_once(rows, columns):
    features, labels = make_set(50, 4, 6)
    stream = score_tiles.gallery_tiles(
        features, labels, features[:9], labels[:9], tile_size=(rows, columns)
    )
    kinds = [np.asarray(block.kinds).ravel() for block in stream()]
    counts = np.bincount(np.concatenate(kinds), minlength=3)
    mated = int((labels[:, None] == labels[:9]).sum())
    assert counts[: score_tiles.IGNORED].tolist() == [50 * 9 - mated, mated]


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


def test_exact_tar_equals_the_sorted_negatives():
    features, labels = make_set(150, 8, 12)
    is_row = labels < 5
    tar = error_rates.exact_tar(score_tiles.pair_tiles(features, labels, is_row), FARS)
    expected = dense_tar(*dense_pairs(features, labels, is_row), FARS)
    np.testing.assert_allclose(list(tar.values()), expected, atol=1e-12)


def test_exact_tar_is_the_best_roc_point_within_the_far():
    features, labels = make_set(150, 8, 12)
    is_row = np.ones(150, bool)
    positives, negatives = dense_pairs(features, labels, is_row)
    far, tar, _ = sklearn.metrics.roc_curve(
        np.repeat([1, 0], [len(positives), len(negatives)]),
        np.concatenate([positives, negatives]),
        drop_intermediate=False,
    )
    exact = error_rates.exact_tar(
        score_tiles.pair_tiles(features, labels, is_row), FARS
    )
    expected = [tar[far <= wanted].max() for wanted in FARS]
    # Between two negatives the ROC may reach further than "above a negative".
    np.testing.assert_allclose(list(exact.values()), expected, atol=3 / len(positives))


def test_permuting_the_images_changes_nothing():
    features, labels = make_set(150, 8, 12)
    is_row = labels < 5
    order = np.random.default_rng(1).permutation(150)
    tars = [
        error_rates.exact_tar(score_tiles.pair_tiles(f, y, r, tile_size=(32, 64)), FARS)
        for f, y, r in (
            (features, labels, is_row),
            (features[order], labels[order], is_row[order]),
        )
    ]
    assert tars[0] == pytest.approx(tars[1], abs=1e-3)


def test_labels_may_be_names_or_wide_integers():
    features, labels = make_set(150, 8, 12)
    is_row = labels < 5
    plain = error_rates.exact_tar(
        score_tiles.pair_tiles(features, labels, is_row), FARS
    )
    for other in (np.array([f"id{y}" for y in labels]), labels.astype(np.int64) << 33):
        stream = score_tiles.pair_tiles(features, other, is_row)
        assert error_rates.exact_tar(stream, FARS) == plain


def test_a_far_below_one_negative_takes_the_largest_negative():
    features, labels = make_set(150, 8, 12)
    stream = score_tiles.pair_tiles(features, labels, np.ones(150, bool))
    points = error_rates.exact_points(stream, error_rates.far_ranks((1e-9, 1e-6)))
    assert points.far.tolist() == [0, 0]
    assert points.thresholds[0] == points.thresholds[1]


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


def test_unit_is_safe_at_zero_and_at_the_edges_of_float32():
    x = np.float32([[0, 0], [3e38, 3e38], [3e-30, 0], [3, 4]])
    half = np.sqrt(0.5)
    expected = [[0, 0], [half, half], [1, 0], [0.6, 0.8]]
    np.testing.assert_allclose(
        score_tiles.unit_length(jnp.asarray(x)), expected, rtol=1e-6
    )


def test_low_precision_features_are_scored_in_float32():
    features, labels = make_set(40, 8, 4)
    stream = score_tiles.pair_tiles(
        jnp.asarray(features, jnp.bfloat16), labels, np.ones(40, bool)
    )
    assert next(stream()).scores.dtype == jnp.float32


def test_float64_features_give_the_same_rates():
    features, labels = make_set(150, 8, 12)
    is_row = labels < 5
    single = error_rates.exact_tar(
        score_tiles.pair_tiles(features, labels, is_row), FARS
    )
    with jax.enable_x64(True):
        stream = score_tiles.pair_tiles(features.astype(np.float64), labels, is_row)
        assert next(stream()).scores.dtype == jnp.float64
        assert error_rates.exact_tar(stream, FARS) == pytest.approx(single, abs=2e-3)


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


@pytest.mark.parametrize("labels", [np.zeros(10, int), np.arange(10)])
def test_one_kind_of_pair_is_refused(labels):
    features, _ = make_set(10, 4, 2)
    stream = score_tiles.pair_tiles(features, labels, np.ones(10, bool))
    with pytest.raises(ValueError, match="one positive and one negative"):
        error_rates.exact_tar(stream, FARS)
    with pytest.raises(ValueError, match="one positive and one negative"):
        error_rates.binned_tar(error_rates.cosine_histogram(stream), FARS)


@pytest.mark.parametrize("far", [0, 1, -0.1, 1.5, float("nan")])
def test_rates_outside_the_open_interval_are_refused(far):
    with pytest.raises(ValueError, match=r"FAR must be in \(0, 1\)"):
        error_rates.far_ranks([far])


def test_scores_that_change_between_the_passes_are_noticed():
    kinds = jnp.asarray([[0, 0, 1]], jnp.int8)
    values = iter([0.3, 0.4])

    def stream():
        yield score_tiles.ScoreTile(jnp.asarray([[next(values), 0.1, 0.5]]), kinds)

    with pytest.raises(RuntimeError, match="equal in both passes"):
        error_rates.exact_points(stream, lambda n: [0])
