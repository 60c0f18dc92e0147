"""Inspect a config's data set: what it holds, what is unreadable, how it is split."""

from absl import flags

from fedfr_jax.commands.flags import define, parse


def main(argv: list[str]) -> None:
    """prepare --config=... [--workdir=...] [--pack=FOLDER] [--verify].

    --pack decodes the images once into a folder that config.data = {"name": "packed",
    "path": FOLDER} maps; killed, it goes on with the same command. --verify reads the
    folder (or a config's packed data) again and compares checksums.
    """
    values = flags.FlagValues()
    define(values, needs_workdir=False)
    flags.DEFINE_string(
        "pack", None, "folder to write the decoded images to", flag_values=values
    )
    flags.DEFINE_bool(
        "verify", False, "compare the packed set's checksums", flag_values=values
    )
    parse(values, "prepare", argv)
    from fedfr_jax.commands.preparation import prepare

    prepare(
        values["config"].value,
        values["workdir"].value,
        folder=values["pack"].value,
        check=values["verify"].value,
    )
