"""What class embeddings reveal: FedFR's server holds one row for each person.

    python experiments/privacy/class_embeddings.py --data=images_background.npz

Writers' characters of Omniglot stand for persons: 200 classes are the clients', 400
are public. An embedding is trained on all of them with a cosine classifier, whose rows
of the clients' classes are what a client of FedFR would send. Whoever gets the rows and
the network tries:

  identify  the nearest row of the mean feature of ten other images of a person
  invert    a decoder, trained on features of public images, draws a row; the drawing
            is compared with the mean images of the clients' classes

Before and after Gaussian noise on the rows, relative to their mean length, as
`private` would add it to them. Writes class_embeddings.json and the table in README.md.
"""

import argparse
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "fedfr_tables")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from orderings import provenance, write_between  # noqa: E402

OWN, PUBLIC, SIZE, DIM = 200, 400, 21, 64
NOISES = (0.0, 0.5, 1.0, 2.0, 4.0)  # length of the noise over that of a row


def load(path: pathlib.Path):
    """Images [classes, 20, SIZE * SIZE] in [0, 1] of drawings on paper."""
    with np.load(path) as file:
        images, labels = file["images"], file["labels"]
    order = np.argsort(labels.reshape(-1), kind="stable")
    images = images.reshape(-1, 105, 105)[order][: (OWN + PUBLIC) * 20]
    small = 1 - images.reshape(-1, SIZE, 5, SIZE, 5).mean((2, 4))
    return small.reshape(OWN + PUBLIC, 20, -1).astype(np.float32)


def layers(key, *sizes):
    """Weights of a network of dense layers."""
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=False)
    return [
        {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for k, a, b in pairs
    ]


def dense(params, x):
    """ReLU layers, the last one without."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


def unit(x):
    """Rows of length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def train(loss, params, inputs, steps: int, key):
    """Adam on batches of 256 of `inputs`, arrays [T, ...]."""
    optimizer = optax.adam(1e-3)

    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (256,), 0, len(inputs[0]))
            gradient = jax.grad(loss)(params, *(x[rows] for x in inputs))
            update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, update), state), None

        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jax.random.split(key, steps))[0][0]

    return run(params)


def first_of(scores) -> float:
    """How often the own class has the highest score, [n, n]."""
    return float((jnp.argmax(scores, 1) == jnp.arange(len(scores))).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="the .npz")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    images = load(given.data)
    seen, others = images[:, :10], images[:, 10:]
    keys = jax.random.split(jax.random.key(0), 5)

    def classify(params, x, label):
        cosines = unit(dense(params["body"], x)) @ unit(params["rows"]).T
        logits = 16 * (cosines - 0.2 * jax.nn.one_hot(label, len(images)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    params = {
        "body": layers(keys[0], SIZE * SIZE, 256, DIM),
        "rows": jax.random.normal(keys[1], (len(images), DIM)),
    }
    flat, labels = seen.reshape(-1, SIZE * SIZE), np.repeat(np.arange(len(images)), 10)
    params = train(
        classify, params, (jnp.asarray(flat), jnp.asarray(labels)), given.steps, keys[2]
    )
    feature = lambda x: unit(dense(params["body"], x))

    def draws(decoder, code, x):
        return ((jax.nn.sigmoid(dense(decoder, code)) - x) ** 2).sum(1).mean()

    public = jnp.asarray(images[OWN:].reshape(-1, SIZE * SIZE))
    decoder = layers(keys[3], DIM, 256, SIZE * SIZE)
    decoder = train(draws, decoder, (feature(public), public), given.steps, keys[4])

    rows = unit(params["rows"][:OWN])
    faces = jnp.asarray(seen[:OWN].mean(1))
    other = feature(others[:OWN].reshape(-1, SIZE * SIZE))
    means = unit(other.reshape(OWN, 10, DIM).mean(1))
    found = {}
    for noise in NOISES:
        drawn = jax.random.normal(jax.random.key(7), rows.shape) / DIM**0.5
        noisy = unit(rows + noise * drawn)
        picture = jax.nn.sigmoid(dense(decoder, noisy))
        centered = picture - picture.mean(0)[None], faces - faces.mean(0)[None]
        found[f"{noise:g}"] = {
            "identified": first_of(means @ noisy.T),
            "inverted": first_of(unit(centered[0]) @ unit(centered[1]).T),
        }
        print(noise, found[f"{noise:g}"], flush=True)
    results = {"chance": 1 / OWN, "noise": found, "made": provenance()}
    (HERE / "class_embeddings.json").write_text(json.dumps(results, indent=1))
    lines = [
        "| noise over a row's length | identified | class of the decoder's drawing |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {noise} | {100 * x['identified']:.0f} % | {100 * x['inverted']:.0f} % |"
        for noise, x in found.items()
    ]
    lines.append(f"| chance | {100 / OWN:.1f} % | {100 / OWN:.1f} % |")
    write_between(HERE / "README.md", "embeddings", "\n".join(lines))


if __name__ == "__main__":
    main()
