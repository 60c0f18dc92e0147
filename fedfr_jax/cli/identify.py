"""Identify people on images by a gallery."""

import os

from fedfr_jax.cli.flags import count, new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_threshold,
    define_weights,
    get_threshold,
    load_images,
    load_weights,
    required_flag,
)
from fedfr_jax.text import printable

ABOUT = """\
Print the identities of the gallery that are on each image, by exact search: those whose
cosine reaches the threshold of --far, the false accept rate of one comparison; with a
gallery of G identities an image takes part in G of them."""


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
    path = required_flag(values.gallery, "gallery", parser.prog)
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
    threshold, source = get_threshold(values, gallery.calibration)
    images = load_images(values, network)
    rows, cosines = find(gallery, images.embed(network), max(values.top_k, 1))
    print(f"threshold {threshold:.4f} ({source}), {len(gallery.names)} people")
    for name, indices, scores in zip(images.names, rows, cosines, strict=True):
        matches = [
            f"{printable(str(gallery.names[i]))} {score:.4f}"
            for i, score in zip(indices, scores, strict=True)
            if score >= threshold
        ]
        nearest = printable(str(gallery.names[indices[0]]))
        no_match = f"nobody (nearest {nearest} {scores[0]:.4f})"
        print(f"{printable(name)}: {', '.join(matches) or no_match}")
