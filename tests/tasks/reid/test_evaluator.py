"""Whose network is evaluated on what, and what settings change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import identity
from fedfr_jax.data.sources.selection import concat_sources
from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    cosines,
    rank_gallery,
    summary,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import parse
from fedfr_jax.tasks.reid.data import PartitionConfig, build_split
from fedfr_jax.tasks.reid.evaluator import (
    EvaluationConfig,
    ReidEvaluator,
    build_evaluation_set,
)
from fedfr_jax.types import GALLERY, QUERY, TRAIN, TrainedModels
from tests.tasks.reid.given import crossed, source_of

BY_CAMERA, BY_DATASET = {"name": "by_camera"}, {"name": "by_dataset"}


def evaluator_of(source, settings=BY_CAMERA, *, devices=1, memory=None, **options):
    evaluating = parse(
        EvaluationConfig, {"batch_size": 4, **options}, "config.evaluation"
    )
    images = build_evaluation_set(
        source, build_split(parse(PartitionConfig, settings), source), memory
    )
    return ReidEvaluator(images, make_mesh(devices), evaluating, plain=identity())


def sees(what, x):
    """Features of what a first or mirrored pixel tells: the person (0), the camera (1).

    Who looks at people finds everybody, who looks at cameras few.
    """
    pixel = x[:, 0, 0].astype(jnp.float32) + x[:, 0, -1].astype(jnp.float32)
    angle = jax.lax.dynamic_index_in_dim(pixel, what, axis=1, keepdims=False) / 20
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def networks(of_client, generic=0):
    own = None if of_client is None else lambda client: jnp.int32(of_client[client])
    one = None if generic is None else jnp.int32(generic)
    return TrainedModels(one, sees, own, sees)


ALL = {name: 1.0 for name in ("rank1", "rank5", "rank10", "mAP", "mINP")}


def test_who_sees_people_finds_all_and_who_sees_cameras_does_not():
    evaluator = evaluator_of(crossed())
    assert evaluator.generic(networks(None)).metrics == pytest.approx(ALL)
    lost = evaluator.generic(networks(None, generic=1)).metrics
    assert lost["rank1"] < 0.5 and lost["mAP"] < 0.8
    assert evaluator.generic(networks(None, generic=None)).metrics == {}


def test_clients_are_judged_by_their_own_networks():
    evaluator = evaluator_of(crossed())
    found = evaluator.personalized(networks([0, 1, 0]))
    lost = evaluator.generic(networks(None, generic=1)).metrics
    wanted = [1, lost["mAP"], 1]
    np.testing.assert_allclose(found.per_client["mAP"], wanted, atol=1e-6)
    assert found.metrics["mAP"] == pytest.approx(np.mean(wanted))
    assert found.metrics["mAP_min"] == pytest.approx(lost["mAP"])
    assert found.metrics["mAP_max"] == found.metrics["rank1_max"] == 1
    shared = evaluator.personalized(networks(None, generic=1))
    np.testing.assert_allclose(shared.per_client["mAP"], [lost["mAP"]] * 3)
    assert not {"mAP_min", "mAP_max"} & shared.metrics.keys()  # all have one number


def three_sets():
    """Of which nobody is tested on c."""
    sets = {"a": crossed(2), "b": crossed(5, num_cameras=4), "c": crossed(3)}
    roles = np.where(sets["c"].roles == QUERY, GALLERY, sets["c"].roles)
    sets["c"] = sets["c"]._replace(roles=roles)
    return concat_sources(sets)


def test_a_clients_test_is_that_of_its_data_set_and_there_may_be_none():
    evaluator = evaluator_of(three_sets(), BY_DATASET)
    found = evaluator.personalized(networks([1, 0, None]))
    each = evaluator.generic(networks(None, generic=1)).metrics
    wanted = [each["a_mAP"], 1, np.nan]
    np.testing.assert_allclose(found.per_client["mAP"], wanted, atol=1e-6)
    assert found.metrics["mAP"] == pytest.approx((1 + each["a_mAP"]) / 2)


def test_domains_have_their_own_numbers_and_unseen_ones_another_mean():
    source = three_sets()
    every = evaluator_of(source, BY_DATASET).generic(networks(None, generic=1)).metrics
    assert every["mAP"] == pytest.approx((every["a_mAP"] + every["b_mAP"]) / 2)
    assert not [key for key in every if key.startswith("unseen")]
    settings = {**BY_DATASET, "held_out_domains": "b"}
    found = evaluator_of(source, settings).generic(networks(None, generic=1)).metrics
    assert found["unseen_mAP"] == found["b_mAP"] == every["b_mAP"]
    assert found["mAP"] == found["a_mAP"] == every["a_mAP"] != every["b_mAP"]


@pytest.mark.parametrize("layout", [{}, {"devices": 4}, {"memory": 2**12}], ids=str)
def test_features_of_images_and_mirror_images_are_added(layout):
    source = crossed(num_test=5)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(24, 6)).astype(np.float32)
    images = rng.integers(0, 256, (len(source.labels), 4, 2, 3)).astype(np.uint8)
    source = source._replace(read=lambda rows: images[rows])
    embed = lambda w, x: jnp.tanh(x.reshape(len(x), -1).astype(jnp.float32) / 256 @ w)
    found = evaluator_of(source, **layout).generic(
        TrainedModels(weights, embed, None, embed)
    )
    plain = lambda x: np.tanh(x.reshape(len(x), -1).astype(np.float32) / 256 @ weights)
    features = plain(images) + plain(images[:, :, ::-1])
    parts = [np.flatnonzero(source.roles == role) for role in (QUERY, GALLERY)]
    people = [
        IdentityLabels(source.labels[rows], source.cameras[rows]) for rows in parts
    ]
    scores = cosines(*(features[rows] for rows in parts))
    assert found.metrics == pytest.approx(
        summary(rank_gallery(scores, *people)), abs=1e-5
    )


def test_settings_reach_the_protocol():
    people, cameras = [0, 1, 1, 1, 2, 2, 2], [1, 1, 12, 3, 1, 2, 20]
    roles = [TRAIN, QUERY, GALLERY, GALLERY, QUERY, GALLERY, GALLERY]
    source = source_of(people, cameras, roles)
    value = lambda **options: evaluator_of(source, **options).generic(networks(None, 1))
    usual = value().metrics
    # Images are ranked by their cameras: 2, 3, 12, 20.
    assert usual["mINP"] == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert value(average_precision="official").metrics["mAP"] < usual["mAP"]
    cut = value(single_digit_camera=True).metrics
    assert cut["mINP"] == pytest.approx((1 / 2 + 2 / 4) / 2)  # 12 is taken for 1
    assert set(value(ranks=(2,)).metrics) == {"rank2", "mAP", "mINP"}
    drawn = value(single_gallery_shot_trials=7).metrics
    assert drawn["mAP"] == usual["mAP"] and drawn["rank1"] != usual["rank1"]
    ranked = value(rerank={"k1": 3, "k2": 1}).metrics
    assert set(ranked) == set(usual)
    missing = source._replace(labels=np.where(np.arange(7) == 4, 0, source.labels))
    by = lambda how: (
        evaluator_of(missing, average_over=how).generic(networks(None)).metrics
    )
    assert by("all")["rank1"] == by("valid")["rank1"] / 2


def test_re_ranking_needs_enough_images():
    words = "config.evaluation.rerank: .*18 .the images.*k1 = 99"
    with pytest.raises(ValueError, match=words):
        evaluator_of(crossed(), rerank={"k1": 99})
