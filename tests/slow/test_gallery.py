"""Every command on the page of the recipes prints what the page shows. They run while other tests do."""

import re
import shlex
from pathlib import Path

import pytest

from oneflow_cookbook.start import options
from tests.cases import PROOFS
from tests.cases.ladder import MAIN
from tests.cases.mains import is_like
from tests.jobs import LAUNCH, Run
from tests.markdown import GALLERY, sections

SECTIONS = {section.recipe: section for section in sections(GALLERY)}
WHOLE_JOBS = [name for name, proof in PROOFS.items() if proof.whole_job]


def words_of(section):
    return shlex.split(section.command)[1:]


def early_jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")  # for the checkpoints that elastic_training saves
    return {("gallery", name): Run(LAUNCH, *words_of(SECTIONS[name]), cwd=folder) for name in WHOLE_JOBS}


def background_calls(item):
    """What a test needs: see pools.py."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    if name is None or name in WHOLE_JOBS:
        return {}
    command = options.checked(words_of(SECTIONS[name]))  # as launch.sh reads it

    path = str(Path(command.script).resolve())  # now, as other tests change the current folder while it runs

    def call(pool):
        return pool.call(MAIN, path=path, arguments=command.arguments)

    return {("gallery", name): (command.nproc_per_node, call)}


def lines_of(results):
    """What the ranks of a pool printed, as launch.sh marks it."""
    assert [(code, err) for code, _, err in results] == [(0, "")] * len(results)
    prefixes = [f"[{rank}] " for rank in range(len(results))] if len(results) > 1 else [""]
    return [f"{prefix}{line}" for prefix, (_, out, _) in zip(prefixes, results) for line in out.splitlines()]


def by_rank(lines):
    """ "[rank] " -> its lines in order; a job of a single rank marks no line."""
    ranks = {}
    for line in lines:
        ranks.setdefault(re.match(r"(\[\d+] )?", line).group(), []).append(line)
    return ranks


def first_not_printed(shown, printed):
    """The first line of a page that a job did not print, or not in this order on its rank; None if there is none."""
    printed = by_rank(printed)
    for rank, lines in by_rank(shown).items():
        rest = iter(printed.get(rank, []))
        for line in lines:
            if not any(is_like(line, candidate) for candidate in rest):
                return line
    return None


@pytest.mark.parametrize("name", SECTIONS)
def test_command_prints_what_the_page_shows(measured, early, name):
    if name in WHOLE_JOBS:
        job = early["gallery", name].wait()
        assert job.code == 0, job.err
        printed = job.out.splitlines()
    else:
        printed = lines_of(measured("gallery", name))
    line = first_not_printed(SECTIONS[name].output, printed)
    assert line is None, f"{SECTIONS[name].command} does not print {line!r}, but:\n" + "\n".join(printed)
