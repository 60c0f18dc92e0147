"""Enroll identities in a gallery."""

import pathlib
from collections.abc import Sequence

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_weights,
    load_images,
    load_weights,
    required_flag,
)
from fedfr_jax.text import normalize_unicode, printable

ABOUT = """\
Enroll identities in a gallery file, which is created if missing: one vector each, the
mean of their images. An identity's name is that of the folder of its images
(people/<name>/<image>; a single folder around all others is no name), or of the file if
it is in no folder. Identities that are enrolled already are replaced."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr enroll", ABOUT, epilog="")
    define_weights(parser)
    define_images(parser, "a folder, a .zip, or files")
    parser.flag("--gallery", "NPZ", "gallery file to write or to add to")
    values = parse_flags(parser, argv)
    path = pathlib.Path(required_flag(values.gallery, "gallery", parser.prog))
    network = load_weights(values, parser.prog)
    from fedfr_jax.deploy.gallery import check_network, enroll_images, read_gallery

    if path.exists():
        check_network(read_gallery(path), network)
    images = load_images(values, network)
    is_folder = len(values.images) == 1 and images.names != values.images
    people = identities_of_files(images.names, is_folder)
    gallery = enroll_images(network, people, images.embed(network), path)
    names = sorted({*people})
    listed = ", ".join(map(printable, names[:5])) + (", ..." if names[5:] else "")
    total = len(gallery.names)
    print(f"{path}: {total} people, {len(names)} of them new or again: {listed}")


def identities_of_files(names: Sequence[str], is_in_folder: bool) -> list[str]:
    """Identity of each image, from its path below the given folder.

    A single folder around the folders of all identities is skipped, as in archives.

    >>> identities_of_files(["Ada/1.jpg", "Bo.jpg"], True)
    ['Ada', 'Bo']
    >>> identities_of_files(["some/Bo.png"], False)
    ['Bo']
    >>> identities_of_files(["set/Ada/1.jpg", "set/Bo/1.jpg"], True)
    ['Ada', 'Bo']
    """
    paths = [pathlib.PurePath(name) for name in names]
    if not is_in_folder:
        return [normalize_unicode(path.stem) for path in paths]
    parts = [path.parts for path in paths]

    def has_one_root():
        return len({x[0] for x in parts}) == 1

    while has_one_root() and min(map(len, parts)) > 2:
        parts = [x[1:] for x in parts]
    depths = [len(x) for x in parts]
    if has_one_root() and min(depths) == 2 < max(depths):
        direct, below = (names[depths.index(n)] for n in (2, max(depths)))
        raise ValueError(
            "images must be in <name>/<image>, got both "
            f"{direct} and {below}. Move the first to a folder of its own, or pass the "
            "parent folder, which has one folder per person."
        )
    return [
        normalize_unicode(x[0] if len(x) > 1 else path.stem)
        for x, path in zip(parts, paths, strict=True)
    ]
