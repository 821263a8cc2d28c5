class Hot:
    """The answer of a problem is a number; the policy finds it by what it is told of its guesses."""

    def __init__(self, problem, seed):
        self.number = int(problem["answer"])

    def reset(self):
        return None

    def step(self, action):
        digits = "".join(character for character in action if character.isdecimal())
        distance = abs(int(digits[:9] or -99) - self.number)
        return (None, 1.0) if distance == 0 else ("hot" if distance < 3 else "cold", 0.0)
