"""A step with both frozen features at hand against one that runs three networks.

    python experiments/benchmarks/frozen_features.py [--repeats=20]

FedFR's contrastive term compares a feature with those of the global and the previous
network. In forward passes of one network a step that runs them too costs 5 (forward and
backward 3, two more forwards), one that looks them up 3: 3/5. What is looked up costs
two forwards of each frozen network per image, both flips, once a round: as much as two
epochs of running them. Both steps are timed in turns; the minimum counts. Prints JSON.
"""

import argparse
import json
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import results_file

from fedfr_jax.federated.local import TrainState, local_step, sgd
from fedfr_jax.models import MODELS
from fedfr_jax.tasks.faces.frozen_features import (
    CachedFeatures,
    ComputedFeatures,
    Features,
)
from fedfr_jax.tasks.faces.loss import face_loss, init_local
from fedfr_jax.types import Batch, LocalTraining


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=56, help="pixels")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 2, 1])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--public", type=int, default=500, help="public classes")
    parser.add_argument("--images", type=int, default=512, help="of the round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    results_file.add_flag(parser)
    return parser.parse_args()


def networks(args):
    """The model, and variables of the trained, global and previous network."""
    model = MODELS["sphereface"](
        (args.size, args.size, 3),
        blocks=tuple(args.blocks),
        widths=tuple(args.widths),
        embedding_dim=args.dim,
    )
    return model, [model.init(jax.random.key(i)) for i in range(3)]


def make_batch(args) -> Batch:
    """Random images of ten own classes, half of them mirrored."""
    random, size = np.random.default_rng(0), (args.batch, args.size, args.size, 3)
    rows = random.choice(args.images, args.batch, replace=False).astype(np.int32)
    return Batch(
        inputs={"image": jnp.asarray(random.uniform(-1, 1, size).astype(np.float32))},
        targets={"label": jnp.asarray(rows % 10)},
        num_classes=jnp.int32(10),
        is_added=jnp.zeros(args.batch, bool),
        is_valid=jnp.ones(args.batch, bool),
        position=jnp.asarray(rows),
        row=jnp.asarray(rows),
        view_index=jnp.arange(args.batch, dtype=jnp.int32) % 2,
    )


def losses(model):
    """{"looked up", "three networks": loss} of `local_step`, given what is frozen."""
    loss = face_loss(model, contrastive_weight=5.0, branch="bce")
    embed = lambda variables, images: model.apply(variables, images, False)[0]

    def three(variables, batch, key, *, frozen):
        return loss(variables, batch, key, frozen=ComputedFeatures(embed, *frozen))

    return {"looked_up": loss, "three_networks": three}


def seconds(function) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - begin


def main():
    args = parse_arguments()
    model, (backbone, global_, previous) = networks(args)
    batch, optimizer = make_batch(args), sgd(momentum=0.9, weight_decay=5e-4)
    own = init_local(10, args.dim, branch="bce")(jax.random.key(3))
    phi = 0.01 * jax.random.normal(jax.random.key(4), (args.public, args.dim))
    params = {"backbone": backbone["params"], "phi": phi, **own}
    variables = {"params": params, "batch_stats": backbone["batch_stats"]}
    iterate = TrainState(variables, optimizer(1e-3).init(params))
    client = SimpleNamespace(round=jnp.int32(0), step_to_epoch=lambda step: step)

    @jax.jit
    def embed(variables, images):
        return model.apply(variables, images, False)[0]

    # Features of every image in both views; the batch's own where it stands.
    table = np.zeros((2, args.images, 2, args.dim), np.float32)
    for i, frozen in enumerate((global_, previous)):
        place = (i, np.asarray(batch.row), np.asarray(batch.view_index))
        table[place] = embed(frozen, batch.images)
    zero = jnp.zeros(1, jnp.int32)  # a single span
    given = {
        "looked_up": CachedFeatures(
            Features(jnp.asarray(table[0]), zero, zero), table[1]
        ),
        "three_networks": (global_, previous),
    }
    steps, ends = {}, {}
    for name, loss in losses(model).items():
        take = local_step(LocalTraining(loss, optimizer, 1e-3))

        @jax.jit
        def step(iterate, batch, frozen, take=take):
            key, first = jax.random.key(5), jnp.int32(0)
            return take(key, iterate, client, batch, first, frozen=frozen)

        frozen = jax.device_put(given[name])
        steps[name] = partial(step, iterate, batch, frozen)
        ends[name] = float(steps[name]()[1]["loss"])
    np.testing.assert_allclose(ends["looked_up"], ends["three_networks"], rtol=1e-5)
    steps["forward"] = lambda: embed(global_, batch.images)
    steps["forward"]()
    taken = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            taken[name].append(seconds(step))
    best = {name: min(values) for name, values in taken.items()}
    ratio = best["looked_up"] / best["three_networks"]
    # Both networks, both flips, every image once a round, in steps of three networks.
    once = 4 * best["forward"] / (best["three_networks"] - best["looked_up"])
    found = {"ratio": round(ratio, 3), "pays_after_epochs": round(once, 2)}
    rounded = {name: round(1e3 * value, 2) for name, value in best.items()}
    row = {"milliseconds": rounded, **found}
    print(json.dumps(row))
    results_file.write(args.out, {"a step": row})


if __name__ == "__main__":
    main()
