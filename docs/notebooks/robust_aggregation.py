# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Robust aggregation
#
# Some clients train on wrong labels, all in the same way. What do links of the
# aggregation chain do about it?

# %%
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff
from fedfr_jax.runs.report.charts import Chart, line_chart

digits = load_digits()
x = (digits.images.reshape(-1, 64) / 8 - 1).astype(np.float32)
y = digits.target
split = ff.partition.iid(y, num_clients=20)
train, test = ff.FederatedDataset.from_partition(x, y, split)
BAD = 6  # of 20 clients

labels = np.array(train.dataset.labels)
end = train.population.offsets[BAD]
labels[:end] = (labels[:end] + 1) % 10  # a consistent lie is worse than noise
poisoned = train._replace(dataset=train.dataset.with_labels(labels))
model = ff.MODELS["mlp"]((64,), hidden_dim=32, num_classes=10)


def loss(variables, batch, key):
    logits, stats = model.apply(variables, batch.images, True, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid), (stats, {})


def logits(variables, x):
    return model.apply(variables, x)[0]


# %%
fedavg = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.2))
links = {
    "mean": (),
    "median": (ff.AGGREGATORS["median"](),),
    "krum": (ff.AGGREGATORS["krum"](num_malicious_clients=BAD),),
    "geometric median": (ff.AGGREGATORS["geometric_median"](),),
}
curves = {}
for name, chain in links.items():
    algorithm = ff.with_aggregation(fedavg, *chain)
    variables = model.init(jax.random.key(0))
    run = ff.init(algorithm, poisoned, variables, batch_size=10, local_epochs=2)
    curves[name] = []
    for _ in range(15):
        run, _ = ff.run_round(run)
        curves[name].append(ff.evaluate(run, logits, test)["accuracy"])

# %%
lines = {name: list(enumerate(curve, 1)) for name, curve in curves.items()}
title = f"Test accuracy; {BAD} of 20 clients name every digit one higher"
Chart(title, line_chart(lines, x="round", y="accuracy"))

# %% [markdown]
# Robust links need all updates of a round at once: K models of memory, where a mean
# needs one. What they cost and why: the page on the aggregation chain.
