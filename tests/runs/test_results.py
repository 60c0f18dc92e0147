"""The table of a sweep."""

from concurrent.futures import ThreadPoolExecutor

from fedfr_jax.runs import results


def test_sweeps_that_write_at_the_same_time_lose_no_row(tmp_path):
    """Locks keep threads apart as they keep processes apart."""
    names = [f"run{i}" for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: results.add(tmp_path, {"run": name}), names))
    assert sorted(results.read(tmp_path)) == sorted(names)
    results.add(tmp_path, {"run": "run7", "seed": 1})
    assert results.read(tmp_path)["run7"] == {"run": "run7", "seed": 1}
    assert len(results.read(tmp_path)) == 40
