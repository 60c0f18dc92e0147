"""A batch in parts: a key of its own for each."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.central.step import accumulate_gradients
from fedfr_jax.types import Batch


def test_each_part_of_a_batch_draws_noise_of_its_own():
    def gradient(params, stats, batch, key):
        noise = jax.random.normal(key)
        loss = noise * batch.images.sum()
        return (loss, (stats, {"noise": noise, "square": noise**2})), params

    number = jnp.arange(8, dtype=jnp.int32)
    batch = Batch(
        inputs={"image": jnp.ones((8, 1))},
        targets={"label": number},
        num_classes=jnp.int32(2),
        is_valid=number >= 0,
        is_added=number < 0,
        row=number,
        position=number,
        view_index=0 * number,
    )
    variables, key = (
        {"params": {"w": jnp.ones(2)}, "batch_stats": {}},
        jax.random.key(3),
    )
    _, _, metrics = accumulate_gradients(gradient, variables, batch, key, 4)
    draws = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_allclose(metrics["noise"], np.mean(draws), rtol=1e-6)
    np.testing.assert_allclose(metrics["square"], np.mean(np.square(draws)), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 2 * np.mean(draws), rtol=1e-6)
