"""The tables' scripts on rows that are made up: resumption, verdicts, files."""

import json
import pathlib
import runpy
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedfr_tables"
sys.path[:0] = map(str, (FOLDER, FOLDER.parent))

import orderings  # noqa: E402
import run  # noqa: E402
import summary  # noqa: E402

from fedfr_jax.runs import stages  # noqa: E402
from fedfr_jax.runs.workdir import claim  # noqa: E402
from fedfr_jax.types import Evaluation, Experiment, Stage  # noqa: E402

CLIENT = {"round": 0, "client": [1, 0], "added_examples": [4, 8], "steps": [2, 4]}


def row(generic=0.5, personalized=0.5, made="2026-01-01, commit abc", **cost):
    return {
        "made": made,
        "settings": None,
        "generic": {"tar@far=1e-02": generic, "accuracy": 0.9},
        "personalized": {"tar@far=1e-02": personalized},
        "roc": [[0.1, 1.0], [0.5, 1.0]],
        "cost": {"seconds": 9.0, "core_seconds": 3.0, **cost},
    }


def runs_of(**rates):
    """{row: personalized rate of each seed} as three seeds' runs."""
    return {
        str(s): {name: row(personalized=x[s]) for name, x in rates.items()}
        for s in range(3)
    }


@pytest.mark.parametrize(
    "gain, holds",
    [
        ((0.1, 0.12, 0.11), "yes"),
        ((-0.1, -0.12, -0.1), "no"),
        ((0.1, 0.2, -0.001), "unclear"),
        ((0.1, 0.2, 0.001), "unclear"),  # one sign, and yet by chance
    ],
)
def test_an_ordering_holds_only_when_a_paired_test_says_so(gain, holds):
    assert orderings.verdict(np.array(gain)) == holds
    runs = runs_of(
        pretrained=(0.5, 0.5, 0.5), fedavg=[0.5 + g for g in gain], moon=(0, 0, 0)
    )
    lines = orderings.claims(runs).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert cells[0][1] == "FedAvg helps personalized"
    assert cells[0][3] == "fedavg - pretrained"
    assert cells[0][4] == ", ".join(f"{100 * g:+.1f}" for g in gain)
    assert cells[0][6] == holds
    t = np.mean(gain) / (np.std(gain, ddof=1) / np.sqrt(3))  # two degrees of freedom
    tail = 1 - abs(t) / np.sqrt(2 + t**2)
    assert float(cells[0][5]) == pytest.approx(tail, abs=6e-5)


def test_one_seed_has_no_chance_to_speak_of():
    one = {"0": runs_of(pretrained=(0.5,) * 3, fedavg=(0.9,) * 3)["0"]}
    assert orderings.claims(one).splitlines()[2].endswith("| +40.0 | - | unclear |")


def test_the_branch_leaves_generic_as_it_is_within_a_point():
    runs = runs_of(fedfr=(0.9, 0.9, 0.9), contrastive=(0.5, 0.5, 0.5))
    for change, holds in ((0.005, "yes"), (-0.005, "yes"), (0.02, "no")):
        for rows in runs.values():
            rows["fedfr"] = row(generic=0.5 + change, personalized=0.9)
        assert orderings.claims(runs).splitlines()[-1].endswith(f"| {holds} |")


def test_the_deviation_over_seeds_is_that_of_a_sample():
    text = orderings.table(runs_of(fedavg=(0.1, 0.2, 0.3)))
    assert "| 20.0 ± 10.0 |" in text.splitlines()[-1]
    cost = {"hard_negatives": 7.0, "images": 19.0, "steps": 5.0}
    one = {"0": {"fedavg": row(personalized=0.2, **cost)}}
    assert "| 20.0 | 7 | 19 | 5 | 3 |" in orderings.table(one).splitlines()[-1]


def test_results_keep_other_tables_and_lists_in_one_line(tmp_path):
    path = tmp_path / "results.json"
    orderings.write_results(path, "faces", {"0": {"fedavg": row(of_client=[1.0, 2.0])}})
    orderings.write_results(path, "omniglot", {"0": {}}, counted={"0.5": 3.0})
    assert '"of_client": [ 1.0, 2.0 ]' in path.read_text()
    found = json.loads(path.read_text())
    assert set(found) == {"faces", "omniglot"}
    assert "roc" not in found["faces"]["seeds"]["0"]["fedavg"]
    assert found["omniglot"]["counted"] == {"0.5": 3.0}
    assert found["faces"]["made"] == "2026-01-01, commit abc"


def test_rows_that_are_not_run_again_stay(tmp_path):
    path = tmp_path / "results.json"
    both = {s: {"fedavg": row(), "fedfr": row()} for s in ("0", "1")}
    orderings.write_results(path, "faces", both)
    again = {"0": {"fedfr": row(generic=0.9)}}
    kept = orderings.write_results(path, "faces", again)
    assert kept == json.loads(path.read_text())["faces"]["seeds"]
    rates = {s: kept[s]["fedfr"]["generic"] for s in kept}
    assert rates["0"] == row(generic=0.9)["generic"] != rates["1"]
    assert set(kept["0"]) == {"fedavg", "fedfr"}


def test_a_table_names_every_commit_that_its_rows_ran_on():
    old, new = row(made="2026-01-01, commit abc"), row(made="2026-01-02, commit def")
    runs = {"0": {"fedavg": old, "fedfr": new}, "1": {"fedavg": old}}
    assert orderings.made(runs) == "2026-01-01, commit abc; 2026-01-02, commit def"


def test_a_part_of_the_readme_is_replaced_between_its_markers(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("top\n<!-- faces -->\nold\n<!-- /faces -->\nbottom\n")
    orderings.write_between(path, "faces", "new")
    orderings.write_between(path, "omniglot", "more")
    text = path.read_text()
    assert text.startswith("top\n<!-- faces -->\nnew\n<!-- /faces -->\nbottom\n")
    assert text.endswith("<!-- omniglot -->\nmore\n<!-- /omniglot -->\n")


@pytest.fixture
def rows_played(monkeypatch):
    """Stages that only count: a row's folder lists who wrote into it."""
    played = []

    def run_one(experiment, trainer, before, folder, *others):
        del experiment, before, others
        if folder.name == "pretrained":
            return None, judgment()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rounds.txt").open("a") as file:
            file.write(f"{folder.name}\n")
        (folder / "clients.jsonl").write_text(json.dumps(CLIENT) + "\n")
        played.append(folder.name)
        if trainer == "killed":
            raise KeyboardInterrupt
        return None, judgment()

    def judgment():
        roc = {"roc": np.ones((2, 3))}
        generic = Evaluation({"tar@far=1e-02": 0.5}, curves=roc)
        own = Evaluation({"tar@far=1e-02": 0.5})
        return {"generic": generic, "personalized": own}

    monkeypatch.setattr(
        "fedfr_jax.config.build.build", lambda config: built(*config.methods)
    )
    monkeypatch.setattr(stages, "run_federated", run_one)
    return played


def built(*names, **trainers):
    """An experiment of rows that only count."""
    made = {name: Stage(trainers.get(name), "pretrained") for name in names}
    training = SimpleNamespace(epochs=2, batch_size=4)
    pretraining = SimpleNamespace(settings=training, num_rows=10)
    stages = {"pretrained": Stage(pretraining), **made}
    population = SimpleNamespace(offsets=np.array([0, 10, 30]))
    task = SimpleNamespace(population=population)
    return Experiment(task, stages, None, None, None, 0)


def config_of(**methods):
    return ConfigDict({"seed": 0, "methods": methods})


def test_an_adapted_row_goes_on_from_a_copy_and_no_row_is_played_twice(
    tmp_path, rows_played
):
    config = config_of(contrastive={"a": 1}, finetune={"a": 2}, distill={"a": 3})
    run.run_seed(config, 0, tmp_path, ["contrastive"])
    # A copy that a kill has interrupted.
    (tmp_path / "finetune.part").mkdir()
    (tmp_path / "finetune.part" / "rounds.txt").write_text("torn")
    run.run_seed(config, 0, tmp_path, ["contrastive", "finetune"])
    assert (tmp_path / "finetune" / "rounds.txt").read_text() == (
        "contrastive\nfinetune\n"
    )
    assert (tmp_path / "contrastive" / "rounds.txt").read_text() == "contrastive\n"
    names = ["pretrained", "contrastive", "finetune", "distill"]
    rows = run.run_seed(config, 0, tmp_path, names)
    assert rows_played == ["contrastive", "finetune", "distill"]
    assert list(rows) == names
    costs = [rows[name]["cost"] for name in ("pretrained", "contrastive")]
    assert [(c["images"], c["steps"]) for c in costs] == [(10, 6), (15 + 6, 3)]


def test_a_killed_adapted_row_keeps_its_copy(tmp_path, rows_played, monkeypatch):
    config = config_of(contrastive={}, distill={})
    killed = built("contrastive", "distill", distill="killed")
    with monkeypatch.context() as patch:
        patch.setattr("fedfr_jax.config.build.build", lambda config: killed)
        with pytest.raises(KeyboardInterrupt):
            run.run_seed(config, 0, tmp_path, ["contrastive", "distill"])
    run.run_seed(config, 0, tmp_path, ["contrastive", "distill"])
    assert rows_played == ["contrastive", "distill", "distill"]
    text = (tmp_path / "distill" / "rounds.txt").read_text()
    assert text == "contrastive\ndistill\ndistill\n"


def test_a_row_of_other_settings_is_refused_by_name(tmp_path, rows_played):
    run.run_seed(config_of(fedavg={"rate": 1}), 0, tmp_path, ["fedavg"])
    run.run_seed(config_of(moon={"rate": 2}), 0, tmp_path, ["moon"])
    with pytest.raises(ValueError, match="settings of fedavg must be those"):
        run.run_seed(config_of(fedavg={"rate": 2}), 0, tmp_path, ["fedavg"])
    # Begun, not finished.
    shutil.move(tmp_path / "rows.json", tmp_path / "gone.json")
    with pytest.raises(ValueError, match="rate 1 there and 2 here"):
        run.run_seed(config_of(fedavg={"rate": 2}), 0, tmp_path, ["fedavg"])
    with pytest.raises(ValueError, match="got seed 0 there and 1 here"):
        run.run_seed(config_of(), 1, tmp_path, ["pretrained"])
    with claim(tmp_path, json.dumps({"seed": 0}), but_for="methods"):
        pass  # the lock is free again


def test_hard_negatives_are_kept_by_client_and_by_round(tmp_path):
    second = {"round": 1, "client": [0, 1], "added_examples": [10, 2]}
    adapted = {"round": 2, "client": [0, 1], "added_examples": [0, 0]}
    lines = [json.dumps(x) + "\n" for x in (CLIENT, second, adapted)]
    (tmp_path / "clients.jsonl").write_text("".join(lines))
    assert run.chosen(tmp_path) == {
        "hard_negatives": 6.0,
        "of_round": [6.0, 6.0],
        "of_client": [9.0, 3.0],
    }
    assert run.chosen(tmp_path / "pretrained") == {}


def test_the_front_page_says_which_leads_are_significant():
    rows = {"fedfr": (0.5, 0.6, 0.7), "local": (0.4, 0.51, 0.59), "fedavg": (0.6,) * 3}
    runs = {}
    for row, values in rows.items():
        for seed, value in enumerate(values):
            metrics = {"tar@far=1e-02": value}
            kept = {"generic": metrics, "personalized": metrics}
            runs.setdefault(str(seed), {})[row] = kept
    assert summary.leads(runs) == "local +10.0*, fedavg +0.0"
    assert summary.leads({"0": runs["0"]}) == "local +10.0, fedavg -10.0"


def test_the_readme_names_what_beats_fedfr_and_is_bold_beyond_a_deviation():
    of_row = {row: (0.5, 0.52, 0.51) for row in summary.SHOWN}
    of_row["fedfr"] = (0.6, 0.64, 0.62)
    runs = runs_of(**of_row, central=(0.7, 0.7, 0.7), moon=(0.5, 0.5, 0.5))
    cells = summary.line(runs, "personalized", "tar@far=1e-02").split(" | ")
    assert cells[1] == "51.0 ± 1.0" and cells[5:] == ["**62.0 ± 2.0**", "central 70.0"]
    assert "| personalized tar@far=1e-02 | central +8.0 |" in orderings.above(runs)
    for seed, rate in zip("012", (0.6, 0.61, 0.62), strict=True):
        runs[seed]["moon"] = row(personalized=rate)  # not shown, and within a deviation
    cells = summary.line(runs, "personalized", "tar@far=1e-02").split(" | ")
    assert cells[5] == "62.0 ± 2.0"
    one = {"0": runs["0"]}
    assert "**" not in summary.line(one, "personalized", "tar@far=1e-02")


RESULTS = json.loads((FOLDER / "results.json").read_text())
TABLES = [name for name in RESULTS if " " not in name]  # the others are studies


@pytest.mark.parametrize("name", TABLES)
def test_results_are_of_the_settings_that_the_tables_configs_have(name):
    folder = FOLDER.parents[1] / "configs" / "fedfr"
    made = runpy.run_path(str(folder / f"table_{name}.py"))["get_config"]()
    methods = json.loads(made.to_json_best_effort())["methods"]
    for seed, rows in RESULTS[name]["seeds"].items():
        found = {row: x["settings"] for row, x in rows.items() if x["settings"]}
        others = {row for row in found if found[row] != methods.get(row)}
        assert not others, (seed, others)


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_equal_steps_have_those_of_fedfr(name):
    runs = RESULTS[name]["seeds"]
    equal = [row for row in orderings.rows_of_all(runs) if row.endswith("_equal")]
    steps = {row: orderings.mean_cost(runs, row, "steps") for row in ["fedfr", *equal]}
    least = 0.8 if name == "omniglot" else 0.9  # as its page says
    assert equal and min(steps.values()) >= least * steps["fedfr"], steps


@pytest.mark.parametrize("name", RESULTS)
def test_the_pages_numbers_are_those_of_the_results(name):
    page, part = (FOLDER / "RESULTS.md").read_text(), RESULTS[name]
    shown = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    runs = part["seeds"]
    texts = [part["made"], orderings.table(runs, has_costs="saturation" not in name)]
    if name in TABLES:
        texts += [orderings.claims(runs), orderings.above(runs)]
    assert not [text for text in texts if text not in shown]


def test_the_first_table_is_that_of_the_results():
    assert summary.summary(RESULTS) in summary.PAGE.read_text()
