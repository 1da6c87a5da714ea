"""Run a script that was written for n ranks on one rank, unchanged."""

import contextlib
import os
from unittest import mock

import numpy as np
import oneflow as flow

Placement = flow.placement


class PlacementType(type):
    def __instancecheck__(cls, value):
        return isinstance(value, Placement)


class OnRank0(metaclass=PlacementType):
    """Stands for flow.placement: each placement becomes rank 0, in a mesh with as many axes."""

    def __new__(cls, type, ranks):  # the names of OneFlow's parameters
        return Placement(type, np.zeros((1,) * np.ndim(ranks), int).tolist())

    @staticmethod
    def all(device_type):
        return Placement(device_type, [0])


@contextlib.contextmanager
def on_one_rank(world_size):
    """Inside it, each placement is rank 0, and scripts are told that there are world_size ranks."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (flow, "placement", OnRank0),
            (flow.env, "all_device_placement", OnRank0.all),
            (flow.env, "get_world_size", lambda: world_size),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)))
        yield
