"""Black images that stand in for a set of their counts."""

import numpy as np
import pytest

from fedfr_jax.data.sources import open_source
from fedfr_jax.types import GALLERY, QUERY, TRAIN


def test_a_blank_set_has_the_counts_that_were_asked_for():
    source = open_source(
        "fake_data", num_identities=5, images_per_identity=3, image_size=8
    )
    np.testing.assert_array_equal(np.bincount(source.labels), 3)
    images = source.read(np.arange(4))
    assert images.shape == (4, 8, 8, 3) and not images.any()
    assert len(source.names) == 5 and source.roles is None and source.masks is None


def test_of_a_blank_set_for_re_identification_another_camera_answers_a_query():
    options = {"num_cameras": 2, "test_identities": 2, "image_size": (8, 4)}
    source = open_source(
        "fake_data", num_identities=6, images_per_identity=4, **options
    )
    assert (source.roles == TRAIN).sum() == 16
    for query in np.flatnonzero(source.roles == QUERY):
        same = source.labels == source.labels[query]
        other = source.cameras != source.cameras[query]
        assert (same & other & (source.roles == GALLERY)).any()


def test_a_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="num_identities must be .*got 0"):
        open_source("fake_data", num_identities=0)
