# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Predict a large model from small ones
#
# Train five sizes, fit a law to four of them, and see whether it predicts the fifth.

# %%
import jax
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax import scaling
from fedfr_jax.runs.report.scaling import law_charts

rng = np.random.default_rng(0)
x = rng.normal(size=(8000, 16)).astype(np.float32)
teacher = rng.normal(size=(16, 64)), rng.normal(size=(64, 4))
y = (np.maximum(x @ teacher[0], 0) @ teacher[1]).argmax(1).astype(np.int32)
split = ff.partition.iid(y, num_clients=20)
train, test = ff.FederatedDataset.from_partition(x, y, split)


# %%
def error_of(hidden, rounds=30):
    """A row of the table: size and test error of a federated run."""
    model = ff.MODELS["mlp"]((16,), hidden_dim=hidden, num_classes=4)

    def loss(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (stats, {})

    variables = model.init(jax.random.key(0))
    algorithm = ff.fedavg(ff.LocalTraining(loss, optax.adam, learning_rate=3e-3))
    run = ff.init(algorithm, train, variables, cohort_size=10, batch_size=20)
    for _ in range(rounds):
        run, _ = ff.run_round(run)
    found = ff.evaluate(run, lambda v, x: model.apply(v, x)[0], test)
    size = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    return {
        "name": f"{hidden}",
        "params_backbone": size,
        "error": 1 - found["accuracy"],
    }


rows = [error_of(hidden) for hidden in (2, 4, 8, 16, 32)]

# %%
points = scaling.points(rows, "error")
few = points.take(points.sizes["params_backbone"] < rows[-1]["params_backbone"])
law = scaling.fit(scaling.POWER, few.sizes["params_backbone"][:, None], few.errors)

# %%
guess = scaling.predict(law.coefficients, np.array([[rows[-1]["params_backbone"]]]))[0]
print(f"predicted {guess:.3f}, measured {rows[-1]['error']:.3f}")
law_charts(scaling.study(points))[0]
