"""Judging on a search: ranks of mates among distractors, as all scores have them."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.io import savemat

from tests.tasks.faces.evaluation_files import (
    SMALL,
    evaluator_of,
    looked_up,
    numbered,
    png,
)


def write_search(path, listed):
    """TinyFace's layout: 4 probes, 4 mates and 6 distractors, by number 0 to 13."""
    folders = {"Probe": range(4), "Gallery_Match": range(4, 8)}
    folders["Gallery_Distractor"] = range(8, 14)
    for where, numbers in folders.items():
        (path / where).mkdir(parents=True)
        for i in numbers:
            person = i if where == "Gallery_Distractor" else i % 4
            name = f"{i:02}.png" if listed else f"{person}_{i:02}.png"
            (path / where / name).write_bytes(png(numbered([i])[0]))
    if listed:
        for kind, file, numbers in (
            ("probe", "probe", range(4)),
            ("gallery", "gallery_match", range(4, 8)),
        ):
            names = np.array([[f"{i:02}.png"] for i in numbers], dtype=object)
            ids = np.array([[i % 4] for i in numbers])
            content = {f"{kind}_set": names, f"{kind}_ids": ids}
            savemat(path / f"{file}_img_ID_pairs.mat", content)


@pytest.mark.parametrize("listed", [True, False])
def test_search_among_mates_and_distractors_ranks_by_all_scores(task, tmp_path, listed):
    write_search(tmp_path, listed)
    rng = np.random.default_rng(2)
    features = rng.normal(size=(14, 4)).astype(np.float32)
    features[4:8] += 0.3 * features[:4]
    evaluator = evaluator_of(task, 1, identification=str(tmp_path), **SMALL)
    evaluation = evaluator.generic(looked_up, jnp.asarray(features[None])).metrics
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    scores = unit[:4] @ unit[4:].T
    ahead = (scores > np.diag(scores)[:, None]).sum(1)
    assert 0 < (ahead < 1).mean() < 1
    for k in (1, 5, 10, 20):
        assert evaluation[f"identification_rank{k}"] == (ahead < k).mean()
    (tmp_path / "Gallery_Match" / ("06.png" if listed else "2_06.png")).unlink()
    message = "have every listed image" if listed else "a mate for every probe"
    with pytest.raises(ValueError, match=message):
        evaluator_of(task, 1, identification=str(tmp_path), **SMALL)


def test_a_list_that_names_an_image_twice_is_refused(task, tmp_path):
    write_search(tmp_path, listed=True)
    names = np.array([["00.png"], ["01.png"], ["00.png"]], dtype=object)
    content = {"probe_set": names, "probe_ids": np.array([[0], [1], [2]])}
    savemat(tmp_path / "probe_img_ID_pairs.mat", content)
    message = "probe_img_ID_pairs.mat must list each image once, got 00.png twice"
    with pytest.raises(ValueError, match=message):
        evaluator_of(task, 1, identification=str(tmp_path), **SMALL)
