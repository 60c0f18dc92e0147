"""Draw 64 faces with masks of each kind, a sheet for every kind.

python experiments/faces_synthetic/mask_sheet.py --out=masks --size=112
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

KINDS = {"template": TEMPLATE, "surface": SURFACE}


def masked(images: np.ndarray, kind: int, seed: int, landmarks=None) -> np.ndarray:
    """Images [T, H, W, 3] uint8 with a mask of one kind each."""
    keys = jax.random.split(jax.random.key(seed), len(images))

    @jax.jit
    @jax.vmap
    def one(key, image, points):
        return cover(kind, key, image, points)[0]

    points = None if landmarks is None else landmarks.astype(np.float32)
    return np.asarray(one(keys, images, points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default="masks")
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--landmarks", action="store_true", help="take the set's own")
    args = parser.parse_args()
    source = SOURCES["lfw"](data_dir("lfw_devtrain"), image_size=args.size)
    rng = np.random.default_rng(args.seed)
    rows = np.sort(rng.choice(len(source.labels), 64, replace=False))
    images = source.read(rows)
    landmarks = source.landmarks[rows] if args.landmarks else None
    args.out.mkdir(parents=True, exist_ok=True)
    for name, kind in KINDS.items():
        path = args.out / f"{name}_{args.size}.png"
        drawn = masked(images, kind, args.seed, landmarks)
        Image.fromarray(sheet(drawn, 8)).save(path)
        print(path)


if __name__ == "__main__":
    main()
