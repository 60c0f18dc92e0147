"""A `Graph` as a file of ONNX, by the package onnx."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.deploy.graph import Graph, Tensor

OPSET = 17  # of 2022: what runs today knows it
FORMAT = 8  # of the file, of the same year
LARGEST = 2**31 - 2**24  # bytes of a file; above, constants lie beside it


def write_onnx(
    graph: Graph,
    output: Tensor,
    image_shape: Sequence[int],
    about: Mapping[str, str],
    path: pathlib.Path,
) -> None:
    """Write images [N, C, H, W] -> embedding [N, D] for any N.

    Raises:
      ImportError: without the package onnx.
    """
    import onnx
    from onnx import helper, numpy_helper

    height, width, channels = image_shape
    number = onnx.TensorProto.FLOAT
    value = lambda name, shape: helper.make_tensor_value_info(name, number, shape)
    last = helper.make_node("Identity", [output.name], ["embedding"])
    model = helper.make_model(
        helper.make_graph(
            [*(_node(helper, node) for node in graph.nodes), last],
            "fedfr_jax",
            [value("images", ["N", channels, height, width])],
            [value("embedding", ["N", output.shape[-1]])],
            [
                numpy_helper.from_array(np.ascontiguousarray(array), name)
                for name, array in graph.constants.items()
            ],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=FORMAT,
        producer_name="fedfr_jax",
    )
    helper.set_model_props(model, dict(about))
    size = sum(array.nbytes for array in graph.constants.values())
    beside = {"location": f"{path.name}.data"} if size > LARGEST else {}
    onnx.save_model(model, path, save_as_external_data=bool(beside), **beside)
    onnx.checker.check_model(path)


def _node(helper, node):
    settings = node.settings
    if node.kind == "Cast":
        settings = {"to": helper.np_dtype_to_tensor_dtype(settings["to"])}
    return helper.make_node(node.kind, node.inputs, [node.output], **settings)
