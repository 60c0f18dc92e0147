"""Convert external checkpoints to a file of weights."""

import os

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import required_flag

ABOUT = """\
Read weights of InsightFace's IResNets, TreB1eN-style IR networks (face.evoLVe, TFace,
AdaFace), FedFR's SphereFace or torchvision's ResNets and write them with our names.

--input=FILE is a .safetensors, a .npz or, where PyTorch is installed, a .pt, .pth,
.pth.tar, .ckpt or .bin of torch.save, whose code is not run. In a file with several
networks --key names one, such as --key=state_dict_ema, or --key=state_dict/model for
the names that begin with "model.". The network is found from names and shapes; --model
and --input_shape set another one, such as --model='{"name": "iresnet", "depth": 50}'
--input_shape=112,112,3."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr convert", ABOUT, epilog="")
    parser.flag("--input", "FILE", "file to read")
    parser.flag("--output", "FILE", "file to write: .safetensors, .npz or .pt")
    parser.flag("--key", "KEY", "weights to read from several", default="")
    parser.flag("--model", "JSON", "model of the weights", type=_parse_model)
    parser.flag("--input_shape", "H,W,C", "shape of its images", type=_parse_shape)
    values = parse_flags(parser, argv)
    source = required_flag(values.input, "input", parser.prog)
    target = required_flag(values.output, "output", parser.prog)
    if not os.path.exists(source):
        raise ValueError(
            f"--input must be a file, got {source!r}, which does not exist."
        )
    from fedfr_jax.deploy.export import convert

    model, shape = values.model, values.input_shape
    print(convert(source, target, model=model, input_shape=shape, key=values.key))


def _parse_model(text: str) -> dict:
    from fedfr_jax.json_files import parse_json

    return parse_json(text, "--model")


def _parse_shape(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
