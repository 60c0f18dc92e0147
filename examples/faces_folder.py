"""Federated face recognition on a folder with one folder per person.

    python examples/faces_folder.py my_faces

Without a folder the script renders 40 people first, so that it runs as it stands.
FedFR (Liu et al. 2022) trains one network for all clients and a branch for each.
"""

import pathlib
import sys
import tempfile

from PIL import Image

import fedfr_jax as ff
from fedfr_jax.config.build import build
from fedfr_jax.config.files import find, load
from fedfr_jax.runs.experiment import run_experiment


def render(folder, people=40, images=10):
    """Write images as folder/<person>/<number>.png, the layout that training reads."""
    faces = ff.open_source(
        "synthetic_faces",
        num_identities=people,
        images_per_identity=images,
        image_size=32,
    )
    for row, label in enumerate(faces.labels):
        path = pathlib.Path(folder, faces.names[label], f"{row}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(faces.read([row])[0]).save(path)


def main(folder=None, workdir=None, rounds=3, epochs=3):
    """Pretrain, FedAvg, FedFR; returns {method: rate of genuine pairs accepted}."""
    workdir = workdir or tempfile.mkdtemp()
    if folder is None:
        folder = pathlib.Path(workdir, "faces")
        render(folder)
    config = load(find("fedfr/demo"))
    with config.unlocked():
        config.data = {"name": "folder", "path": str(folder), "image_size": 32}
        # 4 clients with 4 people each; 16 public people pretrain, 8 test the rest.
        config.partition = {
            "num_clients": 4,
            "ids_per_client": 4,
            "num_public_ids": 16,
            "num_unseen_ids": 8,
        }
        config.pretrain.epochs = epochs
        config.federation.rounds = rounds
    summary = run_experiment(build(config), pathlib.Path(workdir, "run"))
    # Each client looks for its own people: at a threshold that accepts one of a hundred
    # strangers, how many images of the right person does it accept?
    found = {
        name: metrics["personalized"]["tar@far=1e-02"]
        for name, metrics in summary["methods"].items()
    }
    for name, rate in found.items():
        print(f"{name}: {rate:.2f} of genuine pairs accepted at a false rate of 0.01")
    print(f"files: {workdir}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
