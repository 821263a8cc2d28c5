"""`python -m rpg_jax.study STUDY FLAGS`: each study is a module of its own, which defines its flags."""

import sys

from rpg_jax import study
from rpg_jax.run import cli

STUDIES = ("tradeoff", "oracle", "figures")


def main(words: list[str]) -> int:
    """Runs the study that the first word names, with the others as its flags; the exit status of a call without one."""
    name, *rest = words or [""]
    if name in STUDIES:
        if name == "tradeoff":
            from rpg_jax.study import tradeoff as chosen
        elif name == "oracle":
            from rpg_jax.study import oracle as chosen
        else:
            from rpg_jax.study import figures as chosen
        cli.run(chosen.main, [f"study {name}", *rest])
    if name in ("--help", "-h"):
        print((study.__doc__ or "").strip())
        return 0
    print(f"error: {name!r} is no study; write python -m rpg_jax.study {' | '.join(STUDIES)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
