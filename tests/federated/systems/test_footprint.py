"""Energy, CO2 and money of clients' rounds: by hand, in a round, a run and its plan."""

import json

import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.config.build import build
from fedfr_jax.federated.disclosure import count_work
from fedfr_jax.federated.systems.devices import Work
from fedfr_jax.federated.systems.footprint import costs_of, footprint
from fedfr_jax.federated.systems.settings import check_systems
from fedfr_jax.plan.devices import DEVICES
from fedfr_jax.plan.dummy_inputs import blind_experiment
from fedfr_jax.plan.needs import federated_needs
from fedfr_jax.plan.stages import format_stage, plan_stage
from fedfr_jax.runs.experiment import run_experiment
from tests.tasks import tiny

WORK = Work(download=2_000_000, upload=1_000_000, flops=10**9, flops_per_step=2 * 10**9)
GRID = "hour,grams_per_kwh\n"
PRICES = "client,joules_per_gflop,joules_per_mb,price_per_kwh\n"


def test_costs_by_hand(tmp_path):
    (tmp_path / "grid.csv").write_text(
        GRID + "".join(f"{h},{100 * h}\n" for h in reversed(range(24)))
    )
    (tmp_path / "devices.csv").write_text(PRICES + "1,1,0,0.5\n0,2,10,0.25\n")
    prices = footprint(
        2,
        devices=str(tmp_path / "devices.csv"),
        grid=str(tmp_path / "grid.csv"),
        price_per_gb=4.0,
        start_hour=22.5,
    )
    ids, steps = np.array([1, 0]), np.array([3, 0])
    found = costs_of(prices, WORK, ids, steps, seconds=2 * 3600.0)  # half past midnight
    kwh = np.array([7.0, 32.0]) / 3.6e6
    np.testing.assert_allclose(found.joules, [7.0, 2 * 1 + 10 * 3])
    np.testing.assert_allclose(found.co2, 0)
    np.testing.assert_allclose(found.price, [0.5, 0.25] * kwh + 4.0 * 0.003)
    later = costs_of(prices, WORK, ids, steps, seconds=4.5 * 3600)
    np.testing.assert_allclose(later.co2, kwh * 300 / 1000)
    mean = costs_of(prices, WORK, ids, steps, seconds=None)
    np.testing.assert_allclose(mean.co2, kwh * 1150 / 1000)
    assert mean.total["energy_kwh"] == pytest.approx(39 / 3.6e6)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("grid", GRID + "0,1\n", "a line for each of the 24 hours, got 0 for hour 1"),
        ("grid", GRID + "24,1\n", r"must have hours in \[0, 24\)"),
        ("devices", PRICES + "0,1,1,1\n1,1,-2,1\n", "numbers of at least 0, got -2"),
        ("devices", PRICES + "0,1,1,1\n", "each of the 2 clients, got 0 for client 1"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, key, text, message):
    path = tmp_path / "given.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        footprint(2, **{key: str(path)})
    assert str(path) in str(error.value)


def test_devices_of_another_number_of_clients_are_refused(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text(PRICES + "0,1,1,1\n1,1,1,1\n")
    systems = ff.Systems(footprint=footprint(2, devices=str(path)))
    with pytest.raises(ValueError, match="footprint must have 3 clients, got 2"):
        check_systems(systems, num_clients=3, cohort_size=3)


def test_absent_clients_cost_nothing_and_lost_updates_do():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    data = ff.FederatedDataset.from_client_ids(
        x, np.zeros(60, np.int32), np.repeat(np.arange(12), 5)
    )
    loss = lambda variables, batch, key: ff.masked_mean(
        (batch.images @ variables["params"]["w"])[:, 0], batch.is_valid
    )
    systems = ff.Systems(
        dropout=ff.Dropout(before_training=0.4, after_training=0.4),
        footprint=ff.footprint(12),
    )
    algorithm = ff.fedavg(ff.LocalTraining(loss, optax.sgd, 0.1))
    variables = {"w": np.ones((4, 2), np.float32)}
    run = ff.init(algorithm, data, variables, batch_size=2, systems=systems, seed=1)
    work = count_work(run.sim, run.server, ())
    run, metrics = ff.run_round(run)
    assert 0 < metrics["num_clients"] < 12 - metrics["num_absent_clients"] < 12
    each = costs_of(systems.footprint, work, np.arange(1), np.array([3]), None)
    assert work.flops_per_step > 0 and work.upload == work.download == 32
    np.testing.assert_allclose(metrics["joules"], each.joules[0])
    np.testing.assert_allclose(metrics["co2_grams"], 1000 * each.co2[0])
    np.testing.assert_allclose(metrics["client_price"], each.price[0])
    assert len(metrics["joules"]) == metrics["num_clients"]
    trained = 12 - metrics["num_absent_clients"]
    for name, cost in each.total.items():
        np.testing.assert_allclose(metrics[name], trained * cost)


def test_a_run_adds_up_what_its_rounds_cost_and_the_plan_foretells_it(tmp_path):
    systems = {"footprint": {"price_per_gb": 1.0}}
    federation = {"rounds": 3, "systems": systems}
    config = tiny.config("classification", federation=federation)
    run_experiment(build(config), tmp_path)
    lines = (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = json.loads((tmp_path / "summary.json").read_text())["methods"]["x"]
    needs = federated_needs(blind_experiment(config), "x")
    planned, count = needs.spent, 2  # clients of a round
    assert rows[0]["co2_grams"] == pytest.approx(1e3 * rows[0]["co2_kg"] / count)
    assert rows[0]["client_price"] == pytest.approx(rows[0]["price"] / count)
    assert found["footprint"].keys() == planned.keys()
    for name, value in found["footprint"].items():
        assert value > 0
        assert value == pytest.approx(sum(row[name] for row in rows))
        assert planned[name] == pytest.approx(value)
    costs = f"{planned['energy_kwh']:.3g} kWh, {planned['co2_kg']:.3g} kg CO2, price "
    (line,) = [x for x in plan_lines(config) if "clients of all rounds spend" in x]
    assert line.endswith(f"  {costs}{planned['price']:.3g}")
    config["federation"]["systems"] = {}
    assert not any("spend" in line for line in plan_lines(config))


def plan_lines(config):
    """The plan of method x as it is printed."""
    device = DEVICES["v100"]
    numbers = plan_stage(blind_experiment(config), "x", device)
    return format_stage("x", numbers, device, 1).splitlines()
