"""Event: a call of OneFlow, as a Recorder records it. Does not import OneFlow."""

from dataclasses import dataclass, field
from typing import Optional

from oneflow_cookbook.measure.sbp import Layout

UNNAMED = "·"  # shown for a tensor without a name
SCRIPT, GRADIENT, ONEFLOW = "script", "gradient", "OneFlow"  # why a tensor moves


@dataclass
class Event:
    """A call of OneFlow. inputs, outputs: tensors as tensors.describe gives them."""

    kind: str  # as in calls.PLACES
    name: str  # of the function; of a graph its class
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    line: int = 0  # of the script; 0 outside of it
    text: str = ""  # of that line
    layer: str = ""  # path of the innermost module around it, such as "blocks.0.up"; "" outside of modules
    sent: Optional[int] = None  # bytes that this rank sent for it, if measured
    times: int = 1  # how often the script made the call; `sent` is of the first time
    facts: dict = field(default_factory=dict)  # what else is known, by kind of call


def layout(tensor):
    """The Layout of a described tensor."""
    return Layout(tensor["sbp"], tensor["ranks"])
