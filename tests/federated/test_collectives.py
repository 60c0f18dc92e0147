"""What devices send each other in a round."""

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
    """One all-reduce in the compiled round, however large the cohort."""
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
