"""`systems` of a config."""

import numpy as np
import pytest

from fedfr_jax.federated.settings import Federation, check_federation
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.sampling import Oort
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.parts import parse


def build_systems(settings):
    """Of two of four clients a round."""
    sections = {"systems": settings, "cohort_size": 2, "local_epochs": 1}
    federation = parse(Federation, sections, "config.federation")
    check_federation(federation, 4)
    return federation.systems.build(4)


def test_a_config_names_every_part(tmp_path):
    path = tmp_path / "there.csv"
    path.write_text("client,from,to\n0,0,5\n1,0,9\n2,1,9\n3,0,9\n")
    found = build_systems(
        {
            "dropout": {"after_training": 0.1},
            "profiles": {"name": "log_normal", "gflops": 2.0, "speed_sigma": 0.0},
            "availability": {"name": "csv", "path": str(path)},
            "over_selection": 1.5,
            "sampling": {"name": "oort", "exploration": 0.5},
        }
    )
    assert found.dropout == Dropout(0.0, 0.1) and found.sampling == Oort(0.5)
    np.testing.assert_allclose(found.profiles.flops, 2e9)
    assert found.availability.period == 9 and found.num_asked(2) == 3
    assert build_systems({}) == Systems()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadlines": 3.0}, "config.federation.systems .*'deadlines'.*deadline"),
        ({"deadline": 3.0}, "config.federation: systems.deadline needs systems.pro"),
        ({"profiles": {"name": "lognormal"}}, "profiles.name must be one of .*log_nor"),
        ({"dropout": {"before": 0.1}}, "systems.dropout must have keys of .*'before'"),
        ({"dropout": {"after_training": "no"}}, "dropout.after_training must be a"),
        ({"asynchronous": {"name": "fedbuff"}}, "needs the key concurrency"),
    ],
)
def test_a_wrong_key_or_value_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_systems(settings)
