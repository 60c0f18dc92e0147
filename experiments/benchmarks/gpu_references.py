"""What lease_case.py compares the engine with: one data-parallel network."""

import statistics
import time

import jax
import jax.numpy as jnp
import optax
import ours

from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import Training
from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.types import CentralTrainer, Dataset


def data_parallel(work, settings: dict, data, rounds: int) -> dict:
    """One network on the images of all clients, the whole cohort's batch at once."""
    row = {"system": "data parallel"}
    model = MODELS[work.model](work.input_shape, **settings)
    loss, variables, _ = ours.classification(work, model)
    of_central = lambda v, batch, key, **_: loss(v, batch, key)
    num_rows = work.population * work.examples
    table = Dataset.from_arrays(
        data.images.reshape(num_rows, *work.input_shape), data.labels.ravel()
    )
    table, batch = jax.device_put(table), work.cohort * work.batch_size
    while batch:
        trainer = CentralTrainer(
            settings=Training(batch_size=batch),
            dataset=table,
            first_row=0,
            num_rows=num_rows,
            batching=Batching(batch, normalize()),
            loss=of_central,
            init=lambda key: variables,
            global_model=lambda variables: variables,
            apply_global=model.apply,
        )
        optimizer = optax.sgd(work.rate)
        epochs = build_epochs(trainer, make_mesh(1), 0, optimizer=optimizer)
        state, spent = epochs.init(jax.tree.map(jnp.copy, variables)), []
        try:
            for epoch in range(1 + rounds):
                begin = time.perf_counter()
                state, _ = jax.block_until_ready(epochs.run(state, table, epoch))
                spent.append(time.perf_counter() - begin)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                return {**row, "failure": first_line(error)}
            batch //= 2
            continue
        seconds, images = statistics.median(spent[1:]), epochs.num_steps * batch
        row |= {"batch_size": batch, "seconds_median": seconds}
        return {**row, "images_per_second": images / seconds}
    return {**row, "failure": "no batch fits the memory"}


def first_line(error: Exception) -> str:
    """Enough of an error for a table."""
    return str(error).splitlines()[0][:200]
