"""Errors that are the user's to fix: one line that says what, where, and what to do.

The command line prints these without a traceback; anything else that escapes is a bug in meshtrain.
"""


class UserError(ValueError):
    """Base of every error that a user can cause and cure. The message is complete: what, where, what to do."""


class ConfigError(UserError):
    """A config file, a `key=value` override or an argument is wrong."""


class MeshError(UserError):
    """The devices cannot be arranged as asked."""


class RuleError(UserError):
    """A PartitionSpec rule does not fit the mesh or the parameters."""


class ModelError(UserError):
    """A model cannot be built, or does not have what meshtrain needs of it."""


class DataError(UserError):
    """A data source is missing, empty, too short or holds what the model cannot take."""


class TrainingError(UserError):
    """Training cannot go on: its loss or gradients are not finite."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or does not fit the run."""


class PlanError(UserError):
    """A step cannot be compiled for machines that are not here, or its figures cannot be had."""


class LaunchError(UserError):
    """The processes of a job do not find each other, or are not what the config asks for."""


class PeerError(LaunchError):
    """Another process of the job failed or was lost; `exit_code` is what this one ends with."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
