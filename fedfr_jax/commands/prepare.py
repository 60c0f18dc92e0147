"""Inspect a config's data set: what it holds, what is unreadable, how it is split."""

from absl import flags

from fedfr_jax.commands.flags import define, parse


def main(argv: list[str]) -> None:
    """prepare --config=... [--workdir=...]."""
    values = flags.FlagValues()
    define(values, needs_workdir=False)
    parse(values, "prepare", argv)
    from fedfr_jax.build import prepare

    prepare(values["config"].value, values["workdir"].value)
