"""Guess: find a number by asking whether it is higher or lower."""

import random
import re


class Guess:
    """Each action is a guess, and the right one is rewarded by 1.

    A problem's answer is the number, or the lowest and the highest that it may be, of which the seed draws one.
    """

    def __init__(self, problem, seed):
        bounds = [int(number) for number in re.findall(r"\d+", problem["answer"])]
        self.number = random.Random(seed).randint(bounds[0], bounds[-1])

    def reset(self):
        return None

    def step(self, action):
        said = re.search(r"(?<!\d)\d{1,9}(?!\d)", action)
        if said is None:
            return "no number\n", 0.0
        if int(said[0]) == self.number:
            return None, 1.0
        return ("higher\n" if int(said[0]) < self.number else "lower\n"), 0.0
