"""FedScale's traces, of made files, and files that are none."""

import os
import pickle

import numpy as np
import pytest

from fedfr_jax.federated.systems import fedscale
from fedfr_jax.federated.systems.devices import Work, seconds_of

SPEEDS = {
    "1": {"computation": 20.0, "communication": 8000.0},
    "2": {"computation": 100, "communication": 400},
}
HOURS = {
    7: {
        "duration": 3,
        "active": [10, 50, 60],
        "inactive": [20, 60, 60],
        "finish_time": 100,
        "model": "a phone",
    },
    9: {"active": [0], "inactive": [5], "finish_time": 10},
}


def written(folder, value, protocol=pickle.DEFAULT_PROTOCOL):
    path = folder / "trace"
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_client_takes_the_seconds_of_fedscales_formula(tmp_path, protocol):
    batch, steps, gflops, sent = 20, 5, 0.3, 1_000_000
    path = written(tmp_path, SPEEDS, protocol)
    found = fedscale.read_profiles(path, 3, forward_gflops=gflops)
    work = Work(sent, sent, 0, int(3 * batch * gflops * 1e9))
    seconds = seconds_of(found, work, np.arange(3), np.full(3, steps))
    kilobits = 2 * sent * 8 / 1000
    first = 3 * batch * steps * 20.0 / 1000 + kilobits / 8000.0
    second = 3 * batch * steps * 100 / 1000 + kilobits / 400
    np.testing.assert_allclose(seconds, [first, second, first], rtol=1e-6)


def is_active(entry, time):
    time %= entry["finish_time"]
    pairs = zip(entry["active"], entry["inactive"], strict=True)
    return any(start <= time < end for start, end in pairs)


def test_a_client_is_there_in_its_windows_which_repeat_after_its_own_time(tmp_path):
    there = fedscale.read_availability(written(tmp_path, HOURS), 3)
    entries = [HOURS[7], HOURS[9], HOURS[7]]
    for time in np.arange(0.5, 320):
        expected = [is_active(entry, time) for entry in entries]
        assert (there.wait(time) == 0).tolist() == expected, time
    assert there.wait(95.0).tolist() == [15, 5, 15]


class Harm:
    """Pickles as a call of `os.mkdir`."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_file_that_asks_for_code_is_refused_and_runs_none(tmp_path):
    for value in (Harm(str(tmp_path / "harm")), np.float64(1.0), {"1": (1, 2)}):
        path = written(tmp_path, value)
        with pytest.raises(ValueError, match="trace must be a pickle of dicts"):
            fedscale.read_availability(path, 1)
    assert not (tmp_path / "harm").exists()


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    whole = pickle.dumps(HOURS)
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        path = tmp_path / "trace"
        path.write_bytes(data[: rng.integers(1, len(data) + 1)])
        try:
            there = fedscale.read_availability(path, 4)
            assert np.isfinite(there.wait(3.0)).all()
        except ValueError as error:
            assert "trace must" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"communication": 1.0}, "finite numbers under 'computation' of client 5"),
        ({"computation": "fast"}, "'computation' of client 5, got 'fast'"),
        ({"computation": -1, "communication": 1}, r"positive .* got \[-1.0\]"),
        ({"computation": 1, "communication": float("nan")}, "finite .* got nan"),
        ({"computation": 10**400, "communication": 1}, "finite numbers"),
        (3, r"{client: dict}, got others"),
    ],
)
def test_profiles_that_are_none_are_refused(tmp_path, entry, message):
    path = written(tmp_path, {"5": entry})
    with pytest.raises(ValueError, match=f"trace must .*{message}"):
        fedscale.read_profiles(path, 2, forward_gflops=1.0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"active": [1], "inactive": [], "finish_time": 9}, "got 0, 1 and 1"),
        ({"active": [9], "inactive": [12], "finish_time": 9}, "got none"),
        ({"active": [[1]], "inactive": [2], "finish_time": 9}, "got list"),
    ],
)
def test_windows_that_are_none_are_refused(tmp_path, entry, message):
    with pytest.raises(ValueError, match=f"of client 5.*{message}"):
        fedscale.read_availability(written(tmp_path, {"5": entry}), 2)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold {client: dict}, got dict"):
        fedscale.read_profiles(written(tmp_path, {}), 2, forward_gflops=1.0)


def test_a_small_file_of_a_huge_value_is_refused_at_once(tmp_path):
    value = "x"
    for _ in range(60):
        value = [value, value]  # 2 ** 60 texts, of a few bytes
    entry = {"computation": {"a": value}, "communication": 1.0}
    path = written(tmp_path, {"1": entry})
    with pytest.raises(ValueError, match="must have finite numbers.*got dict"):
        fedscale.read_profiles(path, 1, forward_gflops=1.0)
