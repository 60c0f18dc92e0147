"""Scenarios: who trains on what, what is tested, and what is refused."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fedfr_jax.cli.prepare import describe_source
from fedfr_jax.data.partition import PARTITIONS, ClientPartition
from fedfr_jax.data.partition.rows import ClientRows
from fedfr_jax.data.sources.selection import concat_sources
from fedfr_jax.parts import parse
from fedfr_jax.tasks.reid import data
from fedfr_jax.tasks.reid.data import format_report, report
from fedfr_jax.types import GALLERY, QUERY, TRAIN
from tests.tasks.reid.given import crossed, source_of

BY_CAMERA = {"name": "by_camera"}


def build_split(settings, source):
    config = parse(data.PartitionConfig, settings, "config.partition")
    return data.build_split(config, source)


def held(split, source):
    """Each client's (people, cameras), as sets."""
    rows = map(split.train.of, range(len(split.client_names)))
    return [
        (set(source.labels[of].tolist()), set(source.cameras[of].tolist()))
        for of in rows
    ]


def check(split, source):
    """Classes number each client's own people, rows are TRAIN and nobody's twice."""
    train = split.train
    assert (source.roles[train.rows] == TRAIN).all()
    assert len(np.unique(train.rows)) == len(train.rows) == train.offsets[-1]
    for client, labels in enumerate(np.split(train.labels, train.offsets[1:-1])):
        of = source.labels[train.of(client)]
        people, wanted = np.unique(of, return_inverse=True)
        assert_array_equal(labels, wanted)
        assert split.num_classes[client] == len(people)


def test_a_client_for_each_camera_shares_people_with_the_others():
    source = crossed()
    split = build_split(BY_CAMERA, source)
    check(split, source)
    everybody = set(range(6))
    assert held(split, source) == [(everybody, {camera}) for camera in (1, 2, 3)]
    assert split.client_names == ("camera 1", "camera 2", "camera 3")
    queries, gallery = split.tests["test"]
    assert (source.roles[queries] == QUERY).all() and len(queries) == 9
    assert (source.roles[gallery] == GALLERY).all() and len(gallery) == 9
    assert split.client_tests == (("test",),) * 3 and split.unseen == ()


def test_groups_of_cameras_may_be_of_unequal_size_and_leave_one_out():
    source = crossed(num_cameras=4)
    split = build_split({**BY_CAMERA, "camera_groups": [[4], [1, 3]]}, source)
    check(split, source)
    assert [cameras for _, cameras in held(split, source)] == [{4}, {1, 3}]
    assert report(split, source)["unassigned"] == 12  # of camera 2


def test_clients_by_identity_have_equal_numbers_of_people_and_share_none():
    source = crossed(num_train=8)
    splits = [
        build_split({"name": "by_identity", "num_clients": 3, "seed": seed}, source)
        for seed in (0, 0, 1)
    ]
    check(splits[0], source)
    people = [people for people, _ in held(splits[0], source)]
    assert [len(of) for of in people] == [2, 2, 2]
    assert len(set.union(*people)) == 6
    assert held(splits[0], source) == held(splits[1], source)
    assert held(splits[0], source) != held(splits[2], source)


def test_a_partition_of_examples_deals_a_re_identification_set_too(monkeypatch):
    source = crossed(num_train=8)
    split = build_split({"name": "iid", "num_clients": 3}, source)
    check(split, source)
    assert split.train.offsets[-1] == (source.roles == TRAIN).sum()  # tests are others
    assert split.client_names == ("client 0", "client 1", "client 2")

    def mine(labels, *, most: int):
        assert set(labels) == set(range(8))  # of the people to train on
        first, rest = np.flatnonzero(labels < most), np.flatnonzero(labels >= most)
        offsets, none = np.array([0, len(first), len(labels)]), np.zeros(0, np.int32)
        rows = np.append(first, rest)
        train = ClientRows(rows, offsets, labels[rows])
        return ClientPartition(train, ClientRows(none, offsets * 0, none), 8)

    monkeypatch.setitem(PARTITIONS, "mine", mine)
    split = build_split({"name": "mine", "most": 3}, source)
    check(split, source)
    assert [len(people) for people, _ in held(split, source)] == [3, 5]
    monkeypatch.setitem(PARTITIONS, "of faces", lambda labels: None)
    with pytest.raises(
        ValueError, match="must be a partition by class, got 'of faces'"
    ):
        build_split({"name": "of faces"}, source)


def three_sets():
    sets = {name: crossed(num_train=n) for name, n in (("a", 2), ("b", 5), ("c", 3))}
    return concat_sources(sets)


def test_a_client_for_each_data_set_is_tested_on_its_own():
    source = three_sets()
    split = build_split({"name": "by_dataset"}, source)
    check(split, source)
    assert split.client_names == ("a", "b", "c") == tuple(split.tests)
    assert split.num_classes.tolist() == [2, 5, 3]
    assert split.client_tests == (("a",), ("b",), ("c",))
    for name, test in split.tests.items():
        labels = source.labels[np.concatenate(test)]
        assert {source.names[label][0] for label in labels} == {name}


@pytest.mark.parametrize("left_out", ["b", ["b"]])
def test_a_data_set_that_is_left_out_is_only_tested(left_out):
    source = three_sets()
    split = build_split({"name": "by_dataset", "held_out_domains": left_out}, source)
    check(split, source)
    assert split.client_names == ("a", "c") and split.unseen == ("b",)
    assert tuple(split.tests) == ("a", "b", "c")
    people = set.union(*(people for people, _ in held(split, source)))
    assert {source.names[label][0] for label in people} == {"a", "c"}
    assert "b (no client trains on it): 9 queries" in format_report(
        report(split, source)
    )


def test_cameras_of_two_data_sets_are_different_clients():
    split = build_split(BY_CAMERA, three_sets())
    assert len(split.client_names) == 9 and split.client_names[3] == "b camera 1"


def test_people_of_several_data_sets_are_tested_on_all_of_them():
    source = three_sets()
    split = build_split({"name": "by_identity", "num_clients": 2}, source)
    check(split, source)
    for own, (people, _) in zip(split.client_tests, held(split, source), strict=True):
        assert set(own) == {source.names[person][0] for person in people}


def test_nobody_is_never_trained_on_asked_for_or_found():
    people, cameras = [0, 0, 1, 1, 2, 2, 2], [1, 2, 1, 2, 1, 2, 3]
    roles = [TRAIN, TRAIN, QUERY, GALLERY, TRAIN, GALLERY, QUERY]
    source = source_of(people, cameras, roles, names=("0002", "0007", "-1"))
    split = build_split(BY_CAMERA, source)
    assert split.train.rows.tolist() == [0, 1]
    assert [rows.tolist() for rows in split.tests["test"]] == [[2], [3]]


def test_the_report_counts_what_clients_hold_and_lost_queries():
    people = [0, 0, 0, 1, 1, 2, 2, 2]
    cameras = [1, 1, 2, 1, 2, 1, 2, 3]
    roles = [TRAIN] * 3 + [QUERY, GALLERY, QUERY, TRAIN, QUERY]
    source = source_of(people, cameras, roles)
    facts = report(build_split(BY_CAMERA, source), source)
    assert facts["table"] == {"train": [[2, 0], [0, 2]]}
    assert facts["identities"] == [1, 2] and facts["images"] == [2, 2]
    wanted = {
        "queries": 3,
        "gallery": 1,
        "identities": 2,
        "num_queries_without_match": 2,
    }
    assert facts["tests"] == {"test": wanted}
    assert "2 queries have no match" in format_report(facts)


def no_test(source):
    return source._replace(roles=np.zeros_like(source.roles))


def no_match(source):
    return source._replace(cameras=np.ones_like(source.cameras))


def only_tested(source):
    return source._replace(roles=np.where(source.labels < 5, GALLERY, source.roles))


@pytest.mark.parametrize(
    "settings, change, message",
    [
        (BY_CAMERA, lambda s: s._replace(roles=None), "got one without roles"),
        (BY_CAMERA, lambda s: s._replace(cameras=None), "got one without cameras"),
        (BY_CAMERA, no_test, "must have queries and a gallery .*test_identities"),
        (BY_CAMERA, no_match, "a must have a query with .* got none among 9"),
        ({"name": "by_dataset"}, only_tested, "got none for a .*held_out_domains"),
        ({"name": "by_cam"}, None, "partition.name must be one of .*'by_camera'"),
        (
            {"name": "by_dataset", "held_out_domains": "d"},
            None,
            "sets a, b, c, got 'd'",
        ),
        ({"name": "by_dataset", "held_out_domains": 3}, None, "list of texts, got 3"),
        (
            {"name": "by_dataset", "held_out_domains": "abc"},
            None,
            "sets a, b, c, got 'abc'",
        ),
        ({"name": "by_identity", "num_clients": 11}, None, "at most 10, .* got 11"),
        ({**BY_CAMERA, "camera_groups": [[1]]}, None, "of one data set .* of a, b, c"),
    ],
)
def test_what_is_no_scenario_is_refused(settings, change, message):
    source = three_sets()
    with pytest.raises(ValueError, match=message):
        build_split(settings, change(source) if change else source)


@pytest.mark.parametrize("groups", [[[1], [1, 2]], [[1], [7]], [[1], []]])
def test_groups_of_unknown_shared_or_no_cameras_are_refused(groups):
    with pytest.raises(ValueError, match="camera_groups must hold|none for cameras "):
        build_split({**BY_CAMERA, "camera_groups": groups}, crossed())


def test_prepare_tells_what_a_scenario_holds():
    facts, text = describe_source(BY_CAMERA, crossed())
    assert facts["clients"] == 3 and text.startswith("client ")
