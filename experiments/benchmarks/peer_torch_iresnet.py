"""The floor of `bigface.py`: the same steps as a hand-written PyTorch loop.

Prints {"seconds": of a step, fastest of the rounds} as JSON.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """InsightFace's residual block: BN, conv, BN, PReLU, conv, BN, and the shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        conv = lambda i, stride: nn.Conv2d(i, width, 3, stride, 1, bias=False)
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(inputs), conv(inputs, 1)),
            *(nn.BatchNorm2d(width), nn.PReLU(width)),
            *(conv(width, stride), nn.BatchNorm2d(width)),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            short = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(short, nn.BatchNorm2d(width))

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


def network(widths, blocks, dim, size):
    """Stem, stages that begin with a stride of 2, the head E."""
    first = widths[0]
    layers = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)]
    layers.append(nn.PReLU(first))
    before = [first, *widths]
    for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        layers.append(Block(before[i], width, 2))
        layers += [Block(width, width, 1) for _ in range(count - 1)]
        size = -(-size // 2)
    layers += [nn.BatchNorm2d(widths[-1]), nn.Flatten()]
    last = nn.BatchNorm1d(dim)
    last.weight.requires_grad = False  # fixed at 1
    return nn.Sequential(*layers, nn.Linear(widths[-1] * size**2, dim), last)


def loss_of(model, classes, images, labels):
    """CosFace of one batch."""
    unit = functional.normalize
    cosine = unit(model(images)) @ unit(classes).T
    margin = 0.4 * functional.one_hot(labels, len(classes))
    return functional.cross_entropy(64 * (cosine - margin), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("size", "batch", "steps", "rounds", "classes", "dim", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("widths", "blocks"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    parser.add_argument("--channels", choices=("first", "last"), required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layout = {"first": torch.contiguous_format, "last": torch.channels_last}
    layout = layout[args.channels]
    model = network(args.widths, args.blocks, args.dim, args.size)
    model = model.to(memory_format=layout).train()
    classes = nn.Parameter(0.01 * torch.randn(args.classes, args.dim))
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD([*model.parameters(), classes], **settings)
    shape = (args.steps * args.batch, 3, args.size, args.size)
    images = torch.randint(256, shape, dtype=torch.uint8)
    labels = torch.randint(args.classes, shape[:1])
    spent = []
    for _ in range(args.rounds + 1):
        begin = time.perf_counter()
        for rows in torch.randperm(len(images)).split(args.batch):
            batch = (images[rows].float() / 127.5 - 1).to(memory_format=layout)
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, classes, batch, labels[rows]).backward()
            optimizer.step()
        spent.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": min(spent[1:]) / args.steps}))


if __name__ == "__main__":
    main()
