"""meshtrain: tensor parallelism and ZeRO for any Flax model, on a named device mesh."""

from meshtrain.activations import name
from meshtrain.adapters import LinenCall, Model, from_function, from_linen, from_nnx
from meshtrain.attention import attention
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config, load
from meshtrain.engine import Engine, initialize
from meshtrain.errors import UserError
from meshtrain.layout import Layout, make_layout
from meshtrain.losses import chunked_cross_entropy, cross_entropy
from meshtrain.mesh import make_mesh, use_virtual_devices
from meshtrain.optim import make_optimizer, make_schedule
from meshtrain.precision import Precision
from meshtrain.state import TrainState
from meshtrain.trainer import Result, build, train

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "Config",
    "Engine",
    "Layout",
    "LinenCall",
    "Model",
    "Precision",
    "Result",
    "TrainState",
    "UserError",
    "attention",
    "build",
    "chunked_cross_entropy",
    "cross_entropy",
    "from_function",
    "from_linen",
    "from_nnx",
    "initialize",
    "load",
    "make_layout",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "name",
    "train",
    "use_virtual_devices",
]
