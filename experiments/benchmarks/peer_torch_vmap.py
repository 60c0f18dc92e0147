"""The work of lease.py in PyTorch: clients under torch.func.vmap, compiled.

    python experiments/benchmarks/peer_torch_vmap.py --work=emnist [--smoke]

Local SGD is a pure function of one client; vmap trains `chunk` clients at once and
torch.compile fuses what it can. Batch norms use a batch's statistics, as in training.
"""

import argparse
import json
import statistics
import time

import torch
import workloads
from lease_works import EMBEDDING, SMOKE_EMBEDDING, WORKS, size_of, work_of
from torch import nn
from torch.nn import functional
from torch_models import iresnet, tensors
from torch_models import network as small_network

ROUNDS = 3  # timed, after one that compiles
CHUNKS = {"emnist": (64, 256), "resnet18": (8, 32), "iresnet50": (1, 4)}


class Basic(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        conv = lambda i, stride: nn.Conv2d(i, width, 3, stride, 1, bias=False)
        norm = lambda: nn.BatchNorm2d(width)
        self.body = nn.Sequential(
            *(conv(inputs, stride), norm(), nn.ReLU(), conv(width, 1), norm())
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != width:
            short = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(short, norm())

    def forward(self, x):
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(widths, blocks, num_classes):
    """ResNet with the stem for small images."""
    layers = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
    layers += [nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = [widths[0], *widths]
    for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        layers.append(Basic(before[i], width, 1 if i == 0 else 2))
        layers += [Basic(width, width, 1) for _ in range(count - 1)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *pool, nn.Linear(widths[-1], num_classes))


def build(name: str, work, is_smoke: bool) -> nn.Module:
    """The network of a work, with batch norms that keep no statistics."""
    if work.model == "cnn":
        return small_network(work)
    blocks, widths = size_of(name, is_smoke)
    if work.model == "resnet":
        model = resnet(widths, blocks, work.num_classes)
    else:
        dim = SMOKE_EMBEDDING if is_smoke else EMBEDDING
        backbone = iresnet(widths, blocks, dim, work.input_shape[0])
        model = nn.Sequential(backbone, nn.Linear(dim, work.num_classes))
    return torch.func.replace_all_batch_norm_modules_(model)


def round_of(model: nn.Module, work, chunk: int, dtype: torch.dtype):
    """(parameters, images [K, n, ...], labels [K, n]) -> their mean, the mean loss.

    Parameters are float32 whatever `dtype` the network computes in.
    """
    size = work.batch_size

    def loss(params, images, labels):
        params = {k: x.to(dtype) for k, x in params.items()}
        output = torch.func.functional_call(model, params, (images.to(dtype),))
        return functional.cross_entropy(output.float(), labels)

    def local(params, images, labels):
        losses = []
        for start in range(0, work.examples, size):
            batch = slice(start, start + size)
            grads, value = torch.func.grad_and_value(loss)(
                params, images[batch], labels[batch]
            )
            params = {k: x - work.rate * grads[k] for k, x in params.items()}
            losses.append(value)
        return params, torch.stack(losses).mean()

    each = torch.func.vmap(local, in_dims=(None, 0, 0), chunk_size=chunk)

    def play(params, images, labels):
        trained, losses = each(params, images, labels)
        return {k: x.mean(0) for k, x in trained.items()}, losses.mean()

    return play


def measure(model, work, data, cell: dict, device: str, compiles: bool) -> dict:
    """Seconds of a round in a cell."""
    play = round_of(model, work, cell["lanes"], getattr(torch, cell["dtype"]))
    play = torch.compile(play) if compiles else play
    params = {k: x.detach().to(device) for k, x in model.named_parameters()}
    spent = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        params, loss = play(params, *data)
        value = loss.item()  # waits for the device
        spent.append(time.perf_counter() - start)
    seconds = statistics.median(spent[1:])
    return {
        "seconds": seconds,
        "clients_per_second": work.cohort / seconds,
        "images_per_second": work.cohort * work.examples / seconds,
        "compile_seconds": spent[0] - seconds,
        "loss": value,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as XLA does
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = work_of(args.work, args.smoke)
    made = workloads.make_data(work)
    data = [x.to(device) for x in tensors(made.images, made.labels)]
    model = build(args.work, work, args.smoke).to(device).train()
    for lanes in (2,) if args.smoke else CHUNKS[args.work]:
        for dtype in ("float32", "bfloat16"):
            cell = {"clients_per_device": lanes, "dtype": dtype}
            row = {"system": f"torch {torch.__version__}", **cell}
            try:
                row |= measure(model, work, data, cell, device, not args.smoke)
            except RuntimeError as error:  # does not fit, or does not compile
                row["failure"] = str(error).splitlines()[0][:200]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
