"""FedPer's figures on rows that are made up: verdicts, files and resumption."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedper_figures"
sys.path[:0] = map(str, (FOLDER, FOLDER.parent, FOLDER.parent / "fedfr_tables"))

import cases  # noqa: E402
import class_subset  # noqa: E402
import findings  # noqa: E402

from fedfr_jax.config.files import find, load  # noqa: E402
from fedfr_jax.types import Source  # noqa: E402


def load_script():
    """run.py, under a name that no other experiment's has."""
    spec = importlib.util.spec_from_file_location("fedper_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_script()


def row(accuracy, width=0.0, clients=10):
    """A row whose clients lie evenly around a mean accuracy."""
    of_client = accuracy + np.linspace(-width, width, clients)
    return {
        "made": "2026-01-01, commit abc",
        "settings": {},
        "personalized": {"accuracy": accuracy},
        "of_client": of_client.tolist(),
        "of_round": [accuracy / 2, accuracy],
        "cost": {"seconds": 2.0, "core_seconds": 3.0},
    }


def results_of(change=()):
    """All cases of three seeds as the paper would have them, but for `change`."""
    results = {}
    for case, rows in cases.CASES.items():
        parts = cases.parts_of(case)
        few = {4: 1.0, 40: 1.0, 8: 0.5, 80: 0.5}.get(parts.k, 0.0)
        found = {name: row(0.4 + 0.2 * few, 0.05) for name in rows}
        if "fedavg" in found:
            found["fedavg"] = row(0.4, 0.06 + 0.1 * few)
        for name, accuracy in (("finetune", 0.62), ("local", 0.3)):
            if name in found:
                found[name] = row(accuracy, 0.05)
        if parts.network.startswith("linear"):
            found = {name: row(0.35, 0.05) for name in rows}
        if parts.unseen:
            told = {"finetuned": [0.7, 0.8], "unseen": [0.1], "unseen_finetuned": [0.5]}
            found = {name: {**x, **told} for name, x in found.items()}
        results[case] = {str(seed): {**found} for seed in range(3)}
    for case, seed, name, accuracy in change:
        results[case][seed][name] = row(accuracy, 0.05)
    return results


def verdicts(results):
    return {
        (text, case): cells[-1]
        for text, case, *cells in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in findings.findings_table(results).splitlines()[2:]
        )
    }


def test_the_papers_own_findings_hold_where_its_numbers_do():
    found = verdicts(results_of())
    assert set(found.values()) == {"yes"}
    asked = {text for text, _ in found}
    assert len(asked) == 11  # two of them name a k
    few = "cifar100 resnet k=40"
    for text in ("K_P = 4 beats FedAvg", "fine-tuning helps", "a linear base is worse"):
        assert (text, few) in found
    assert ("the gap narrows to k = 100", few) in found
    assert ("FedPer beats FedAvg", "cifar10 resnet k=10") not in found
    assert ("a linear base is worse", f"{few} r=40") in found
    assert ("the gap narrows to k = 100", f"{few} r=40") not in found  # of 10 rounds
    assert not [case for _, case in found if "unseen" in case]


def test_one_seed_against_makes_a_finding_unclear_and_all_make_it_fail():
    case = "cifar10 resnet k=4"
    once = results_of([(case, "1", "local", 0.7)])
    assert verdicts(once)["training alone is weaker", case] == "unclear"
    always = results_of([(case, str(s), "local", 0.7) for s in range(3)])
    assert verdicts(always)["training alone is weaker", case] == "no"
    assert verdicts(always)["training alone is weaker", "cifar100 resnet k=40"] == "yes"


def test_clients_that_no_round_has_seen_have_a_table_of_their_own():
    (told,) = [x for x in findings.text(results_of()).split("\n\n") if "never" in x]
    line = "| cifar10 resnet k=4 unseen=5 | fedper_2 | 60.0 ± 0.0 | 75.0 ± 0.0 "
    assert f"{line}| 10.0 ± 0.0 | 50.0 ± 0.0 |" in told
    assert "r=40" not in told and len(told.splitlines()) == 2 + 4
    begun = {"cifar10 resnet k=8": results_of()["cifar10 resnet k=8"]}
    assert "never seen" not in findings.text(begun)


def test_chance_is_told_by_the_signs_of_the_clients():
    exact = (1 + 20_000 / 2**6) / 20_001  # all six of one sign, one in 64
    assert findings.p_value(np.full(6, 0.1)) == pytest.approx(exact, rel=0.1)
    mixed = np.array([0.1, -0.1] * 15)
    assert 0.4 < findings.p_value(mixed) < 0.7
    assert findings.p_value(-np.full(6, 0.1)) == 1


def test_seeds_that_some_cases_lack_are_compared_with_none_of_theirs():
    results = results_of()
    del results["cifar10 resnet k=10"]["2"]
    del results["cifar100 resnet k=40"]["2"]["local"]
    found = verdicts(results)
    assert ("the gap narrows to k = 10", "cifar10 resnet k=4") not in found
    assert ("training alone is weaker", "cifar100 resnet k=40") not in found
    text = findings.text(results)
    assert "| cifar10 resnet k=10 | fedavg | 40.0 ± 0.0 |" in text


def test_the_tables_of_the_page_are_those_of_the_results():
    found = json.loads((FOLDER / "results.json").read_text())
    results = {case: found[case]["seeds"] for case in cases.CASES if case in found}
    text = findings.text(results)
    page = (FOLDER / "RESULTS.md").read_text()
    assert f"<!-- results -->\n{text}\n<!-- /results -->" in page


@pytest.mark.parametrize("case", cases.CASES)
def test_a_case_is_the_config_with_its_own_data_network_and_classes(case):
    config = load(find("fedper/figures"))
    made = cases.config_of(config, case, seed=2)
    parts = cases.parts_of(case)
    whole = made.data.of if parts.n else made.data
    assert whole.name == parts.data and made.seed == made.partition.seed == 2
    assert made.data.get("per_class", 0) == parts.n
    assert made.federation.get("flip_probability") == (
        0.0 if parts.data == "mnist" else None
    )
    assert made.partition.classes_per_client == parts.k
    assert made.partition.num_clients - made.partition.get("unseen_clients", 0) == 10
    assert made.partition.get("unseen_clients", 0) == parts.unseen
    assert ("finetune" in made.evaluation) == bool(parts.unseen)
    assert made.federation.rounds == (40 if "r=40" in case else 10)
    assert made.model.to_dict() == cases.NETWORKS[parts.network]
    assert set(made.methods) == set(cases.CASES[case])
    assert config.seed == 0 and len(config.methods) == 8  # as it was


def test_a_subset_has_as_many_training_images_of_each_class_and_all_tests(monkeypatch):
    labels = np.repeat([0, 1, 2], [9, 5, 7]).astype(np.int32)
    is_test = np.arange(21) % 4 == 0  # 6, 4 and 5 train
    read = lambda rows: np.asarray(rows, np.uint8)[:, None, None, None]
    source = Source(read, labels, ("a", "b", "c"), (1, 1, 1), is_test=is_test)
    monkeypatch.setitem(class_subset.SOURCES, "made", lambda: source)
    found = class_subset.class_subset(4, of={"name": "made"}, seed=3)
    assert np.bincount(found.labels[~found.is_test]).tolist() == [4, 4, 4]
    rows = found.read(np.arange(len(found.labels)))[:, 0, 0, 0]
    np.testing.assert_array_equal(labels[rows], found.labels)
    assert rows[found.is_test].tolist() == np.flatnonzero(is_test).tolist()
    with pytest.raises(ValueError, match="at most the 4 training images of class b"):
        class_subset.class_subset(5, of={"name": "made"})
