# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Clients differ: a first federated run
#
# Thirty clients hold different mixtures of handwritten digits. We train one model by
# FedAvg and look at every client, not only at the mean.

# %%
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff
from fedfr_jax.runs.report.charts import Chart, line_chart
from fedfr_jax.runs.report.run_charts import partition_charts

digits = load_digits()
x = (digits.images[..., None] / 8 - 1).astype(np.float32)
y = digits.target
split = ff.partition.dirichlet(y, num_clients=30, alpha=0.2)
train, test = ff.FederatedDataset.from_partition(x, y, split)

# %% [markdown]
# Who holds what? A column per client, a row per digit.

# %%
counts = np.zeros((30, 10), int)
np.add.at(counts, (split.train.client, split.train.labels), 1)
table = {"train": counts.tolist()}
partition_charts({"clients": 30, "classes": range(10), "table": table})[0]

# %%
model = ff.MODELS["mlp"](x.shape[1:], hidden_dim=32, num_classes=10)


def loss(variables, batch, key):
    logits, stats = model.apply(variables, batch.images, True, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid), (stats, {})


def logits(variables, x):
    return model.apply(variables, x)[0]


# %%
algorithm = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.1))
variables = model.init(jax.random.key(0))
run = ff.init(
    algorithm, train, variables, cohort_size=10, batch_size=10, local_epochs=2
)
curve, spread = [], []
for _ in range(20):
    run, metrics = ff.run_round(run)
    found = ff.evaluate(run, logits, test)
    curve.append(found["accuracy"])
    spread.append(np.nanquantile(found["per_client"], [0.1, 0.9]))

# %% [markdown]
# The global model on all test examples, and on those of single clients: a tenth of them
# is below the one line, a tenth above the other.

# %%
worst, best = zip(*spread, strict=True)
named = {"all test examples": curve, "worst tenth": worst, "best tenth": best}
lines = {name: list(enumerate(values, 1)) for name, values in named.items()}
print(f"accuracy {curve[-1]:.3f}, worst tenth of clients {worst[-1]:.3f}")
Chart("Accuracy", line_chart(lines, x="round", y="accuracy"))
