"""Lists the commands: `python -m rpg_jax`. Each is a module of its own, `python -m rpg_jax.COMMAND`."""

import ast
import difflib
import pathlib
import signal
import sys

COMMANDS = ("train", "evaluate", "prepare", "convert", "verify", "tradeoff", "plan", "sweep", "report", "look")


def main(words: list[str]) -> int:
    """Prints the list, or an error for a word; the exit status."""
    if words and words[0] not in ("--help", "-h"):
        known = words[0] in COMMANDS
        near = difflib.get_close_matches(words[0], COMMANDS, 1, 0.4)
        one = words[0] if known else near[0] if near else "COMMAND"
        there = f"write python -m rpg_jax.{one}" if known or near else f"there are: {', '.join(COMMANDS)}"
        print(f"error: {'' if known else f'there is no command {words[0]!r}; '}{there}", file=sys.stderr)
        return 2
    print("python -m rpg_jax.COMMAND --help says what a command does and which flags it has.\n")
    for name in COMMANDS:
        file = pathlib.Path(__file__).with_name(f"{name}.py")
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        print(f"  {name:9} {(text or '').splitlines()[0]}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # behind `| head`
    sys.exit(main(sys.argv[1:]))
