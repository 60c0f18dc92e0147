"""Retrieval against released numbers, a plain loop, and what must not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.evaluation import rerank, retrieval
from fedfr_jax.evaluation.rerank import expand, k_reciprocal_rerank, nearest
from fedfr_jax.evaluation.retrieval import (
    JUNK,
    IdentityLabels,
    cosines,
    count_matches,
    first_hits,
    rank_gallery,
    single_digit,
    summary,
)


def opened(arrays):
    """(scores, queries, gallery) of a stored set."""
    people = [
        IdentityLabels(arrays[f"{part}_id"], arrays[f"{part}_cam"])
        for part in ("query", "gallery")
    ]
    return cosines(arrays["query_feat"], arrays["gallery_feat"]), *people


def by_cmc(cmc):
    return {f"rank{k}": cmc[k - 1] for k in (1, 5, 10)}


def close(found, wanted):
    """Metrics are those wanted, which need not have all."""
    wanted = {name: float(value) for name, value in wanted.items()}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", ["reid_eval_6cam", "reid_eval_nomatch"])
def test_the_official_and_the_usual_rules_give_their_released_numbers(golden, name):
    arrays = golden(name)
    official = rank_gallery(*opened(arrays), average_precision="official")
    assert_allclose(official.average_precision, arrays["official_ap"], atol=1e-7)
    assert_array_equal(official.first_hit, arrays["official_first_hit"])
    wanted = {**by_cmc(arrays["official_cmc"]), "mAP": arrays["official_mAP"]}
    close(summary(official, divide_by="all"), wanted)
    usual = rank_gallery(*opened(arrays))
    assert_allclose(usual.average_precision, arrays["standard_ap"], atol=1e-7)
    wanted = {**by_cmc(arrays["standard_cmc"]), "mAP": arrays["standard_mAP"]}
    close(summary(usual), wanted)
    is_lost = np.isnan(arrays["official_ap"])
    queries, gallery = opened(arrays)[1:]
    assert_array_equal(count_matches(queries, gallery)[0] == 0, is_lost)


def test_cameras_cut_to_their_first_digit_give_the_official_numbers(golden):
    arrays = golden("reid_eval_15cam")
    scores, *people = opened(arrays)
    cut = [one._replace(cameras=single_digit(one.cameras)) for one in people]
    assert_array_equal(cut[0].cameras, arrays["collapsed_query_cam"])
    found = rank_gallery(scores, *cut, average_precision="official")
    wanted = {"mAP": arrays["collapsed_mAP"]}
    wanted |= dict(
        zip(("rank1", "rank5", "rank10"), arrays["collapsed_rank1_5_10"], strict=True)
    )
    close(summary(found, divide_by="all"), wanted)
    whole = rank_gallery(scores, *people)
    assert_allclose(whole.average_precision, arrays["standard_ap"], atol=1e-7)


def evaluation_set(golden, key="ev_dist"):
    arrays = golden("reid_more")
    queries = IdentityLabels(arrays["ev_q_pid"], arrays["ev_q_cam"])
    gallery = IdentityLabels(arrays["ev_g_pid"], arrays["ev_g_cam"])
    distance = jnp.asarray(arrays[key], jnp.float32)
    return (lambda rows: -distance[rows]), queries, gallery, arrays


@pytest.mark.parametrize(
    "key, prefix", [("ev_dist", "ev_"), ("ev_dist_ties", "ev_ties_stable_")]
)
def test_precision_penalty_and_ties_are_fast_reids(golden, key, prefix):
    *given, arrays = evaluation_set(golden, key)
    found = rank_gallery(*given)
    assert_allclose(found.average_precision, arrays[f"{prefix}AP"], atol=1e-12)
    assert_allclose(found.inverse_penalty, arrays[f"{prefix}INP"], atol=1e-12)
    assert_array_equal(found.first_hit, arrays[f"{prefix}first_hit"])
    numbers = {"mAP": arrays[f"{prefix}mAP"], "mINP": arrays[f"{prefix}mINP"]}
    close(summary(found), by_cmc(arrays[f"{prefix}cmc"]) | numbers)


def test_drawn_galleries_give_the_expected_ranks(golden):
    scores, queries, gallery, arrays = evaluation_set(golden)
    few = first_hits(scores, queries, gallery, jax.random.key(0))
    many = first_hits(scores, queries, gallery, jax.random.key(1), draws=1500)
    assert few.shape == (14, 10)
    assert_array_equal(few[[9, 10, 11]], -1)  # nobody to be found
    is_valid = few[:, 0] >= 0
    cmc = lambda hits: np.array([(hits[is_valid] < k).mean() for k in range(1, 11)])
    exact, spread = arrays["cu_cmc_exact"], arrays["cu_cmc_sd_one_call"]
    assert (abs(cmc(few) - exact) <= 4 * spread + 1e-6).all()
    assert (abs(cmc(many) - exact) <= 4 * spread / np.sqrt(150) + 1e-6).all()
    each = [(many[is_valid] < k).mean(axis=1) for k in range(1, 11)]
    wanted = arrays["cu_cmc_exact_per_query"][is_valid].T
    assert_allclose(each, wanted, atol=5 * 0.5 / np.sqrt(1500))


def plain(scores, queries, gallery):
    """Average precision, penalty and first hit by the ranking itself."""
    rows = []
    for score, who, where in zip(scores, *queries, strict=True):
        order = np.argsort(-score, kind="stable")
        is_same = gallery.identities[order] == who
        is_junk = is_same & (gallery.cameras[order] == where)
        is_junk |= gallery.identities[order] == JUNK
        ranks = np.flatnonzero(is_same[~is_junk])
        if len(ranks):
            number = np.arange(1, len(ranks) + 1)
            penalty = len(ranks) / (ranks[-1] + 1)
            rows.append([(number / (ranks + 1)).mean(), penalty, ranks[0]])
        else:
            rows.append([np.nan, np.nan, -1])
    return np.array(rows).T


def crowd(rng, num, ids=9):
    return IdentityLabels(rng.integers(-1, ids, num), rng.integers(1, 4, num))


@pytest.mark.parametrize("block_size", [1, 700, 1 << 20])
def test_every_block_size_gives_what_a_plain_ranking_gives(monkeypatch, block_size):
    monkeypatch.setattr(retrieval, "CHUNK_SIZE", block_size)
    rng = np.random.default_rng(0)
    queries, gallery = crowd(rng, 37, ids=11), crowd(rng, 100)
    scores = rng.integers(0, 12, (37, 100)).astype(np.float32)  # many ties
    found = rank_gallery(lambda rows: jnp.asarray(scores[rows]), queries, gallery)
    wanted = plain(scores, queries, gallery)
    is_person = queries.identities != JUNK
    assert np.isnan(found.average_precision[~is_person]).all()
    for values, one in zip(found, wanted, strict=True):
        assert_allclose(values[is_person], one[is_person], atol=1e-12)


def test_junk_and_strangers_at_the_end_change_nothing():
    rng = np.random.default_rng(1)
    queries, gallery = crowd(rng, 20), crowd(rng, 60)
    features = rng.normal(size=(80, 8)).astype(np.float32)
    before = rank_gallery(cosines(features[:20], features[20:]), queries, gallery)
    nobody = IdentityLabels(np.full(5, JUNK), np.ones(5, int))
    more = IdentityLabels(*map(np.concatenate, zip(gallery, nobody, strict=True)))
    twice = np.concatenate([features[20:], features[:5]])  # junk that looks the same
    after = rank_gallery(cosines(features[:20], twice), queries, more)
    for one, other in zip(before, after, strict=True):
        assert_array_equal(one, other)


@pytest.mark.parametrize("k1, k2", [(20, 6), (6, 3)])
def test_re_ranking_is_the_released_codes(golden, k1, k2):
    arrays = golden("reid_more")
    queries, gallery = arrays["rr_query_feat"], arrays["rr_gallery_feat"]
    images = jnp.asarray(np.concatenate([queries, gallery]))
    near = nearest(images, k1).indices
    row, _ = expand(near, k1)
    assert_array_equal(np.bincount(row), arrays[f"rr_k{k1}_expanded_count"])
    scores = k_reciprocal_rerank(queries, gallery, k1=k1, k2=k2)
    wanted = arrays[f"rr_k{k1}_final_official"]
    assert_allclose(-np.asarray(scores(np.arange(20))), wanted, atol=2e-6)
    assert_allclose(-np.asarray(scores(np.array([7, 3]))), wanted[[7, 3]], atol=2e-6)


def expanded_sets(near, k1):
    """R* of each image by sets, as the released code has it: half is around(k1 / 2)."""

    def reciprocal(i, k):
        return {int(j) for j in near[i, : k + 1] if i in near[j, : k + 1]}

    found, half = [], int(np.around(k1 / 2))
    for i in range(len(near)):
        own = reciprocal(i, k1)
        theirs = [reciprocal(c, half) for c in own]
        added = [x for x in theirs if len(x & own) > 2 / 3 * len(x)]
        found.append(own.union(*added))
    return found


@pytest.mark.parametrize("k1", [3, 5, 7, 11])
def test_re_ranking_rounds_half_of_k1_as_the_released_code(k1):
    images = np.random.default_rng(k1).normal(size=(60, 3)).astype(np.float32)
    near = nearest(jnp.asarray(images), k1).indices
    row, column = expand(near, k1)
    found = [set(column[row == i].tolist()) for i in range(60)]
    assert found == expanded_sets(near, k1)


def test_re_ranking_in_small_blocks_or_by_distance_alone_is_the_same(monkeypatch):
    rng = np.random.default_rng(2)
    queries, gallery = rng.normal(size=(2, 8, 4)).astype(np.float32)
    rows = np.arange(8)
    whole = k_reciprocal_rerank(queries, gallery, k1=5, k2=2)(rows)
    monkeypatch.setattr(rerank, "CHUNK_SIZE", 64)
    assert_allclose(
        k_reciprocal_rerank(queries, gallery, k1=5, k2=2)(rows), whole, atol=1e-6
    )
    alone = k_reciprocal_rerank(queries, gallery, k1=5, k2=2, weight=1.0)(rows)
    plain = -((queries[:, None] - gallery[None]) ** 2).sum(-1)
    assert_array_equal(np.argsort(alone, axis=1), np.argsort(plain, axis=1))


def test_what_cannot_be_judged_is_refused():
    one = IdentityLabels(np.array([1]), np.array([2]))
    scores = lambda rows: jnp.zeros((len(rows), 1))
    with pytest.raises(ValueError, match="gallery image of its person.*none among 1"):
        rank_gallery(scores, one, one)
    with pytest.raises(ValueError, match="queries must be finite"):
        cosines(np.array([[np.nan]]), np.ones((1, 1)))
    with pytest.raises(ValueError, match="k1 . 1 <= 2 .the images.*got k1 = 20"):
        k_reciprocal_rerank(np.ones((1, 2)), np.ones((1, 2)))
