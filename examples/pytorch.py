"""Your PyTorch training, federated: a module as it is, for many clients at a time.

    python examples/pytorch.py

It needs PyTorch: pip install 'fedfr_jax[torch]'. docs/tutorials/pytorch.md explains it.
"""

import jax
import numpy as np
import optax
from torch import nn

import fedfr_jax as ff

net = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(72, 2),
)
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (1000, 1, 8, 8)).astype(np.float32)  # a DataLoader's images
y = (x.mean((1, 2, 3)) > 0).astype(np.int32)
data = ff.FederatedDataset.from_client_ids(
    np.moveaxis(x, 1, -1), y, client_ids=np.arange(1000) // 50
)
model = ff.from_torch(net, (8, 8, 1))


def loss(variables, batch, key):
    logits, stats = model.apply(variables, batch.images, True, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid), (stats, {})


algorithm = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.1))
run = ff.init(algorithm, data, model.init(jax.random.key(0)), batch_size=10)
run, metrics = ff.run_rounds(run, 10)
print(ff.evaluate(run, model.output, data)["accuracy"])
net.load_state_dict(ff.to_torch(model, run.variables))
