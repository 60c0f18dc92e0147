"""Write the embeddings of a folder of pictures."""

from fedfr_jax.commands.flags import new_parser, parse_flags
from fedfr_jax.commands.network_flags import (
    define_network,
    define_pictures,
    named,
    network_of,
    pictures_of,
)

ABOUT = """\
Write the embeddings of a folder, a .zip or single pictures to a .npz with names [n],
features [n, D] (as the network gives them, not of unit length) and the network's
fingerprint."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr embed", ABOUT, epilog="")
    define_network(parser)
    define_pictures(parser, "a folder, a .zip, or files")
    parser.add_argument("--to", metavar="NPZ", help="what to write")
    values = parse_flags(parser, argv)
    path = named(values.to, "to", parser.prog)
    network = network_of(values, parser.prog)
    import numpy as np

    found = pictures_of(values, network)
    features = found.embedded(network)
    with open(path, "wb") as file:
        fingerprint = network.fingerprint
        np.savez(file, names=found.names, features=features, fingerprint=fingerprint)
    print(f"{path}: {len(features)} embeddings of {features.shape[1]} numbers")
