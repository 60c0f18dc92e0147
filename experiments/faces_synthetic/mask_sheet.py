"""Draw 64 faces with masks of each kind, a sheet for every kind.

python experiments/faces_synthetic/mask_sheet.py --landmarks
python experiments/faces_synthetic/mask_sheet.py --landmarks --lfw --out=masks

Faces are rendered ones, whose sheets lie beside this file, or photographs of LFW,
which are not for publication. Both were looked at on 2026-11-25 (LFW
with --landmarks, the default seed): nose, mouth and chin are covered, eyes are free;
surface masks had jagged sides where a face turns away, which are soft now.
"""

import argparse
import pathlib

import jax
import numpy as np
from contact_sheet import sheet
from fedfr_jax.configs.base import data_dir
from PIL import Image

from fedfr_jax.data.augment.face_mask import SURFACE, TEMPLATE, cover
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.types import Source

HERE = pathlib.Path(__file__).parent
KINDS = {"template": TEMPLATE, "surface_fraction": SURFACE}


def masked(images: np.ndarray, kind: int, seed: int, landmarks=None) -> np.ndarray:
    """Images [T, H, W, 3] uint8 with a mask of one kind each."""
    keys = jax.random.split(jax.random.key(seed), len(images))

    @jax.jit
    @jax.vmap
    def one(key, image, points):
        return cover(kind, key, image, points)[0]

    points = None if landmarks is None else landmarks.astype(np.float32)
    return np.asarray(one(keys, images, points))


def rendered(size: int, seed: int) -> Source:
    """64 people, a photograph of each."""
    people = {"num_identities": 64, "images_per_identity": 1}
    return SOURCES["synthetic_faces"](**people, image_size=size, seed=seed)


def lfw(size: int) -> Source:
    """Photographs of LFW."""
    return SOURCES["lfw"](data_dir("lfw_devtrain"), image_size=size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lfw", action="store_true", help="photographs of FEDFR_DATA")
    parser.add_argument("--landmarks", action="store_true", help="take the set's own")
    args = parser.parse_args()
    source = lfw(args.size) if args.lfw else rendered(args.size, args.seed)
    rng = np.random.default_rng(args.seed)
    rows = np.sort(rng.choice(len(source.labels), 64, replace=False))
    images = source.read(rows)
    landmarks = source.landmarks[rows] if args.landmarks else None
    args.out.mkdir(parents=True, exist_ok=True)
    for name, kind in KINDS.items():
        path = args.out / f"masks_{name}.jpg"
        drawn = masked(images, kind, args.seed, landmarks)
        Image.fromarray(sheet(drawn, 8)).save(path, quality=90)
        print(path)


if __name__ == "__main__":
    main()
