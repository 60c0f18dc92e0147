"""Verify whether two face images show the same person."""

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_threshold,
    define_weights,
    get_threshold,
    load_images,
    load_weights,
)

ABOUT = """\
Print the cosine of two images' embeddings, the threshold and the decision. The
threshold has the false accept rate --far on pairs of identities that the model's run
evaluated and did not train on."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr verify", ABOUT, epilog="")
    define_weights(parser)
    define_images(parser, "two files")
    define_threshold(parser)
    values = parse_flags(parser, argv)
    if len(values.images) != 2:
        raise ValueError(
            f"{parser.prog}: images must be two files, got {values.images}."
        )
    network = load_weights(values, parser.prog)
    from fedfr_jax.deploy.calibration import curve_text
    from fedfr_jax.deploy.gallery import unit_length

    images = load_images(values, network)
    first, second = unit_length(images.embed(network))
    cosine = float(first @ second)
    is_given = values.threshold is not None
    curve = "" if is_given else curve_text(network.roc)
    threshold, source = get_threshold(values, curve)
    verdict = "one person" if cosine >= threshold else "two people"
    print(f"{verdict}: cosine {cosine:.4f}, threshold {threshold:.4f} ({source})")
