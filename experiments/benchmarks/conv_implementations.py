"""Which implementation of the convolution trains fastest inside a loop.

    python experiments/benchmarks/conv_implementations.py [--seconds=3]

Forward and backward of small SphereFace networks (one residual block per stage) plus
one step of SGD, inside a `fori_loop` as in local training: one network, and four with
their own weights under vmap. Prints milliseconds per step, and the ratio to XLA's own
convolution (above 1: slower). Strided and other kernels of "winograd" are "im2col".
"""

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp

from fedfr_jax.models import sphereface
from fedfr_jax.models.conv import IMPLEMENTATIONS

# image size, widths, batch
NETWORKS = [
    (28, (16, 32), 32),
    (28, (16, 32, 64), 64),
    (56, (16, 32, 64, 64), 32),
]
CLIENTS = (1, 4)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3, help="per cell")
    seconds = parser.parse_args().seconds
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}; ms per step (ratio to xla)")
    print(f"{'image':>5} {'batch':>5} {'clients':>7}  {'widths':16}", *IMPLEMENTATIONS)
    for (size, widths, batch), clients in itertools.product(NETWORKS, CLIENTS):
        times = {
            name: time_step(size, widths, batch, clients, name, seconds)
            for name in IMPLEMENTATIONS
        }
        cells = [f"{1e3 * t:.1f} ({t / times['xla']:.2f})" for t in times.values()]
        print(
            f"{size:5} {batch:5} {clients:7}  {'-'.join(map(str, widths)):16}", *cells
        )


def time_step(size, widths, batch, clients, implementation, seconds):
    """Fastest seconds per training step that were seen within `seconds`."""
    shape = (size, size, 3)
    model = sphereface(
        shape,
        widths=widths,
        blocks=(1,) * len(widths),
        embedding_dim=64,
        conv_implementation=implementation,
    )
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), clients))[
        "params"
    ]
    images = jax.random.uniform(jax.random.key(1), (clients, batch, *shape))
    train = jax.jit(functools.partial(train_steps, model))
    if clients == 1:
        params, images = jax.tree.map(lambda x: x[0], (params, images))
    else:
        train = jax.jit(jax.vmap(train, in_axes=(0, 0, None)))
    jax.block_until_ready(train(params, images, 1))
    steps, best, start = 2, float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        jax.block_until_ready(train(params, images, steps))
        best = min(best, (time.perf_counter() - before) / steps)
    return best


def train_steps(model, params, images, num_steps):
    """SGD on the squared embedding, `num_steps` times on the same batch."""

    def loss(params):
        embedding, _ = model.apply({"params": params, "batch_stats": {}}, images, True)
        return jnp.mean(jnp.square(embedding))

    def step(_, params):
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    return jax.lax.fori_loop(0, num_steps, step, params)


if __name__ == "__main__":
    main()
