"""Enroll identities in a gallery."""

import pathlib
from collections.abc import Sequence

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_weights,
    load_images,
    load_weights,
    name_images,
)
from fedfr_jax.text import normalize_unicode, printable

ABOUT = """\
Add people to the gallery file, or make it: one vector each, the mean of their images.
An image shows whom its folder is called after (people/<name>/<image>; one folder
around all people's is no name), a file in no folder whom the file is called after.
People of a name that is there are replaced."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr enroll", ABOUT, epilog="")
    define_weights(parser)
    define_images(parser, "a folder, a .zip, or files")
    parser.flag("--gallery", "NPZ", "gallery file to write or to add to")
    values = parse_flags(parser, argv)
    path = pathlib.Path(name_images(values.gallery, "gallery", parser.prog))
    network = load_weights(values, parser.prog)
    from fedfr_jax.deploy.gallery import check_network, enroll_images, read_gallery

    if path.exists():
        check_network(read_gallery(path), network)
    found = load_images(values, network)
    is_folder = len(values.images) == 1 and found.names != values.images
    people = identities_of_files(found.names, is_folder)
    gallery = enroll_images(network, people, found.embed(network), path)
    names = sorted({*people})
    shown = ", ".join(map(printable, names[:5])) + (", ..." if names[5:] else "")
    total = len(gallery.names)
    print(f"{path}: {total} people, {len(names)} of them new or again: {shown}")


def identities_of_files(names: Sequence[str], is_in_folder: bool) -> list[str]:
    """Identity of each image, from its path below the given folder.

    A folder that holds all pictures, each in a folder of its own person, is passed
    over, as archives have one around what they hold.

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
    while len({of[0] for of in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [of[1:] for of in parts]
    depths = sorted(map(len, parts))
    if len({of[0] for of in parts}) == 1 and 2 == depths[0] < depths[-1]:
        direct, below = (names[[*map(len, parts)].index(n)] for n in (2, depths[-1]))
        raise ValueError(
            "images must be in <name>/<image>, got both "
            f"{direct} and {below}. Move the first to a folder of its own, or pass the "
            "parent folder, which has one folder per person."
        )
    return [
        normalize_unicode(of[0] if len(of) > 1 else path.stem)
        for of, path in zip(parts, paths, strict=True)
    ]
