"""The loaders that docs/export.md shows run as they stand, without this library."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.deploy.export import export

ROOT = pathlib.Path(__file__).parent.parent.parent
CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.S)
LOADERS = {"stablehlo": CODE[0], "onnx": CODE[1]}


@pytest.mark.parametrize("suffix", LOADERS)
def test_a_loader_of_five_lines_gives_the_same_embedding(run, tmp_path, suffix):
    pytest.importorskip({"stablehlo": "flatbuffers", "onnx": "onnxruntime"}[suffix])
    network = ff.load(run)
    export(network, tmp_path / f"face.{suffix}")
    code = LOADERS[suffix]
    assert "fedfr" not in code and len(code.split("\n\n")) == 2
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 5
    alone = "import sys; assert 'fedfr_jax' not in sys.modules"
    program = [*lines, "np.save('out.npy', embedding)", alone]
    command = [sys.executable, "-c", "\n".join(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = network.embed(np.zeros((2, 12, 12, 3), np.uint8))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-4)
