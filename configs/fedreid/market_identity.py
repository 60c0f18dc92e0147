"""FedReID on Market-1501, six clients with equal numbers of people of their own.

fedfr train --config=configs/fedreid/market_identity.py --workdir=runs/market_identity

Not measured as a whole. A client sees its people by all cameras.
"""

from fedfr_jax.configs import base


def get_config():
    """As many clients as Market-1501 has cameras, and no person with two of them."""
    scenario = {"name": "by_identity", "num_clients": 6, "seed": 0}
    return base.fedreid_market(scenario).lock()
