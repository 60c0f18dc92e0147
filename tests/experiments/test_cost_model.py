"""The formula of docs/explanation/cost.md: tables, limits, measurements."""

import pathlib
import re

import jax
import numpy as np
import pytest

from fedfr_jax.federated.simulation import (
    assign,
    build_simulation,
    load_round,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort
from tests.federated import toys

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "experiments" / "benchmarks"


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import cost_model

    return cost_model


def test_the_tables_of_the_document_are_what_the_formula_gives(costs):
    text = (ROOT / "docs" / "explanation" / "cost.md").read_text()
    assert costs.with_tables(text) == text, "run cost_model.py --write"


def test_a_document_without_markers_is_refused(costs):
    with pytest.raises(ValueError, match="must hold .* once"):
        costs.with_tables("nothing")


@pytest.mark.parametrize("example", ["many phones", "face recognition"])
@pytest.mark.parametrize("machine", ["TPU v5p-256", "8 x H200"])
def test_every_term_is_named_in_the_document(costs, example, machine):
    text = (ROOT / "docs" / "explanation" / "cost.md").read_text()
    terms = costs.seconds(costs.EXAMPLES[example], costs.MACHINES[machine])
    assert all(f"| {term} |" in text for term in terms)
    assert all(value >= 0 for value in terms.values())
    needed = costs.needs(costs.EXAMPLES[example], costs.MACHINES[machine])["device"]
    assert needed < costs.MACHINES[machine].capacity


@pytest.mark.parametrize("example", ["many phones", "face recognition"])
def test_the_examples_are_what_a_simulation_takes(costs, example):
    work = costs.EXAMPLES[example]
    assert work.cohort <= work.population
    assert work.population * work.examples < 2**31  # rows of a table


def test_the_population_is_in_the_disk_alone(costs):
    work, machine = costs.EXAMPLES["many phones"], costs.MACHINES["8 x H200"]
    more = work._replace(population=10 * work.population)
    assert costs.seconds(more, machine) == costs.seconds(work, machine)
    few, many = (costs.needs(w, machine)["disk"] for w in (work, more))
    assert many == 10 * few


def test_hand_worked_terms(costs):
    machine = costs.Machine(
        devices=4,
        hosts=2,
        flops=1e9,
        memory=1e9,
        capacity=1e9,
        interconnect=1e6,
        link=1e3,
        disk=1e3,
        host_client=0.1,
        device_client=0.2,
        step=0.5,
    )
    work = costs.Round(
        population=100,
        cohort=8,
        examples=10,
        batch=4,
        epochs=2,
        parameters=1000,
        forward=1e6,
        frozen=4,
        row=50,
        image=1000,
        lanes=2,
        waste=1.5,
        is_streamed=True,
        checkpoint_every=4,
    )
    found = costs.seconds(work, machine)
    steps = 8 * 2 * 3 * 1.5
    expected = {
        "sampling and schedule": 0.4,
        "rows read": 0.2,
        "client overhead": 0.4,
        "step overhead": steps / 2 * 0.5 / 4,
        "training": 3 * 80 * 2 * 1e6 * 1.5 / 4e9,
        "frozen features": 80 * 4 * 1e6 / 4e9,
        "parameter traffic": 20_000 * steps / 4e9,
        "sums over clients": 12_000 * 8 / 4e9,
        "all-reduce": 8000 * 3 / 4 / 1e6,
    }
    busy = sum(expected.values())
    expected["input stall"] = 80_000 / 4e3 - busy
    expected["rows written, stall"] = 0.0
    expected["checkpoint"] = 1.0
    assert found == pytest.approx(expected)


def test_measured_rounds_are_within_half_of_the_prediction(costs):
    assert len(costs.MEASURED) >= 2
    for name, row in costs.MEASURED.items():
        assert costs.predicted(name) == pytest.approx(row["cpu_seconds"], rel=0.5), name


SENDS = re.compile(
    r"= (.*) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)\("
)


@pytest.mark.parametrize(
    "name, cohort_size",
    toys.others_are_slow({("fedavg", 2), ("fedfr", 5)}, toys.TOYS, [2, 5]),
)
def test_devices_send_a_model_once_and_a_number_per_metric_and_client(
    name, cohort_size
):
    """The formula's all-reduce, in the compiled round, however large the cohort."""
    algorithm, variables = toys.TOYS[name]()
    where = {"mesh": make_mesh(4), "cohort_size": cohort_size, "local_epochs": 2}
    sim = build_simulation(algorithm, toys.feed(), *toys.problem(), **where)
    server = start_simulation(sim, variables)
    cohort = Cohort(np.arange(cohort_size), 0)
    work = assign(sim, server, open_store(sim, server), cohort)
    begun = load_round(sim.runs, [work], 0)
    arguments, whole = begun.in_one_call(server), sim.programs.run_whole
    (sent,) = SENDS.findall(whole.lower(*arguments).compile().as_text())
    shapes = re.findall(r"f32\[([\d,]*)\]", sent)
    metrics = jax.eval_shape(whole, *arguments)[2]
    words = lambda x: ",".join(map(str, x.shape))
    if name == "fedfr":  # whose head and branch stay with the clients
        variables = server.inner.variables
    wanted = [*map(words, jax.tree.leaves(variables)), ""]  # and the total weight
    wanted += map(words, metrics.values())
    assert sorted(shapes) == sorted(wanted)
    assert all(x.shape == (cohort_size,) for x in metrics.values())
