"""LoRA of a frozen vision transformer: a cohort, and central training on its images.

    python experiments/benchmarks/lora.py
    .venv-bench/torch/bin/python experiments/benchmarks/lora.py --torch

64 clients with 32 images of 32 pixels, one epoch, batches of 16, six blocks of width
192, rank 8. In turns: the cohort with all leaves trained, the cohort with LoRA, and
central training with LoRA on the same images in the same batches. --torch: a loop over
the clients in PyTorch, whose layers compute x W + (x A) B as peft's do.
"""

import argparse
import json
import time

import numpy as np

CLIENTS, EACH, BATCH, SIDE, CLASSES = 64, 32, 16, (32, 32, 3), 10
WIDTH, DEPTH, HEADS, PATCH, RANK = 192, 6, 3, 4, 8
STEPS = CLIENTS * EACH // BATCH


def images():
    """Images of noise [T, H, W, C], labels [T]."""
    x = np.random.default_rng(0).normal(size=(CLIENTS * EACH, *SIDE))
    return x.astype(np.float32), np.arange(len(x)) % CLASSES


def seconds_in_turns(runs: dict, rounds: int) -> dict:
    """Best seconds of each function after its first call."""
    seconds = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(times[1:]) for name, times in seconds.items()}


def jax_runs() -> dict:
    """{name: function that trains all images once}."""
    import jax
    import optax

    import fedfr_jax as ff
    from fedfr_jax.tasks.classification import cross_entropy

    network = ff.MODELS["vision_transformer"](
        SIDE,
        width=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        patch_size=PATCH,
        num_classes=CLASSES,
    )
    base, (x, y) = network.init(jax.random.key(0)), images()
    lora = ff.adapters.lora(rank=RANK, targets="qkv|proj")
    adapted = ff.with_adapter(network, lora, variables=base)
    owners, mesh = np.arange(len(x)) // EACH, ff.make_mesh()
    data = ff.FederatedDataset.from_client_ids(x, y, owners)

    def cohort(model, variables):
        local = ff.LocalTraining(cross_entropy(model), optax.sgd, 0.01)
        run = ff.init(ff.fedavg(local), data, variables, batch_size=BATCH, mesh=mesh)

        def train():
            nonlocal run
            run, _ = ff.run_round(run)
            jax.block_until_ready(run.server)

        return train

    start, optimizer = adapted.init(jax.random.key(1)), optax.sgd(0.01)

    def central():
        @jax.jit
        def train(frozen, variables, x, y):
            def step(variables, batch):
                def loss(params):
                    x, y = batch
                    logits, _ = adapted.apply({**variables, "params": params}, x, True)
                    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
                    return losses.mean()

                with adapted.frozen.bound(frozen):
                    grads = jax.grad(loss)(variables["params"])
                steps, _ = optimizer.update(grads, optimizer.init(grads))
                params = optax.apply_updates(variables["params"], steps)
                return {**variables, "params": params}, ()

            return jax.lax.scan(step, variables, (x, y))[0]

        rows = x.reshape(STEPS, BATCH, *SIDE), y.astype(np.int32).reshape(STEPS, BATCH)
        frozen = adapted.frozen.value
        return lambda: jax.block_until_ready(train(frozen, start, *rows))

    return {
        "cohort, all leaves": cohort(network, base),
        "cohort, LoRA": cohort(adapted, start),
        "central, LoRA": central(),
    }


def torch_runs() -> dict:
    """The same of a loop over clients in PyTorch."""
    import torch
    from torch import nn

    class Lora(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.base = nn.Linear(inputs, outputs)
            self.down = nn.Linear(inputs, RANK, bias=False)
            self.up = nn.Linear(RANK, outputs, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + 2 * self.up(self.down(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = Lora(WIDTH, 3 * WIDTH), Lora(WIDTH, WIDTH)
            self.fc1, self.fc2 = (
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x):
            b, p, e = x.shape
            parts = self.qkv(self.norm1(x)).reshape(b, p, 3, HEADS, e // HEADS)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.proj(y.transpose(1, 2).reshape(b, p, e))
            return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(SIDE[2], WIDTH, PATCH, PATCH)
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            count = (SIDE[0] // PATCH) ** 2 + 1
            self.positions = nn.Parameter(torch.zeros(1, count, WIDTH))
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.fc(self.norm(self.blocks(x))[:, 0])

    network, (x, y) = Network(), images()
    for name, leaf in network.named_parameters():
        leaf.requires_grad = any(part in name for part in ("down", "up", "fc.weight"))
    moving = [leaf for leaf in network.parameters() if leaf.requires_grad]
    x, y = torch.tensor(x).permute(0, 3, 1, 2).contiguous(), torch.tensor(y)

    def cohort():
        start = [leaf.detach().clone() for leaf in moving]
        total = [torch.zeros_like(leaf) for leaf in moving]
        for client in range(CLIENTS):
            for leaf, value in zip(moving, start, strict=True):
                leaf.data.copy_(value)
            optimizer = torch.optim.SGD(moving, 0.01)
            for first in range(client * EACH, (client + 1) * EACH, BATCH):
                rows = slice(first, first + BATCH)
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()
            for sum_, leaf in zip(total, moving, strict=True):
                sum_ += leaf.detach() / CLIENTS
        for leaf, value in zip(moving, total, strict=True):
            leaf.data.copy_(value)

    return {"loop of PyTorch, LoRA": cohort}


def main():
    """Print seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    if not args.torch:
        from fedfr_jax.distributed import use_every_core

        use_every_core()
    runs = torch_runs() if args.torch else jax_runs()
    print(json.dumps(seconds_in_turns(runs, args.rounds), indent=1))


if __name__ == "__main__":
    main()
