"""Execute the notebooks and keep their outputs.

python docs/notebooks/build.py [NAME ...]
"""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
NAMES = ("first_run", "personal_layers", "robust_aggregation", "scaling_law")


def execute(name: str):
    """The notebook of `name`.py with its outputs."""
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(FOLDER / f"{name}.py")
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3")
    return client.execute()


def main(names) -> None:
    """Write `name`.ipynb for every name."""
    import jupytext

    for name in names or NAMES:
        jupytext.write(execute(name), FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
