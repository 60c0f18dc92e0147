# The public names: what type checkers see, and what __init__.py loads when asked.

from fedfr_jax import convolutions as convolutions
from fedfr_jax.api import FederatedDataset as FederatedDataset
from fedfr_jax.api import RunState as RunState
from fedfr_jax.api import evaluate as evaluate
from fedfr_jax.api import init as init
from fedfr_jax.api import resume as resume
from fedfr_jax.api import run_round as run_round
from fedfr_jax.api import run_rounds as run_rounds
from fedfr_jax.api import save as save
from fedfr_jax.counterfactual import Replay as Replay
from fedfr_jax.counterfactual import replay as replay
from fedfr_jax.data import partition as partition
from fedfr_jax.data.augment import AUGMENTS as AUGMENTS
from fedfr_jax.data.augment import build_augment as build_augment
from fedfr_jax.data.augment import register_augment as register_augment
from fedfr_jax.data.batching import Batching as Batching
from fedfr_jax.data.partition import PARTITIONS as PARTITIONS
from fedfr_jax.data.partition import register_partition as register_partition
from fedfr_jax.data.sources import SOURCES as SOURCES
from fedfr_jax.data.sources import open_source as open_source
from fedfr_jax.data.sources import register_source as register_source
from fedfr_jax.deploy.trained_model import TrainedModel as TrainedModel
from fedfr_jax.federated import aggregation as aggregation
from fedfr_jax.federated import privacy as privacy
from fedfr_jax.federated.aggregation import AGGREGATORS as AGGREGATORS
from fedfr_jax.federated.aggregation import register_aggregator as register_aggregator
from fedfr_jax.federated.aggregation.clip import (
    with_update_checks as with_update_checks,
)
from fedfr_jax.federated.aggregation.contract import (
    with_aggregation as with_aggregation,
)
from fedfr_jax.federated.algorithms import ALGORITHMS as ALGORITHMS
from fedfr_jax.federated.algorithms import register_algorithm as register_algorithm
from fedfr_jax.federated.algorithms.clusters import fesem as fesem
from fedfr_jax.federated.algorithms.clusters import finch as finch
from fedfr_jax.federated.algorithms.clusters import hypcluster as hypcluster
from fedfr_jax.federated.algorithms.clusters import ifca as ifca
from fedfr_jax.federated.algorithms.corrections import feddane as feddane
from fedfr_jax.federated.algorithms.corrections import mime as mime
from fedfr_jax.federated.algorithms.corrections import mimelite as mimelite
from fedfr_jax.federated.algorithms.corrections import scaffold as scaffold
from fedfr_jax.federated.algorithms.fair import afl as afl
from fedfr_jax.federated.algorithms.fair import qfedavg as qfedavg
from fedfr_jax.federated.algorithms.fedavg import fedavg as fedavg
from fedfr_jax.federated.algorithms.fedfr import fedfr as fedfr
from fedfr_jax.federated.algorithms.fedmargin import fedmargin as fedmargin
from fedfr_jax.federated.algorithms.fedreid import cdw as cdw
from fedfr_jax.federated.algorithms.fedreid import kd as kd
from fedfr_jax.federated.algorithms.one_shot import one_shot as one_shot
from fedfr_jax.federated.algorithms.personal import top_blocks as top_blocks
from fedfr_jax.federated.algorithms.personal import (
    with_batch_stats as with_batch_stats,
)
from fedfr_jax.federated.algorithms.personal import (
    with_personal_layers as with_personal_layers,
)
from fedfr_jax.federated.algorithms.personal_models import apfl as apfl
from fedfr_jax.federated.algorithms.personal_models import ditto as ditto
from fedfr_jax.federated.algorithms.personal_models import perfedavg as perfedavg
from fedfr_jax.federated.algorithms.personal_models import pfedme as pfedme
from fedfr_jax.federated.algorithms.phases import fedrep as fedrep
from fedfr_jax.federated.algorithms.proximal import feddyn as feddyn
from fedfr_jax.federated.algorithms.proximal import fednova as fednova
from fedfr_jax.federated.algorithms.proximal import fedprox as fedprox
from fedfr_jax.federated.algorithms.proximal import moon as moon
from fedfr_jax.federated.algorithms.spreadout import fedaws as fedaws
from fedfr_jax.federated.algorithms.submodels import with_products as with_products
from fedfr_jax.federated.algorithms.submodels import with_ranks as with_ranks
from fedfr_jax.federated.algorithms.submodels import with_widths as with_widths
from fedfr_jax.federated.attacks import ATTACKS as ATTACKS
from fedfr_jax.federated.attacks import backdoor_rate as backdoor_rate
from fedfr_jax.federated.attacks import register_attack as register_attack
from fedfr_jax.federated.attacks import with_attack as with_attack
from fedfr_jax.federated.local import build_local_training as build_local_training
from fedfr_jax.federated.local import sgd as sgd
from fedfr_jax.federated.local import step_decay as step_decay
from fedfr_jax.federated.privacy import Privacy as Privacy
from fedfr_jax.federated.privacy import private as private
from fedfr_jax.federated.sampling import Sampling as Sampling
from fedfr_jax.federated.systems.asynchronous import fedasync as fedasync
from fedfr_jax.federated.systems.asynchronous import fedbuff as fedbuff
from fedfr_jax.federated.systems.devices import (
    diurnal_availability as diurnal_availability,
)
from fedfr_jax.federated.systems.devices import (
    log_normal_profiles as log_normal_profiles,
)
from fedfr_jax.federated.systems.devices import (
    read_availability as read_availability,
)
from fedfr_jax.federated.systems.devices import read_profiles as read_profiles
from fedfr_jax.federated.systems.failures import Dropout as Dropout
from fedfr_jax.federated.systems.footprint import footprint as footprint
from fedfr_jax.federated.systems.sampling import Oort as Oort
from fedfr_jax.federated.systems.sampling import PowerOfChoice as PowerOfChoice
from fedfr_jax.federated.systems.settings import Systems as Systems
from fedfr_jax.federated.variable_split import client_output as client_output
from fedfr_jax.loading import load_model as load_model
from fedfr_jax.losses import LOSSES as LOSSES
from fedfr_jax.losses import masked_mean as masked_mean
from fedfr_jax.losses import register_loss as register_loss
from fedfr_jax.mesh import make_mesh as make_mesh
from fedfr_jax.models import MODELS as MODELS
from fedfr_jax.models import adapters as adapters
from fedfr_jax.models import register_model as register_model
from fedfr_jax.models.adapters import ADAPTERS as ADAPTERS
from fedfr_jax.models.adapters import merge_adapter as merge_adapter
from fedfr_jax.models.adapters import register_adapter as register_adapter
from fedfr_jax.models.adapters import with_adapter as with_adapter
from fedfr_jax.models.frozen import moving_variables as moving_variables
from fedfr_jax.models.frozen import whole_variables as whole_variables
from fedfr_jax.models.frozen import with_frozen as with_frozen
from fedfr_jax.models.peft_folder import save_adapter as save_adapter
from fedfr_jax.models.torch_module import from_torch as from_torch
from fedfr_jax.models.torch_module import to_torch as to_torch
from fedfr_jax.runs.trackers import SINKS as SINKS
from fedfr_jax.runs.trackers import register_sink as register_sink
from fedfr_jax.tasks import TASKS as TASKS
from fedfr_jax.tasks import register_task as register_task
from fedfr_jax.types import Aggregator as Aggregator
from fedfr_jax.types import Algorithm as Algorithm
from fedfr_jax.types import ClientOutput as ClientOutput
from fedfr_jax.types import LocalTraining as LocalTraining
from fedfr_jax.types import Model as Model
from fedfr_jax.types import Source as Source
from fedfr_jax.types import Summary as Summary

__version__: str
