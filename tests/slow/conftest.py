import pytest

from tests.jobs import PLAIN


@pytest.fixture
def script(tmp_path):
    """A function that writes a script of a user's, mine.py in a folder of its own."""

    def write(lines, head=PLAIN):
        path = tmp_path / "mine.py"
        path.write_text(f"{head}{lines}\n")
        return path

    return write
