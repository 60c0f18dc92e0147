"""Cases of the studies: each is the config with its own clients, rows and seed."""

import numpy as np
import pytest

from fedfr_jax.config.files import find
from fedfr_jax.config.files import load as load_config
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source
from tests.experiments.scripts import load
from tests.tasks.reid.given import source_of


def test_a_case_of_fedreid_is_the_config_with_its_own_clients_rows_and_seed():
    cases = load("fedreid_tables/reid_cases")
    config = load_config(find("fedreid/tables"))
    made = {case: cases.config_of(config, case, seed=2) for case in cases.CASES}
    for case, one in made.items():
        assert set(one.methods) == set(cases.CASES[case])
        assert one.seed == one.partition.public.seed == 2 or case == cases.PRETRAINED
        rounds = one.federation.rounds
        assert {x.epochs for x in one.methods.values() if "kind" in x} <= {rounds}
    parts = made[cases.PARTS]
    assert parts.federation.rounds == 2 * config.federation.rounds
    assert made[cases.IDENTITY].partition.num_clients == 6
    assert made[cases.CENTER].model.neck == "bnneck"
    own = made[cases.OWN_STATISTICS]
    assert own.data == parts.data and own.evaluation.personalized_every_evaluation
    assert config.seed == 0 and config.model.get("neck") is None  # as it was


def test_parts_share_nobody_and_see_by_their_own_cameras(monkeypatch):
    market_parts = load("fedreid_tables/market_parts")
    people, cameras = (x.ravel() for x in np.indices((501, 7))[:, :, 1:])
    roles = np.where(people < 351, TRAIN, np.where(cameras % 2, QUERY, GALLERY))
    source = source_of(people, cameras, roles)
    monkeypatch.setitem(SOURCES, "market1501", lambda path, **_: source)
    seen, trained = [], []
    for of in market_parts.parts_of("there", (4, 2), seed=1)["sources"].values():
        made = market_parts.market_part(**{k: v for k, v in of.items() if k != "name"})
        assert set(made.cameras.tolist()) == set(of["cameras"])
        is_train = made.roles == TRAIN
        tested = {made.names[i] for i in made.labels[~is_train]}
        assert len(tested) == 75 and tested <= set(source.names[351:])
        seen.append((of["cameras"], tested))
        trained += [made.names[i] for i in set(made.labels[is_train].tolist())]
    assert sorted(trained) == sorted(source.names[:351])
    for cameras in market_parts.PAIRS.values():
        one, other = (tested for at, tested in seen if at == cameras)
        assert not one & other


def test_the_pretrained_cases_identities_are_apart_from_the_backbones():
    cases, backbone = (load(f"fedreid_tables/{x}") for x in ("reid_cases", "backbone"))
    config = load_config(find("fedreid/tables"))
    made = cases.config_of(config, cases.PRETRAINED, seed=2)
    central = backbone.backbone_config(made)
    intervals = [part.trained for part in made.data.sources.values()]
    intervals += [central.data.trained, made.partition.public.source.trained]
    taken = [number for first, end in intervals for number in range(first, end)]
    assert sorted(taken) == list(
        range(501 - load("fedreid_tables/market_parts").TESTED)
    )


def test_a_subset_has_as_many_training_images_of_each_class_and_all_tests(monkeypatch):
    class_subset = load("fedper_figures/class_subset").class_subset
    labels = np.repeat([0, 1, 2], [9, 5, 7]).astype(np.int32)
    is_test = np.arange(21) % 4 == 0  # 6, 4 and 5 train
    read = lambda rows: np.asarray(rows, np.uint8)[:, None, None, None]
    source = Source(read, labels, ("a", "b", "c"), (1, 1, 1), is_test=is_test)
    monkeypatch.setitem(SOURCES, "made", lambda: source)
    found = class_subset(4, of={"name": "made"}, seed=3)
    assert np.bincount(found.labels[~found.is_test]).tolist() == [4, 4, 4]
    rows = found.read(np.arange(len(found.labels)))[:, 0, 0, 0]
    np.testing.assert_array_equal(labels[rows], found.labels)
    with pytest.raises(ValueError, match="at most the 4 training images of class b"):
        class_subset(5, of={"name": "made"})
