import pytest

from tests.jobs import PLAIN, undisturbed


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """What a job of elastic_training.py without a fault saves after step 6, in eager mode."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a script of a user's, mine.py in a folder of its own."""

    def write(lines, head=PLAIN):
        path = tmp_path / "mine.py"
        path.write_text(f"{head}{lines}\n")
        return path

    return write
