"""What counts as a change of a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfless import Run
from selfless.runner.sources import code_of, is_made_from, made_from

NETWORK = '''"""A network of one's own."""

from torch import nn


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self, outputs, input_shape):
        """Make them."""
        text = "a # in a text, and ä"  # a comment
        super().__init__(nn.Flatten(), nn.Linear(4, outputs))
        self.text = text
'''


@pytest.fixture
def run(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of the network in nets.py, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Run(stream=tasks_npz, model="nets:Net")


def digest(text: str, run: Run) -> str:
    """Return the digest of the run with this text in nets.py."""
    Path("nets.py").write_text(text, encoding="utf-8", newline="")
    return made_from(run)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Two layers."""', '"""Two layers,\n    as everybody has them."""'),
        ('    """Two layers."""\n\n', ""),
        ('"""Make them."""', '"""Mäke them."""  # ü'),
        ("  # a comment", ""),
        ("  # a comment", "  # other words: ä, ö, \u2028 and \x0c"),
        ("\n\n\n", "\n\n\n\n# a line of its own\n\n"),
        ("\n", "\r\n"),
        ("from torch import nn", "from torch import nn   "),
        ('"""A network', '\ufeff"""A network'),
    ],
)
def test_comments_and_docstrings_do_not_count(old: str, new: str, run: Run) -> None:
    assert digest(NETWORK.replace(old, new), run) == digest(NETWORK, run)


@pytest.mark.parametrize(
    ("old", "new"),
    [("nn.Linear(4", "nn.Linear(5"), ("a # in", "a # is in"), ("self.text = text", "if text:\n            self.text = text")],
)
def test_code_and_other_texts_count(old: str, new: str, run: Run) -> None:
    assert digest(NETWORK.replace(old, new), run) != digest(NETWORK, run)


def test_lines_within_a_string_count() -> None:
    """Blank lines and spaces at the ends of lines are part of a string, also where it is formatted."""
    texts = [
        'x = """a\n\nb"""',
        'x = """a\nb"""',
        'x = """a \nb"""',
        'x = f"""a\n\n{1}"""',
        'x = f"""a\n{1}"""',
        'x = """a\n\n"""',
        'x = """a\n"""',
    ]
    assert len({code_of(text) for text in texts}) == len(texts)
    assert code_of('x = """a\n\nb"""  \n\n\ny = 1') == 'x = """a\n\nb"""\ny = 1'
    assert code_of("x = 1 \\\n\n-2") != code_of("x = 1 \\\n-2")


def test_the_encoding_of_a_file_counts(run: Run) -> None:
    """The same bytes are another text in another encoding."""
    found = []
    for first in (b"# coding: latin-1\n", b"# coding: utf-8\n", b"# another comment\n"):
        Path("nets.py").write_bytes(first + 'text = "ä"\n'.encode())
        found.append(made_from(run))
    assert found[0] != found[1] == found[2]


def test_a_docstring_that_is_read_counts() -> None:
    assert code_of('"""One."""\nx = __doc__\n') != code_of('"""Two."""\nx = __doc__\n')


@pytest.mark.parametrize("broken", ["def f(:\n    pass\n", "x = '''not closed\n", "\x00", "if True:\n        a = 1\n    b = 2\n"])
def test_of_a_file_that_is_no_python_every_letter_counts(broken: str, run: Run) -> None:
    assert digest(broken, run) != digest(broken + "# more\n", run)


def test_the_code_of_a_file() -> None:
    assert code_of('"""Doc."""\n# why\ndef f(x):  # what\n    """Doc\n    of f."""\n\n    return x\n') == "def f(x):\n    return x"
    assert code_of('x = 1\n"""No docstring: it is not first."""\n') == 'x = 1\n"""No docstring: it is not first."""'


def test_a_digest_of_the_file_as_it_was_written_is_still_known(run: Run) -> None:
    """Older versions recorded it."""
    now = digest(NETWORK, run)
    older = made_from(run, as_written=True)
    assert older != now
    assert is_made_from(run, now)
    assert is_made_from(run, older)
    digest(NETWORK + "# a comment\n", run)
    assert is_made_from(run, now)
    assert not is_made_from(run, older)
