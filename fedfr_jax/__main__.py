"""`python -m fedfr_jax`: the launcher, see `cli.main`."""

from fedfr_jax.cli.main import run

if __name__ == "__main__":
    run()
