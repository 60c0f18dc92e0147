# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Layers that stay with the client
#
# Forty clients have 27 handwritten digits each, and give them labels of their own.
# Which layers should stay? We try all choices.

# %%
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff
from fedfr_jax.runs.report.charts import Chart, line_chart

digits = load_digits()
x = (digits.images.reshape(-1, 64) / 8 - 1).astype(np.float32)
rng = np.random.default_rng(0)
client_ids = rng.permutation(np.arange(len(x)) % 40)
labels = np.stack([rng.permutation(10) for _ in range(40)])
y = labels[client_ids, digits.target]
is_test = rng.random(len(x)) < 0.4
train, test = (
    ff.FederatedDataset.from_client_ids(x[part], y[part], client_ids[part])
    for part in (~is_test, is_test)
)
model = ff.MODELS["mlp"]((64,), hidden_dim=64, num_classes=10)


def loss(variables, batch, key):
    logits, stats = model.apply(variables, batch.images, True, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid), (stats, {})


def logits(variables, x):
    return model.apply(variables, x)[0]


# %%
fedavg = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.3))
methods = {
    "nothing stays (FedAvg)": fedavg,
    "classifier stays (FedPer)": ff.with_personal_layers(fedavg, "params/classifier"),
    "first layer stays": ff.with_personal_layers(fedavg, "params/fc"),
    "everything stays (local)": ff.with_personal_layers(fedavg, "."),
}
curves = {}
for name, algorithm in methods.items():
    variables = model.init(jax.random.key(0))
    run = ff.init(algorithm, train, variables, batch_size=9, local_epochs=4)
    curves[name] = []
    for _ in range(20):
        run, _ = ff.run_round(run)
        found = ff.evaluate(run, logits, test)
        curves[name].append(found["accuracy_of_clients"])

# %%
lines = {name: list(enumerate(curve, 1)) for name, curve in curves.items()}
Chart("Mean accuracy of clients", line_chart(lines, x="round", y="accuracy"))

# %% [markdown]
# The layer that must stay is the one about which clients disagree. Features are worth
# sharing, names are not. Always plot local training beside a personalized method:
# what lies between the two is what federation gives.
