"""Train the demo: pretraining, FedAvg and FedFR on rendered faces."""

from fedfr_jax.cli import train
from fedfr_jax.cli.flags import new_parser, parse_flags

ABOUT = """\
Train the shipped config `demo` in a few minutes, without a download, and print where
its results are. Other flags are those of fedfr train, such as --config.seed=1."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr demo", ABOUT, epilog="")
    parser.flag("--workdir", "DIR", "run directory", default="runs/demo")
    flags = [x for x in argv if x.startswith(("--workdir", "-h", "--help"))]
    values = parse_flags(parser, flags)
    others = [x for x in argv if x not in flags]
    train.main(["--config=fedfr/demo", f"--workdir={values.workdir}", *others])
    print(f"One page of it: fedfr report {values.workdir} --open")
