"""Export trained weights as ONNX, StableHLO, safetensors or a PyTorch state dict."""

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.cli.weight_flags import define_weights, load_weights, required_flag

ABOUT = """\
Write a trained model to a file that runs or opens without this library.

--output=FILE ends in one of
  .onnx          images [N, C, H, W] -> embedding [N, D], any N, folded
  .stablehlo     images [N, H, W, C] -> embedding [N, D], any N, for jax.export
  .safetensors   weights with what they are of: --weights takes it
  .npz           the weights alone
  .pt            a state dict with PyTorch's names, where PyTorch is installed
Images are RGB in [-1, 1]: pixel / 127.5 - 1."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr export", ABOUT, epilog="")
    define_weights(parser)
    parser.flag("--output", "FILE", "file to write")
    values = parse_flags(parser, argv)
    path = required_flag(values.output, "output", parser.prog)
    network = load_weights(values, parser.prog)
    from fedfr_jax.deploy.export import export

    print(f"{path}: {export(network, path)}")
