"""Say whether two pictures show one person."""

from fedfr_jax.commands.flags import new_parser, parse_flags
from fedfr_jax.commands.network_flags import (
    define_network,
    define_pictures,
    define_threshold,
    network_of,
    pictures_of,
    threshold_of,
)

ABOUT = """\
Print the cosine of two pictures' embeddings, the threshold and what follows. The
threshold is that of --far on the pairs of people that the network's run was judged on
and did not train on."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr verify", ABOUT, epilog="")
    define_network(parser)
    define_pictures(parser, "two files")
    define_threshold(parser)
    values = parse_flags(parser, argv)
    if len(values.pictures) != 2:
        raise ValueError(
            f"{parser.prog}: pictures must be two files, got {values.pictures}."
        )
    network = network_of(values, parser.prog)
    from fedfr_jax.deploy.calibration import text_of
    from fedfr_jax.deploy.gallery import unit

    found = pictures_of(values, network)
    first, second = unit(found.embedded(network))
    cosine = float(first @ second)
    is_given = values.threshold is not None
    least = threshold_of(values, "" if is_given else text_of(network.roc))
    says = "one person" if cosine >= least else "two people"
    why = "given" if is_given else f"false accept rate {values.far:g}"
    print(f"{says}: cosine {cosine:.4f}, threshold {least:.4f} ({why})")
