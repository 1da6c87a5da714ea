"""What benchmarks/soak.py runs, counts and says."""

import json
import sys

from benchmarks import faults, faults_page, soak

SUITE = {"what": "suite", "code": 0, "says": "", "passed": 9, "repeated": 0}
LAUNCH = {"what": "launch", "command": "./launch.sh -n 2 ddp", "seconds": 4.0, "code": 0, "says": ""}


def test_a_launch_that_fails_is_told_from_one_that_does_not():
    well = soak.launch([sys.executable, "-c", "print('fine')"])
    failed = soak.launch([sys.executable, "-c", "import sys; print('last words'); sys.exit(3)"])
    assert (well["code"], well["says"]) == (0, "")
    assert (failed["code"], failed["says"]) == (3, "last words")
    assert soak.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.1)[0] == 124


def test_load_leaves_no_process(monkeypatch):
    monkeypatch.setattr(soak, "HOLD", (0.0, 0.01))
    begun = []
    popen = soak.subprocess.Popen
    monkeypatch.setattr(soak.subprocess, "Popen", lambda *args: begun.append(popen(*args)) or begun[-1])
    with soak.Load(soak.random.Random(1)):
        deadline = soak.time.monotonic() + 30
        while not begun and soak.time.monotonic() < deadline:
            soak.time.sleep(0.01)
    assert begun and all(process.returncode is not None for process in begun)


def test_launches_are_drawn_from_all_recipes_and_modes():
    commands = [soak.command_of(i) for i in range(1, 501)]
    assert commands == [soak.command_of(i) for i in range(1, 501)]
    names = {command[5] for command in commands}
    assert {"data_parallel", "model_parallel", "pipeline_parallel", "hybrid_parallel", "train_data_tensor"} <= names
    assert {command[2] for command in commands} == {"2", "3", "4"}
    assert {command[-1] == "--graph" for command in commands} == {True, False}
    assert not any(command[5] == "zero_optimizer" and command[-1] == "--graph" for command in commands)


def test_it_resumes_and_the_page_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SOAK", tmp_path / "soak.jsonl")
    monkeypatch.setattr(faults, "make_page", lambda: None)
    monkeypatch.setattr(soak, "suite", lambda: {key: SUITE[key] for key in ("code", "says", "passed", "repeated")})
    monkeypatch.setattr(soak, "launch", lambda command: {key: LAUNCH[key] for key in ("seconds", "code", "says")})
    soak.main(["--suites", "1", "--launches", "2"])
    soak.main(["--suites", "2", "--launches", "3"])
    outcomes = faults_page.read_soak(tmp_path / "soak.jsonl")
    assert [one["what"] for one in outcomes] == ["suite", "launch", "launch", "suite", "launch"]
    assert [one["command"].split()[:2] for one in outcomes if "command" in one] == [["./launch.sh", "-n"]] * 3
    text = faults_page.soak(outcomes + [{**LAUNCH, "code": 139, "seconds": 9.0}, {**SUITE, "code": 1, "repeated": 2}])
    assert "The default suite, 3 times in a row: 1 failed.\n  2 calls were repeated" in text
    assert "4 launches" in text and "1 failed.\n  The median took 4.0 s, the longest 9.0 s" in text
    assert "`./launch.sh -n 2 ddp` ended with 139." in text
    assert faults_page.soak([]) == ""
    assert json.loads((tmp_path / "soak.jsonl").read_text().splitlines()[0])["passed"] == 9
