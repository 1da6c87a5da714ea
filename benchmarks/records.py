"""What bench has measured: docs/performance.json, a record for each part and CPU.

A record: {"date", "minutes", "machine", "commit", "measured": digest of the files that it times, "data"}.
"""

import datetime
import hashlib
import io
import json
import subprocess
import time
import tokenize
from pathlib import Path

from harness.start.recipe import path_of

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "docs" / "performance.json"
LAYERS = ("train_data_parallel", "train_model_parallel", "train_pipeline", "train_data_tensor", "fully_sharded")
RECIPES = {  # part -> the recipes that it times
    "training": LAYERS,
    "limit": ("train_model_parallel",),
    "busy": LAYERS,
    "gpt": ("gpt",),
    "plan": ("gpt",),
    "levers": LAYERS[:3],
    "scaling": LAYERS[:2],
    "sizes": LAYERS[:4],
    "idle": ("train_pipeline",),
    "timeline": ("train_pipeline",),
}
PACKAGES = ("requirements.txt", "benchmarks/requirements-peers.txt")


def code(source):
    """The tokens of a Python file that its speed depends on: without comments, docstrings, blank lines and main."""
    kept, layout = [], (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        alone = token.type == tokenize.NEWLINE and kept and kept[-1][0] == tokenize.STRING
        if alone and (len(kept) == 1 or kept[-2][0] in layout):  # a statement that is only a string
            kept.pop()
        else:
            kept.append((token.type, token.string))
    texts = [text for _, text in kept]
    mains = [i for i in range(1, len(texts)) if texts[i - 1 : i + 1] == ["def", "main"]]
    return "\n".join(texts[: mains[0]] if mains else texts)  # main is the last function of a recipe


def digest(part):
    """Of the code of the recipes that a part times, and of the versions of the packages."""
    recipes = [code(path_of(name).read_text()) for name in RECIPES.get(part, ())]
    packages = [(ROOT / name).read_text() for name in PACKAGES]
    return hashlib.sha256("\n".join(recipes + packages).encode()).hexdigest()[:16]


def commit():
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def measured(name, part, machine, say):
    """The record of one part; part: a function of `say` that measures it."""
    begin = time.monotonic()
    data = json.loads(json.dumps(part(say)))
    minutes = round((time.monotonic() - begin) / 60, 1)
    facts = {"date": str(datetime.date.today()), "minutes": minutes, "machine": machine, "commit": commit()}
    return {**facts, "measured": digest(name), "data": data}


def current(kept):
    """Without the records of what has changed since, {part: {CPU: record}}."""
    found = {}
    for name, by_cpu in kept.items():
        fresh = {cpu: record for cpu, record in by_cpu.items() if record["measured"] == digest(name)}
        if fresh:
            found[name] = fresh
    return found


def added(kept, name, record):
    """With a new record in the place of an older one of the same CPU."""
    by_cpu = {**kept.get(name, {}), record["machine"]["model"]: record}
    return {**kept, name: dict(sorted(by_cpu.items()))}


def read():
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def write(found):
    FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
