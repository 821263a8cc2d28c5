"""Rewriting: replace each letter of a word by the rules until no rule applies. Not mathematics: look up, chain, stop.

    Rewrite b,f by f>c,b>e,c>a
    b>e
    f>c>a
    Answer: e,a

Each line follows one letter of the word to the end.
"""

import json
import string

from rpg_jax import InputError


def generate(rng, *, letters=8, rules=5, word=2, depth=3):
    """One problem: a word of `word` letters and `rules` rules, each letter rewritten between 1 and `depth` times.

    Letters are the first `letters` of the alphabet. Each has at most one rule, and no rules form a cycle: the result is
    unique. Raises ValueError for settings under which no problem exists.
    """
    if not 2 <= letters <= 26:
        raise InputError(f"task 'rewriting': {letters=} must be between 2 and 26")
    if not 1 <= rules < letters:
        raise InputError(f"task 'rewriting': {rules=} must be between 1 and letters - 1 = {letters - 1}")
    if not (word and depth):
        raise InputError(f"task 'rewriting': {word=} and {depth=} must be at least 1")
    # Rules only lead forward in a random order of the letters, hence no cycles.
    order = [string.ascii_lowercase[i] for i in rng.permutation(letters)]
    rewrite = {order[i]: order[rng.integers(i + 1, letters)] for i in rng.permutation(letters - 1)[:rules]}
    chains = {}
    for letter in reversed(order):
        chains[letter] = letter + (">" + chains[rewrite[letter]] if letter in rewrite else "")
    starts = [letter for letter in rewrite if chains[letter].count(">") <= depth]
    start = [starts[i] for i in rng.integers(len(starts), size=word)]
    result = ",".join(chains[letter][-1] for letter in start)
    prompt = f"Rewrite {','.join(start)} by {','.join(f'{a}>{b}' for a, b in rewrite.items())}\n"
    solution = "".join(f"{chains[letter]}\n" for letter in start) + f"Answer: {result}"
    return prompt, solution, json.dumps(result)


def canonical(prompt: str) -> str:
    """The word and the sorted rules."""
    _, word, _, rules = prompt.split()
    return f"{word} {sorted(rules.split(','))}"
