"""FedAvg in PFLlib's structure: a network for every client, all in one process.

PFLlib is no package, and its program is not ours to copy; written after its README and
what it describes: each client holds a deep copy of the network and an optimizer, reads
its images from its file when it trains, starts from a copy of the server's parameters,
and hands its network to the server, which adds them up into a new copy.
"""

import copy
import tempfile

import numpy as np
import torch
import workloads
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch_models import accuracy, network, tensors


class Client:
    """A client's network, optimizer and file."""

    def __init__(self, work, model, folder, number):
        self.work, self.model = work, copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=work.rate)
        self.folder, self.number = folder, number

    def train(self, server):
        for own, new in zip(self.model.parameters(), server.parameters(), strict=True):
            own.data = new.data.clone()
        images, labels = (
            np.load(f"{self.folder}/{name}{self.number}.npy")
            for name in ("images", "labels")
        )
        examples = TensorDataset(*tensors(images, labels))
        self.model.train()
        for _ in range(self.work.epochs):
            for x, y in DataLoader(examples, self.work.batch_size, shuffle=True):
                self.optimizer.zero_grad()
                functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()


@torch.no_grad()
def mean_of(models):
    """A new network with the mean of all parameters."""
    server = copy.deepcopy(models[0])
    for parameter in server.parameters():
        parameter.zero_()
    for model in models:
        for total, own in zip(server.parameters(), model.parameters(), strict=True):
            total += own / len(models)
    return server


def main():
    args = workloads.arguments(__doc__)
    torch.set_num_threads(args.threads)
    work, data = workloads.inputs(args)
    test = tensors(data.test_images, data.test_labels)
    server, clock = network(work), workloads.Clock()
    with tempfile.TemporaryDirectory() as folder:
        for client in range(work.population):
            np.save(f"{folder}/images{client}.npy", data.images[client])
            np.save(f"{folder}/labels{client}.npy", data.labels[client])
        del data
        clients = [Client(work, server, folder, i) for i in range(work.population)]
        for round in range(1 + args.rounds):
            with clock:
                cohort = [clients[i] for i in workloads.cohort(work, round)]
                for client in cohort:
                    client.train(server)
                server = mean_of([client.model for client in cohort])
    version = f"torch {torch.__version__}"
    workloads.report(version, clock, accuracy=accuracy(server, *test))


if __name__ == "__main__":
    main()
