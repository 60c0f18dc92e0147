"""Make other people's weights a file that --network and pretrain.init take."""

import json

from fedfr_jax.commands.flags import new_parser, parse_flags
from fedfr_jax.commands.network_flags import named

ABOUT = """\
Read weights of InsightFace's IResNets, TreB1eN-style IR networks (face.evoLVe, TFace,
AdaFace), FedFR's SphereFace or torchvision's ResNets and write them with our names.

--from=FILE is a .pt or .pth of torch.save, a .safetensors or a .npz; nothing of a
pickle is run. The network is found from names and shapes; --model and --image_shape
name another one, such as --model='{"name": "iresnet", "depth": 50}'
--image_shape=112,112,3."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr convert", ABOUT, epilog="")
    parser.add_argument("--from", dest="source", metavar="FILE", help="what to read")
    parser.add_argument("--to", metavar="FILE", help="a .safetensors, .npz or .pt")
    parser.add_argument("--model", type=json.loads, metavar="JSON")
    parser.add_argument("--image_shape", type=_shape, metavar="H,W,C")
    values = parse_flags(parser, argv)
    source = named(values.source, "from", parser.prog)
    target = named(values.to, "to", parser.prog)
    from fedfr_jax.deploy.convert import convert

    print(convert(source, target, model=values.model, image_shape=values.image_shape))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
