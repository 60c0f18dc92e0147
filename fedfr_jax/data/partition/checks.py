"""What every partition asks of its numbers."""

from fedfr_jax.data.partition.client_split import Rows


def check_enough(name: str, num_clients: int, each: int, rows: Rows) -> None:
    """Raise ValueError unless there are `each` rows to deal for every client."""
    there, asked = len(rows.dealt), num_clients * each
    if asked > there:
        raise ValueError(
            f"{name} must be at most {there} (the training rows), or too few are left "
            f"for client {there // each} and those after it, got {asked}."
        )
