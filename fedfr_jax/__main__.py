"""`python -m fedfr_jax`: the command line, see `cli.main`."""

from fedfr_jax.cli.main import run

if __name__ == "__main__":
    run()
