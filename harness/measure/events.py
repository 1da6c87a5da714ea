"""What a Recorder records: an Event for each call by which a script uses OneFlow. Needs no OneFlow itself."""

from dataclasses import dataclass, field
from typing import Optional

from harness.measure.sbp import Layout


@dataclass
class Event:
    """One call. Tensors are as tensors.describe gives them."""

    kind: str  # as in calls.PLACES
    name: str  # of the function that was called; of a graph its class
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    lazy: bool = False  # whether it was made while a graph was built
    line: int = 0  # of the script; 0 if it is not one of its own
    text: str = ""  # of that line
    layer: str = ""  # the path of the innermost module around it, such as "blocks.0.up"; "" outside of all modules
    sent: Optional[int] = None  # bytes that left this rank for it, if it was measured
    times: int = 1  # how often it was made; `sent` is of the first time
    facts: dict = field(default_factory=dict)  # what else there is to say of this kind


def layout(tensor):
    """The Layout of a described tensor."""
    return Layout(tensor["sbp"], tensor["ranks"])
