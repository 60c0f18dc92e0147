"""How hard the synthetic faces are: speed, pixels, a linear probe and a small network.

    python experiments/faces_synthetic/probe.py --image_size=32 --difficulty=1

Prints images per second; closed-set accuracy of a ridge classifier on pixels;
verification on unseen people by the cosine of centered pixels, and of the embedding of
a four-layer network trained with CosFace (arXiv:1801.09414, eq. 4) on other people.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random

from fedfr_jax.data.synthetic_faces import synthetic_faces

WIDTHS = (3, 32, 64, 96, 128)


def linear_probe(images, labels, is_train) -> float:
    """Closed-set accuracy of the best ridge regression onto one-hot labels."""
    x = images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1.0
    x = (x - x[is_train].mean(axis=0)).astype(np.float64)
    onehot = np.eye(labels.max() + 1)[labels[is_train]] - 1.0 / (labels.max() + 1)
    kernel = x[is_train] @ x[is_train].T
    best = 0.0
    for strength in (1e1, 1e2, 1e3, 1e4):
        dual = np.linalg.solve(kernel + strength * np.eye(len(kernel)), onehot)
        scores = x[~is_train] @ (x[is_train].T @ dual)
        best = max(best, float((scores.argmax(axis=1) == labels[~is_train]).mean()))
    return best


def verification(features, labels) -> dict[str, float]:
    """TAR at two FARs over all pairs, by cosine similarity."""
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    first, second = np.triu_indices(len(labels), 1)
    scores = (features @ features.T)[first, second]
    is_same = labels[first] == labels[second]
    impostors = np.sort(scores[~is_same])
    tar = {}
    for far in (1e-1, 1e-2, 1e-3):
        threshold = impostors[-max(round(far * len(impostors)), 1)]
        tar[f"TAR@FAR={far:g}"] = round(float((scores[is_same] > threshold).mean()), 3)
    return tar


def network(key, num_classes, side):
    """Four convolutions of stride 2, then a dense layer to 64."""
    keys = random.split(key, len(WIDTHS) + 1)
    pairs = zip(WIDTHS[:-1], WIDTHS[1:], keys[2:], strict=True)
    return {
        "conv": [
            random.normal(k, (3, 3, i, o)) * (2.0 / (9 * i)) ** 0.5 for i, o, k in pairs
        ],
        "dense": random.normal(keys[0], (side * side * WIDTHS[-1], 64)) * 0.02,
        "head": random.normal(keys[1], (64, num_classes)),
    }


def embed(params, x):
    """[B, H, W, 3] in [-1, 1] -> [B, 64]."""
    for i, kernel in enumerate(params["conv"]):
        x = jax.lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if i:
            x = (x - x.mean((1, 2), keepdims=True)) / (
                x.std((1, 2), keepdims=True) + 0.1
            )
        x = jax.nn.leaky_relu(x, 0.1)
    return x.reshape(len(x), -1) @ params["dense"]


def shift(key, image):
    """Move an image [H, W, 3] by up to a twelfth of its side."""
    reach = image.shape[0] // 12
    padded = jnp.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    row, column = random.randint(key, (2,), 0, 2 * reach + 1)
    return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)


def train(images, labels, *, num_steps, batch_size, margin=0.2, scale=24.0):
    """CosFace with Adam on mirrored and shifted images."""
    side = -(-images.shape[1] // 16)
    params = network(random.key(0), int(labels.max()) + 1, side)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, num_steps))
    state = optimizer.init(params)
    x, y = jnp.asarray(images), jnp.asarray(labels)

    def loss_fn(params, batch, target):
        unit = lambda v, axis: v / jnp.linalg.norm(v, axis=axis, keepdims=True)
        cosine = unit(embed(params, batch), 1) @ unit(params["head"], 0)
        logits = scale * (cosine - margin * jax.nn.one_hot(target, cosine.shape[1]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    @jax.jit
    def step(params, state, key):
        key_rows, key_flip, key_shift = random.split(key, 3)
        rows = random.randint(key_rows, (batch_size,), 0, len(y))
        batch = x[rows].astype(jnp.float32) / 127.5 - 1.0
        flip = random.bernoulli(key_flip, 0.5, (batch_size, 1, 1, 1))
        batch = jnp.where(flip, batch[:, :, ::-1], batch)
        batch = jax.vmap(shift)(random.split(key_shift, batch_size), batch)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, y[rows])
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(num_steps):
        params, state, loss = step(params, state, random.fold_in(random.key(1), i))
    return params, float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--difficulty", type=float, default=1.0)
    parser.add_argument("--num_identities", type=int, default=150)
    parser.add_argument("--images_per_identity", type=int, default=12)
    parser.add_argument("--num_steps", type=int, default=800)
    args = parser.parse_args()
    people, each = args.num_identities, args.images_per_identity
    source = synthetic_faces(
        num_identities=people,
        images_per_identity=each,
        image_size=args.image_size,
        difficulty=args.difficulty,
    )
    source.read(np.arange(1))  # compile
    start, used = time.perf_counter(), time.process_time()
    images = source.read(np.arange(len(source.labels)))
    per_second = len(images) / (time.perf_counter() - start)
    each_core = 1e3 * (time.process_time() - used) / len(images)
    print(f"images/s: {per_second:.0f}, {each_core:.2f} ms of one core each")

    labels, number = source.labels, np.arange(len(source.labels)) % each
    few = labels < 50
    half = number[few] < each // 2
    print(
        f"linear probe, 50 people: {linear_probe(images[few], labels[few], half):.3f}"
    )
    unseen = labels >= people * 2 // 3
    pixels = images[unseen].reshape(unseen.sum(), -1).astype(np.float64)
    print("pixels:", verification(pixels - pixels.mean(axis=0), labels[unseen]))
    start = time.perf_counter()
    params, loss = train(
        images[~unseen], labels[~unseen], num_steps=args.num_steps, batch_size=64
    )
    x = images[unseen].astype(np.float32) / 127.5 - 1.0
    features = np.asarray(embed(params, jnp.asarray(x)))
    seconds = time.perf_counter() - start
    print(f"network ({seconds:.0f} s, loss {loss:.2f}):", end=" ")
    print(verification(features, labels[unseen]))


if __name__ == "__main__":
    main()
