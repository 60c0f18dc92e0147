"""The page of retrieval results: what is framed how, and what is not on it."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import identity
from fedfr_jax.evaluation.retrieval import IdentityLabels
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import parse
from fedfr_jax.runs.report.drawing import LINE, draw_grid
from fedfr_jax.tasks.reid.data import PartitionConfig, build_split
from fedfr_jax.tasks.reid.evaluator import (
    QUERY,
    RIGHT,
    WRONG,
    EvaluationConfig,
    ReidEvaluator,
    build_evaluation_set,
    results,
    retrieval_sheets,
)
from fedfr_jax.types import TrainedModels
from tests.tasks.reid.given import crossed


def test_junk_is_left_out_and_the_first_match_is_told():
    people = IdentityLabels(np.array([4, 9]), np.array([1, 1]))
    gallery = IdentityLabels(np.array([4, -1, 5, 4, 6]), np.array([1, 2, 1, 2, 2]))
    features = np.array([[1, 0.1 * i] for i in range(5)], np.float32)
    queries = np.array([[1, 0], [1, 0]], np.float32)
    (found,) = results(queries, features, people, gallery, count=5)  # 9 is not there
    assert (found.query, found.first_hit) == (0, 1)
    assert found.nearest.tolist() == [2, 3, 4]
    assert found.is_right.tolist() == [False, True, False]


@pytest.mark.parametrize("memory", [None, 2**12])
@pytest.mark.parametrize("has_one", [True, False])
def test_a_page_frames_right_and_wrong(has_one, memory):
    source = crossed()
    judged = build_evaluation_set(
        source,
        build_split(parse(PartitionConfig, {"name": "by_camera"}), source),
        memory,
    )
    judge = ReidEvaluator(judged, make_mesh(1), EvaluationConfig(), plain=identity())
    person = lambda x: (x[:, 0, 0, :1] + x[:, 0, -1, :1]).astype(jnp.float32) / 20
    embed = lambda _, x: jnp.concatenate([jnp.cos(person(x)), jnp.sin(person(x))], 1)
    one = jnp.int32(0) if has_one else None
    networks = TrainedModels(one, embed, lambda client: jnp.int32(client), embed)
    evaluator = retrieval_sheets(judge, judged, source.names, 2)
    (grid,) = evaluator.evaluate(networks).image_grids.values()
    assert not evaluator.during_training
    # A gallery of 9: 2 right and 6 wrong images remain beside each of the 2 queries.
    assert [*grid.images] == [*grid.captions] == ["query", *map(str, range(1, 9))]
    frames = np.stack([*grid.images.values()], axis=1)[:, :, 0, 0]
    for color, number in ((QUERY, 2), (RIGHT, 4), (WRONG, 12)):
        assert (frames == np.array(color)).all(axis=-1).sum() == number
    assert (frames[:, 0] == QUERY).all()
    assert (
        "camera" in grid.captions["1"][0] and "first match" in grid.captions["query"][0]
    )
    bare, drawn = (draw_grid(x, {}) for x in (grid._replace(captions={}), grid))
    assert drawn.shape[0] == bare.shape[0] + 2 * 3 * LINE  # of the query's three lines
    assert (drawn == 30).all(axis=-1).sum() > (bare == 30).all(axis=-1).sum() + 100
