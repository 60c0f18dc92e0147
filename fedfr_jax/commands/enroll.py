"""Add people to a gallery."""

import pathlib

from fedfr_jax.commands.flags import new_parser, parse_flags
from fedfr_jax.commands.network_flags import (
    define_network,
    define_pictures,
    named,
    network_of,
    pictures_of,
)

ABOUT = """\
Add people to the gallery file, or make it: one vector each, the mean of their pictures.
A picture shows whom its folder is called after (people/<name>/<picture>), a file in no
folder whom the file is called after. People of a name that is there are replaced."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr enroll", ABOUT, epilog="")
    define_network(parser)
    define_pictures(parser, "a folder, a .zip, or files")
    parser.add_argument("--gallery", metavar="NPZ", help="what to write or add to")
    values = parse_flags(parser, argv)
    path = pathlib.Path(named(values.gallery, "gallery", parser.prog))
    network = network_of(values, parser.prog)
    from fedfr_jax.deploy.gallery import enrolled, read_gallery, write_gallery

    before = read_gallery(path) if path.exists() else None
    found = pictures_of(values, network)
    is_folder = len(values.pictures) == 1 and found.names != values.pictures
    people = [whose(name, is_folder) for name in found.names]
    gallery = enrolled(network, people, found.embedded(network), before)
    write_gallery(gallery, path)
    print(f"{path}: {len(gallery.names)} people, {len({*people})} of them new or again")


def whose(name: str, is_in_folder: bool) -> str:
    """Who is on a picture, by its path below the folder that was given.

    >>> whose("Ada/1.jpg", True), whose("Ada.jpg", True), whose("some/Bo.png", False)
    ('Ada', 'Ada', 'Bo')
    """
    path = pathlib.PurePath(name)
    return path.parts[0] if is_in_folder and len(path.parts) > 1 else path.stem
