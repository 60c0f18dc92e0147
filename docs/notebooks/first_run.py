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
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff

digits = load_digits()
x = (digits.images[..., None] / 8 - 1).astype(np.float32)
y = digits.target
split = ff.partition.dirichlet(y, num_clients=30, alpha=0.2)
train, test = ff.FederatedDataset.from_partition(x, y, split)

# %% [markdown]
# Who holds what? A row per client, a column per digit.

# %%
counts = np.zeros((30, 10), int)
for client, (low, high) in enumerate(
    zip(split.train_offsets[:-1], split.train_offsets[1:], strict=True)
):
    counts[client] = np.bincount(y[split.train[low:high]], minlength=10)
fig, ax = plt.subplots(figsize=(5, 5), dpi=80)
ax.imshow(counts, aspect="auto", cmap="Blues")
ax.set(xlabel="digit", ylabel="client", title="training examples")
plt.show()

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
    spread.append(np.nanquantile(found["per_client"], [0.1, 0.5, 0.9]))

# %% [markdown]
# The line is the global model on all test examples. The band is the middle 80 % of
# the clients.

# %%
spread = np.array(spread)
rounds = np.arange(1, 21)
fig, ax = plt.subplots(figsize=(6, 3.5), dpi=80)
ax.fill_between(rounds, spread[:, 0], spread[:, 2], alpha=0.25, label="80 % of clients")
ax.plot(rounds, curve, label="all test examples")
ax.set(xlabel="round", ylabel="accuracy", ylim=(0, 1))
ax.legend(loc="lower right")
plt.show()
print(f"accuracy {curve[-1]:.3f}, worst tenth of clients {spread[-1, 0]:.3f}")
