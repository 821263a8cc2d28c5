import json
import random


class Hot:
    """The policy finds a number between the two that its problem gives, by what its guesses are called."""

    def __init__(self, problem, seed):
        self.number = random.Random(seed).randint(*json.loads(problem["answer"]))

    def reset(self):
        return None

    def step(self, action):
        digits = "".join(character for character in action if character.isdecimal())
        distance = abs(int(digits[:9] or -99) - self.number)
        return (None, 1.0) if distance == 0 else ("hot\n" if distance < 3 else "cold\n", 0.0)
