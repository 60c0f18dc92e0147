"""FedReID on Market-1501, a client for each of its six cameras, in small.

fedfr train --config=configs/fedreid/market_camera.py --workdir=runs/market_camera

Not measured as a whole. People are with several clients, as several cameras see them.
"""

from fedfr_jax.configs import base


def get_config():
    """Six cameras of very different size: 600 to 2,200 images."""
    return base.fedreid_market({"name": "by_camera"}).lock()
