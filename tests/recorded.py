"""What docs/explore.json has recorded."""

import json

import numpy as np

from harness.explore import records

RECORDS = json.loads(records.PATH.read_text())
VALUES = {name: np.array(value) for name, value in RECORDS["value"].items()}
VALUES["out"] = VALUES["x"] @ VALUES["w"]


def in_mode(record, mode):
    """The record of a mode, "eager" or "graph"; that of a graph is left out where it is the same."""
    return record.get(mode, record["eager"])
