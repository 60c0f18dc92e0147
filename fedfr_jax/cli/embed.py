"""Write the embeddings of a folder of images."""

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_weights,
    load_images,
    load_weights,
    required_flag,
)

ABOUT = """\
Write the embeddings of a folder, a .zip or single images to a .npz with names [n],
features [n, D] (as the network gives them, not of unit length) and the network's
fingerprint."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr embed", ABOUT, epilog="")
    define_weights(parser)
    define_images(parser, "a folder, a .zip, or files")
    parser.flag("--output", "NPZ", "file to write")
    values = parse_flags(parser, argv)
    path = required_flag(values.output, "output", parser.prog)
    network = load_weights(values, parser.prog)
    import numpy as np

    images = load_images(values, network)
    features = images.embed(network)
    with open(path, "wb") as file:
        fingerprint = network.fingerprint
        np.savez(file, names=images.names, features=features, fingerprint=fingerprint)
    print(f"{path}: {len(features)} embeddings of {features.shape[1]} numbers")
