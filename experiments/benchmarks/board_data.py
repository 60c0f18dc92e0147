"""Images of a job of the board in one file, so that all systems train on the same.

    train images, labels [N, n] of N clients, and test images, as uint8

A set that is not whole at hand is spread over the same number of clients: an image is
then with several of them. Time is that of the job, and accuracy that of the part.
"""

import pathlib

import numpy as np
import workloads

from fedfr_jax.configs import base
from fedfr_jax.data.sources import open_source

SETS = {  # of the board: folder under FEDFR_DATA that is whole, a part, images in all
    "cifar10": ("cifar10", "cifar10_jpg", 50_000),
    "cifar100": ("cifar100", "cifar100_6k", 50_000),
}


def write(path: pathlib.Path, work, name: str, split: str, seed: int = 0) -> dict:
    """Write a job's file; returns what the JSON says of its data.

    Args:
      name: a key of SETS.
      split: iid; dirichlet, each client's shares of classes from Dir(0.1); shards, two
        runs of the images sorted by class for each client.
    """
    images, labels, is_test, kind = read(name, work)
    rows = np.flatnonzero(~is_test)
    random = np.random.default_rng((seed, 11))
    needed = work.population * work.examples
    copies = -(-needed // len(rows))
    pool = np.concatenate([random.permutation(rows) for _ in range(copies)])[:needed]
    clients = SPLITS[split](pool, labels, work, random)  # [N, n]
    test = np.flatnonzero(is_test)
    np.savez(
        path,
        images=images[clients],
        labels=labels[clients],
        test_images=images[test],
        test_labels=labels[test],
    )
    notes = {
        "whole": "the whole set",
        "part": f"a stand-in of the job's size: {len(rows)} images of {name}, each "
        f"with about {round(needed / len(rows))} clients; seconds are the job's, "
        "accuracy is of this part",
        "made": "a stand-in of the job's size: made images; seconds are those of the "
        "job, accuracy says nothing of the set",
    }
    numbers = {"train_images": len(rows), "test_images": len(test)}
    return {"name": name, "kind": kind, "split": split, **numbers, "note": notes[kind]}


def read(name: str, work) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Images [T, H, W, C] uint8, labels [T], is_test [T]; whole, part or made."""
    whole, part, number = SETS[name]
    for folder in (whole, part):
        place = pathlib.Path(base.data_dir(folder))
        if place.exists():
            source = open_source(name, data_dir=str(place))
            images = source.read(np.arange(len(source.labels)))
            is_test = np.asarray(source.is_test)
            kind = "whole" if (~is_test).sum() == number else "part"
            return images, source.labels, is_test, kind
    made = workloads.make_data(work._replace(population=1, examples=number))
    images = np.concatenate([made.images[0], made.test_images])
    labels = np.concatenate([made.labels[0], made.test_labels])
    pixels = np.clip(images * 40 + 127.5, 0, 255).astype(np.uint8)
    return pixels, labels, np.arange(len(labels)) >= number, "made"


def iid(pool, labels, work, random):
    """Clients [N, n] of rows in any order."""
    del labels, random
    return pool.reshape(work.population, work.examples)


def shards(pool, labels, work, random):
    """Two shards of rows sorted by class for each client."""
    order = pool[np.argsort(labels[pool], kind="stable")]
    parts = order.reshape(2 * work.population, -1)
    pairs = random.permutation(len(parts)).reshape(work.population, 2)
    return random.permuted(parts[pairs].reshape(work.population, -1), axis=1)


def dirichlet(pool, labels, work, random, alpha=0.1):
    """Classes of each client in shares from Dir(alpha), until a class is used up."""
    left = [pool[labels[pool] == c].tolist() for c in range(work.num_classes)]
    clients = np.zeros((work.population, work.examples), np.int64)
    for client in clients:
        shares = random.dirichlet(np.full(work.num_classes, alpha))
        for place in range(work.examples):
            usable = np.array([len(x) > 0 for x in left]) * (shares + 1e-12)
            client[place] = left[
                random.choice(len(left), p=usable / usable.sum())
            ].pop()
    return clients


SPLITS = {"iid": iid, "dirichlet": dirichlet, "shards": shards}
