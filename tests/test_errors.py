"""Every error that is the user's to fix is one class, so that the command line can tell it from a bug."""

import inspect

import pytest

import meshtrain
from meshtrain import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value)]


def test_there_are_errors_for_every_part() -> None:
    names = {"UserError", "ConfigError", "MeshError", "RuleError", "ModelError", "DataError"}
    names |= {"TrainingError", "CheckpointError", "PlanError", "LaunchError", "PeerError"}
    assert {cls.__name__ for cls in CLASSES} == names


@pytest.mark.parametrize("cls", CLASSES)
def test_each_is_a_documented_user_error_and_a_value_error(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.UserError) and issubclass(cls, ValueError)
    assert cls.__doc__
    error = (
        errors.PeerError("what, where, what to do", 76) if cls is errors.PeerError else cls("what, where, what to do")
    )
    assert str(error) == "what, where, what to do"


def test_one_kind_is_not_caught_as_another() -> None:
    for cls in CLASSES[1:]:
        assert cls.__mro__[1] is (errors.LaunchError if cls is errors.PeerError else errors.UserError)


def test_the_base_class_is_public() -> None:
    assert meshtrain.UserError is errors.UserError
