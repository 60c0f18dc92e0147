"""The table of a sweep."""

from concurrent.futures import ThreadPoolExecutor

from fedfr_jax.cli.sweep import folder_name
from fedfr_jax.runs import sweep_results


def test_sweeps_that_write_at_the_same_time_lose_no_row(tmp_path):
    """Locks keep threads apart as they keep processes apart."""
    names = [f"run{i}" for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: sweep_results.add(tmp_path, {"run": name}), names))
    assert sorted(sweep_results.read(tmp_path)) == sorted(names)
    sweep_results.add(tmp_path, {"run": "run7", "seed": 1})
    assert sweep_results.read(tmp_path)["run7"] == {"run": "run7", "seed": 1}
    assert len(sweep_results.read(tmp_path)) == 40


def test_a_sweeps_table_has_every_stage_of_every_setting_over_its_seeds():
    rows = [
        (
            {"seed": seed, "methods.a.learning_rate": rate},
            {"seed": seed, "a/generic/accuracy": rate + seed, "b/generic/accuracy": 9},
        )
        for seed in (0, 1)
        for rate in (0.25, 0.5)
    ]
    of = lambda values: {"generic": {"accuracy": values}}
    assert sweep_results.mean_over_seeds(rows) == {
        "a, a.learning_rate=0.25": of([0.25, 1.25]),
        "b, a.learning_rate=0.25": of([9, 9]),
        "a, a.learning_rate=0.5": of([0.5, 1.5]),
        "b, a.learning_rate=0.5": of([9, 9]),
    }
    alone = [(changes, {"a/generic/accuracy": 1}) for changes, _ in rows]
    assert [*sweep_results.mean_over_seeds(alone)] == [
        "a.learning_rate=0.25",
        "a.learning_rate=0.5",
    ]
    assert sweep_results.mean_over_seeds(
        [({"seed": 0}, {"a/generic/accuracy": 1})]
    ) == {"a": of([1])}


def test_settings_of_the_same_last_word_are_not_pooled():
    rates, value = (0.1, 0.2), {"a/generic/accuracy": 1, "b/generic/accuracy": 2}
    keys = "methods.a.learning_rate", "methods.b.learning_rate"
    grid = [
        ({"seed": seed, keys[0]: x, keys[1]: y, "partition.seed": 3}, value)
        for seed in (0, 1)
        for x in rates
        for y in rates
    ]
    found = sweep_results.mean_over_seeds(grid)
    assert len(found) == 8 and all(
        metrics["generic"]["accuracy"] in ([1, 1], [2, 2]) for metrics in found.values()
    )
    assert next(iter(found)) == (
        "a, a.learning_rate=0.1, b.learning_rate=0.1, partition.seed=3"
    )
    name = folder_name({keys[0]: 0.1, keys[1]: 0.2}, "0a1b")
    assert name == "a.learning_rate=0.1,b.learning_rate=0.2-0a1b"
