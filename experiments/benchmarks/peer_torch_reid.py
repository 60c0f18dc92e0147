"""The floor of `reid.py`: the same clients' steps as a hand-written PyTorch loop.

Prints {"seconds": of a client's step, fastest of the rounds} as JSON.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A basic block of torchvision's ResNet."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != width:
            conv = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def network(widths, bottleneck, num_classes):
    """Stem, one block a stage, pooling, bottleneck and classifier."""
    first = widths[0]
    layers = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = [first, *widths]
    for i, width in enumerate(widths):
        layers.append(Block(inputs[i], width, 1 if i == 0 else 2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(widths[-1], bottleneck), nn.BatchNorm1d(bottleneck)]
    return nn.Sequential(*layers, nn.Linear(bottleneck, num_classes))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clients", "steps", "batch", "classes", "neck_dim", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("widths", "size"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = network(args.widths, args.bottleneck, args.classes)
    server = {name: x.clone() for name, x in model.state_dict().items()}
    images = torch.randn(args.clients, args.steps, args.batch, 3, *args.size)
    labels = torch.randint(args.classes, (args.clients, args.steps, args.batch))
    spent = []
    for _ in range(args.rounds + 1):
        begin = time.perf_counter()
        for client in range(args.clients):
            model.load_state_dict(server)
            settings = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
            optimizer = torch.optim.SGD(model.parameters(), **settings)
            for x, y in zip(images[client], labels[client], strict=True):
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        spent.append(time.perf_counter() - begin)
    seconds = min(spent[1:]) / (args.clients * args.steps)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
