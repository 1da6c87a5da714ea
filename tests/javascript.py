"""Runs the scripts of docs/explore.html outside a browser, in QuickJS."""

import json
import subprocess

from tests.cases import ROOT
from tests.environments import programs

SCRIPTS = ROOT / "harness" / "explore"
PROGRAM = """
import json, quickjs, sys
order = json.load(sys.stdin)
print(quickjs.Context().eval(order["script"]))
"""


def evaluate(names, expression, argument=None):
    """The value of a JavaScript expression after these scripts. In it `argument` is a value that JSON can hold."""
    scripts = [(SCRIPTS / name).read_text() for name in names]
    value = f"(function (argument) {{ return ({expression}); }})({json.dumps(argument)})"
    order = {"script": "\n".join([*scripts, f"JSON.stringify({value})"])}
    command = [str(programs("javascript") / "python"), "-c", PROGRAM]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run(command, input=json.dumps(order), timeout=120, **output)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
