"""Enroll identities in a gallery."""

import pathlib
from collections.abc import Mapping, Sequence

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import (
    define_images,
    define_weights,
    load_images,
    load_weights,
    required_flag,
)
from fedfr_jax.text import normalize_unicode, printable

# Folders of the parts of a data set, which may be around those of identities.
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
ABOUT = """\
Enroll identities in a gallery file, which is created if missing: one vector each, the
mean of their images. An identity's name is that of the folder of its images
(people/<name>/<image>; folders around that one, such as train/, are no names), or of
the file if it is in no folder. Identities that are enrolled already are replaced."""


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

    It is the name of the folder that the image is in.

    >>> identities_of_files(["Ada/1.jpg", "Bo.jpg"], True)
    ['Ada', 'Bo']
    >>> identities_of_files(["some/Bo.png"], False)
    ['Bo']
    >>> identities_of_files(["a/Ada/1.jpg", "a/Bo/1.jpg", "b/Cy/1.jpg"], True)
    ['Ada', 'Bo', 'Cy']
    """
    paths = [pathlib.PurePath(name) for name in names]
    if not is_in_folder:
        return [normalize_unicode(path.stem) for path in paths]
    first = {path.parent: str(path) for path in reversed(paths) if path.parent.name}
    _check_folders(dict(sorted(first.items())))
    return [normalize_unicode(path.parent.name or path.stem) for path in paths]


def _check_folders(images: Mapping[pathlib.PurePath, str]) -> None:
    """Raise ValueError for folders that are not one identity each.

    Args:
      images: {folder: the path of an image in it}.
    """
    folders, named = {}, {part for x in images for part in x.parts}
    splits = {part for part in named if part.lower() in SPLITS}
    if len(splits) == 1:  # "Val" alone is a person
        splits &= {*SPLITS}
    for folder, image in images.items():
        if folder.name in splits:
            raise ValueError(
                f"images must be in <name>/<image>, got {image}: {folder.name} is a "
                "split of a data set and no identity. Give each identity a folder."
            )
        if direct := next(filter(None, map(images.get, folder.parents)), None):
            raise ValueError(
                f"images must be in <name>/<image>, got both {direct} and {image}. "
                "Move the first to a folder of its own, or pass the parent folder, "
                "which has one folder per person."
            )
        above = [x for x in folder.parts if x not in splits]
        other = folders.setdefault(normalize_unicode(folder.name), (above, image))
        if other[0] != above:
            raise ValueError(
                f"{folder.name} must be one identity, got {other[1]} and {image}. "
                "Rename one of the folders, or enroll one of those around them."
            )
