"""A sweep over network sizes, and the scaling law of its errors.

    python examples/scaling_law.py

`fedfr sweep` and `fedfr scaling` do the same for whole experiments on the command line.
"""

import jax
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax import scaling


def teacher_labels(num_examples=8000, dim=16, classes=4):
    """Labels of a random deep network, which wider students imitate better."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_examples, dim)).astype(np.float32)
    hidden = np.maximum(x @ rng.normal(size=(dim, 64)) / 4, 0)
    y = (hidden @ rng.normal(size=(64, classes))).argmax(axis=1)
    return x, y.astype(np.int32)


def train(data, test, hidden, rounds):
    """One federated run: (number of parameters, test error)."""
    model = ff.MODELS["mlp"]((16,), hidden_dim=hidden, num_classes=4)

    def loss(variables, batch, key):
        logits, batch_stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (batch_stats, {})

    variables = model.init(jax.random.key(0))
    algorithm = ff.fedavg(ff.LocalTraining(loss, optax.adam, learning_rate=3e-3))
    run = ff.init(algorithm, data, variables, cohort_size=10, batch_size=20)
    for _ in range(rounds):
        run, _ = ff.run_round(run)
    found = ff.evaluate(run, lambda v, x: model.apply(v, x)[0], test)
    size = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    return size, 1 - found["accuracy"]


def main(widths=(2, 4, 8, 16, 32), rounds=30):
    """Sweep, fit, predict the largest run from the others; returns the law's fit."""
    x, y = teacher_labels()
    split = ff.partition.iid(y, num_clients=20)
    data, test = ff.FederatedDataset.from_partition(x, y, split)
    rows = []
    for width in widths:
        size, error = train(data, test, width, rounds)
        rows.append({"name": f"width {width}", "params_backbone": size, "error": error})
        print(f"width {width}: {size} parameters, test error {error:.3f}")
    study = scaling.study(scaling.points(rows, "error"))
    print(scaling.markdown(study))
    return study.findings[0].best


if __name__ == "__main__":
    main()
