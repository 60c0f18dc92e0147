"""What docs/how-to/export.md shows runs as it stands, loaders without this library."""

import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fedfr_jax.deploy.export import export
from fedfr_jax.deploy.gallery import Gallery, search, unit_length, write_gallery

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs/how-to/export.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.S)
LOADERS = {"stablehlo": CODE[0], "onnx": CODE[1]}


@pytest.mark.parametrize("suffix", LOADERS)
def test_a_loader_of_five_lines_gives_the_same_embedding(server, tmp_path, suffix):
    pytest.importorskip({"stablehlo": "flatbuffers", "onnx": "onnxruntime"}[suffix])
    export(server, tmp_path / f"face.{suffix}")
    code = LOADERS[suffix]
    assert "fedfr" not in code and len(code.split("\n\n")) == 2
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 5
    alone = "import sys; assert 'fedfr_jax' not in sys.modules"
    program = [*lines, "np.save('out.npy', embedding)", alone]
    command = [sys.executable, "-c", "\n".join(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = server.embed(np.zeros((2, 12, 12, 3), np.uint8))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-4)


def test_another_library_finds_in_a_gallery_whom_exact_search_finds(
    tmp_path, monkeypatch
):
    faiss = pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    rows = unit_length(random.normal(size=(500, 16)).astype(np.float32))
    gallery = Gallery(np.arange(500).astype(str), rows, "", "")
    write_gallery(gallery, tmp_path / "people.npz")
    monkeypatch.chdir(tmp_path)
    (code,) = (textwrap.dedent(x) for x in CODE if "faiss" in x)
    given = {"np": np, "faiss": faiss, "features": rows[:5]}
    exec(code, given)
    places, cosines = search(gallery, rows[:5], 5)
    np.testing.assert_array_equal(given["places"], places)
    np.testing.assert_allclose(given["cosines"], cosines, atol=1e-5)
