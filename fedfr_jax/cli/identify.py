"""Identify the people on images by a gallery."""

import os

from fedfr_jax.cli.flags import count, new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_threshold,
    define_weights,
    get_threshold,
    load_images,
    load_weights,
    name_images,
)
from fedfr_jax.text import printable

ABOUT = """\
Print who of the gallery is on each image, by exact search. Somebody is named when
the cosine reaches the threshold of --far, the false accept rate of one comparison; a
gallery of G people makes G of them an image."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr identify", ABOUT, epilog="")
    define_weights(parser)
    define_images(parser, "a folder, a .zip, or files")
    define_threshold(parser)
    parser.flag("--gallery", "NPZ", "gallery file of fedfr enroll")
    parser.flag("--top_k", "K", "names per image", type=count, default=1)
    parser.add_argument(
        "--search_backend",
        choices=["numpy", "faiss"],
        default="numpy",
        help="library that searches the gallery, exact in both (default numpy)",
    )
    values = parse_flags(parser, argv)
    path = name_images(values.gallery, "gallery", parser.prog)
    if not os.path.exists(path):
        raise ValueError(
            f"--gallery must exist, got {path}, which does not. Make it with `fedfr "
            "enroll`."
        )
    network = load_weights(values, parser.prog)
    from fedfr_jax.deploy.gallery import (
        check_network,
        faiss_search,
        read_gallery,
        search,
    )

    find = faiss_search() if values.search_backend == "faiss" else search
    gallery = read_gallery(path)
    check_network(gallery, network)
    least = get_threshold(values, gallery.calibration)
    found = load_images(values, network)
    places, cosines = find(gallery, found.embed(network), max(values.top_k, 1))
    print(f"threshold {least:.4f}, {len(gallery.names)} people")
    for name, row, scores in zip(found.names, places, cosines, strict=True):
        shown = [
            f"{printable(gallery.names[i])} {score:.4f}"
            for i, score in zip(row, scores, strict=True)
            if score >= least
        ]
        nearest = printable(gallery.names[row[0]])
        nobody = f"nobody (nearest {nearest} {scores[0]:.4f})"
        print(f"{printable(name)}: {', '.join(shown) or nobody}")
