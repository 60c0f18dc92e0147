"""What every face experiment shares; an experiment's file overrides it."""

from ml_collections import ConfigDict

FEDAVG = {"public": False, "contrastive_weight": 0.0, "branch": None}
FEDFR = {}  # the defaults are the paper's


def get_config():
    """Sections are the keyword arguments of the functions that they configure."""
    config = ConfigDict()
    config.seed = 0
    config.data = ConfigDict()
    config.partition = ConfigDict()
    config.model = ConfigDict()
    config.pretrain = ConfigDict()
    config.federation = ConfigDict()
    config.evaluation = ConfigDict()
    config.methods = ConfigDict({"fedavg": FEDAVG, "fedfr": FEDFR})
    return config
