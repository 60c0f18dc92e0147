"""Draw a contact sheet of synthetic faces: a row is a person, a column a photograph.

python experiments/faces_synthetic/contact_sheet.py --out=faces.png
"""

import argparse
import pathlib

import numpy as np
from PIL import Image

from fedfr_jax.data.synthetic_faces import synthetic_faces


def sheet(images: np.ndarray, num_rows: int) -> np.ndarray:
    """Lay images [R * C, H, W, 3] out as [R * H, C * W, 3]."""
    _, height, width, _ = images.shape
    grid = images.reshape(num_rows, -1, height, width, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(num_rows * height, -1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default="faces.png")
    parser.add_argument("--num_identities", type=int, default=8)
    parser.add_argument("--images_per_identity", type=int, default=12)
    parser.add_argument("--image_size", type=int, default=112)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=float, default=1.0)
    args = vars(parser.parse_args())
    out = args.pop("out")
    source = synthetic_faces(**args)
    images = source.read(np.arange(len(source.labels)))
    Image.fromarray(sheet(images, args["num_identities"])).save(out)
    print(f"{len(images)} faces of {args['num_identities']} people: {out}")


if __name__ == "__main__":
    main()
