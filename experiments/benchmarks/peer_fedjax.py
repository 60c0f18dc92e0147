"""google/fedjax: `federated_averaging` with its default backend, one jitted call per
step. It shuffles each client's examples on the host."""

import importlib.metadata

import fedjax
import jax
import jax.numpy as jnp
import workloads


def init(work, key):
    """Glorot uniform kernels, zero biases."""
    height, _, channels = work.input_shape
    pooled = (height - 4) // 2
    shapes = {
        "mlp": [(height * height * channels, 64), (64, work.num_classes)],
        "cnn": [
            (3, 3, channels, 32),
            (3, 3, 32, 64),
            (64 * pooled**2, 128),
            (128, work.num_classes),
        ],
    }[work.model]
    glorot = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(key, len(shapes))
    return [(glorot(k, s), jnp.zeros(s[-1])) for k, s in zip(keys, shapes, strict=True)]


def apply(params, x):
    """Logits [B, M]."""
    *hidden, (kernel, bias) = params
    for weights, offset in hidden:
        if weights.ndim == 4:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, weights, (1, 1), "VALID", dimension_numbers=dims
            )
        else:
            if x.ndim == 4 and len(hidden) > 1:
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(
                    x, -jnp.inf, jax.lax.max, window, window, "VALID"
                )
            x = x.reshape(len(x), -1) @ weights
        x = jax.nn.relu(x + offset)
    return x @ kernel + bias


def loss(params, batch, key):
    del key
    logs = jax.nn.log_softmax(apply(params, batch["x"]))
    return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()


def main():
    args = workloads.arguments(__doc__)
    work, data = workloads.inputs(args)
    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=work.batch_size, num_epochs=work.epochs, drop_remainder=False
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(work.rate),
        fedjax.optimizers.sgd(1),
        batches,
    )
    clients = [
        fedjax.ClientDataset({"x": x, "y": y})
        for x, y in zip(data.images, data.labels, strict=True)
    ]
    key = jax.random.PRNGKey(0)
    state, clock = algorithm.init(init(work, key)), workloads.Clock()
    for round in range(1 + args.rounds):
        ids = workloads.cohort(work, round).tolist()
        keys = jax.random.split(jax.random.fold_in(key, round), len(ids))
        with clock:
            chosen = [(i, clients[i], k) for i, k in zip(ids, keys, strict=True)]
            state, _ = algorithm.apply(state, chosen)
            jax.block_until_ready(state.params)
    guess = jax.jit(apply)(state.params, data.test_images).argmax(1)
    version = f"{importlib.metadata.version('fedjax')}, jax {jax.__version__}"
    workloads.report(version, clock, accuracy=(guess == data.test_labels).mean())


if __name__ == "__main__":
    main()
