"""Inspect a config's data set: what it holds, what is unreadable, how it is split."""

from fedfr_jax.commands.flags import add_switch, define, new_parser, parse

ABOUT = """\
Print what the config's data set holds, what is unreadable and how it is split.

--pack decodes the images once into a folder; config.data = {"name": "packed", "path":
FOLDER} reads them from there. Stopped, it goes on with the same command. --verify
reads the folder (or the config's packed data) again and compares checksums.

--detector and --landmarks find the faces of raw photographs: --landmarks=FACES.csv is
written, and training aligns faces by it with --config.data.landmarks=FACES.csv
--config.data.align=True. Images without a face, or with several, are counted and
named."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr prepare", ABOUT)
    define(parser, needs_workdir=False)
    parser.add_argument("--pack", metavar="FOLDER", help="write decoded images there")
    add_switch(parser, "verify", "compare the packed set's checksums")
    parser.add_argument(
        "--detector",
        metavar="ONNX",
        help="file of OpenCV's YuNet, which finds faces (opencv-python)",
    )
    parser.add_argument("--landmarks", metavar="CSV", help="write landmarks there")
    values = parse(parser, argv)
    from fedfr_jax.commands.preparation import prepare

    prepare(
        values.config,
        values.workdir,
        folder=values.pack,
        check=bool(values.verify),
        detector=values.detector,
        landmarks=values.landmarks,
    )
