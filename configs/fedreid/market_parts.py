"""FedReID on Market-1501 in four parts of very unequal size, as by-dataset is.

fedfr train --config=configs/fedreid/market_parts.py --workdir=runs/market_parts

Not measured as a whole. A part is of one camera or two: 3,782, 3,132, 1,127 and 601
images before people are tested or made public.
"""

from fedfr_jax.configs import base

PARTS = ((5, 6), (1, 3), (2,), (4,))  # cameras of each client


def get_config():
    """Four clients, the largest with six times the images of the smallest."""
    return base.fedreid_market({"name": "by_camera", "camera_groups": PARTS}).lock()
