"""A reward of one's own, the example of docs/your_own_experiment.md."""

import re


def right(response, answer):
    """Whether the last number of the response is the answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(answer)
