"""The verdicts of the campaign of faults."""

import pytest
from faults.bench import Ended, explained

REFUSED = "error: config.json is not JSON; restore it\n"
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: x\n"


@pytest.mark.parametrize(("ended", "words"), [
    (Ended(0, ""), ""), (Ended(2, REFUSED), ""), (Ended(75, ""), "exit status 75"), (Ended(1, ""), "exit status 1"),
    (Ended(2, REFUSED + REFUSED), "2 lines that explain it"), (Ended(0, TRACEBACK), "a traceback: ValueError: x"),
    (Ended(0, "", [7]), "left 1 process"), (Ended(None, "RL 2/4\n"), "no end within the limit; its last line: RL 2/4"),
])  # fmt: skip
def test_verdicts(ended, words):
    assert words in explained(ended) and bool(words) == bool(explained(ended)) and not explained(Ended(75, ""), (75,))
