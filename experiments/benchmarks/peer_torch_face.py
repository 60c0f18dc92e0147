"""FedFR's local step as its released code does it: on every batch the backbone forward
and backward, and the forwards of the frozen global and previous backbones.

In forwards of one backbone that is five: three forwards, and a backward that costs two.
"""

import copy

import torch
import workloads
from torch import nn
from torch.nn import functional
from torch_models import sphereface, tensors


class Client(nn.Module):
    """What a client trains: backbone, own and public classes, branch."""

    def __init__(self, backbone: nn.Module, num_own: int):
        super().__init__()
        dim = workloads.DIM
        self.backbone = backbone
        self.own = nn.Parameter(0.01 * torch.randn(num_own, dim))
        self.public = nn.Parameter(0.01 * torch.randn(workloads.NUM_PUBLIC, dim))
        self.converter = nn.Linear(dim, dim)
        nn.init.eye_(self.converter.weight)
        nn.init.zeros_(self.converter.bias)
        self.weights = nn.Parameter(self.own.detach().clone())
        self.bias = nn.Parameter(torch.zeros(num_own))


def loss_of(client, server, previous, images, labels):
    """CosFace + 5 contrastive + 10 binary, as in Liu et al. 2022, section 3."""
    features = client.backbone(images)
    with torch.no_grad():
        old, own_old = server(images), previous(images)
    unit = functional.normalize
    cosine = unit(features) @ unit(torch.cat([client.own, client.public])).T
    margin = functional.one_hot(labels, cosine.shape[1]) * 0.4
    total = functional.cross_entropy(30 * (cosine - margin), labels)
    near = functional.cosine_similarity(features, old) / 0.5
    far = functional.cosine_similarity(features, own_old) / 0.5
    total = total + 5 * functional.softplus(far - near).mean()
    cosine = unit(client.converter(features)) @ unit(client.weights).T
    adjusted = 2 * ((cosine + 1) / 2) ** 3 - 1
    positive = functional.softplus(-(30 * (adjusted - 0.4) + client.bias))
    negative = functional.softplus(30 * (adjusted + 0.4) + client.bias)
    is_own = functional.one_hot(labels, len(client.bias)).bool()
    binary = torch.where(is_own, 0.7 / 30 * positive, 0.3 / 30 * negative)
    return total + 10 * binary.sum(1).mean()


def train(client, server, previous, images, labels, work):
    """One round of a client; -> mean loss over its steps."""
    optimizer = torch.optim.SGD(
        client.parameters(), lr=work.rate, momentum=0.9, weight_decay=5e-4
    )
    losses = []
    for _ in range(work.epochs):
        for rows in torch.randperm(len(images)).split(work.batch_size):
            batch = images[rows]
            mirrored = torch.rand(len(rows), 1, 1, 1) < 0.5
            batch = torch.where(mirrored, batch.flip(-1), batch)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(client, server, previous, batch, labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def main():
    args = workloads.arguments(__doc__)
    torch.set_num_threads(args.threads)
    work, data = workloads.inputs(args)
    images, labels = tensors(data.images, data.labels)
    server = sphereface(work)
    clients = [
        Client(copy.deepcopy(server), work.num_classes) for _ in range(work.population)
    ]
    before = [copy.deepcopy(server) for _ in clients]
    clock = workloads.Clock()
    for _ in range(1 + args.rounds):
        with clock:
            losses, total = [], {k: 0.0 for k in server.state_dict()}
            for i, client in enumerate(clients):
                client.backbone.load_state_dict(server.state_dict())
                losses.append(
                    train(client, server, before[i], images[i], labels[i], work)
                )
                before[i].load_state_dict(client.backbone.state_dict())
                for name, x in client.backbone.state_dict().items():
                    total[name] = total[name] + x / len(clients)
            server.load_state_dict(total)
    workloads.report(torch.__version__, clock, loss=sum(losses) / len(losses))


if __name__ == "__main__":
    main()
