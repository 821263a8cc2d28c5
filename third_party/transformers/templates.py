"""Chat templates and tokenizers: ours against transformers', on every Jinja template of a folder.

python third_party/transformers/templates.py --peer_python=VENV/bin/python --templates=FOLDER

For each template transformers saves a tokenizer with it; both sides then load that folder, render conversations with
several options, turn the text into ids and random ids into text. What `environments.Observations` puts after a reply
must end those that go on after one as well. A refusal by both sides counts as the same.
"""

import argparse
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|turn|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "description": 'Adds <numbers> & "more"', "parameters": {}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei ≠ 2"}}}]
USER = {"role": "user", "content": 'What is 2 + 2?\n\nRemember to put your answer on its own line after "Answer:".'}
SYSTEM = {"role": "system", "content": "  You solve problems. "}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nAnswer: 4"}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, THOUGHT, {"role": "user", "content": " and 3 + 3? \n"}],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning_content": "\nTwo and two.\n"}],
    "thinking": [USER, {"role": "assistant", "content": "4", "thinking": "Two and two."}],
    "ends with assistant": [SYSTEM, USER, THOUGHT],
    "nothing said": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": CALL},
        {"role": "tool", "content": "4"},
    ],
    "results": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALL},
        *[{"role": "tool", "content": "4"}] * 2,
    ],
    "not in turn": [THOUGHT, USER, USER],
    "late system": [USER, SYSTEM],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Prove"}, {"type": "text", "text": "it."}]}],
    "characters": [
        {"role": "user", "content": "∑ ‘q’ <b>&amp;</b> \u2581 \U0001f600 e\u0301\t{{ 7 * 7 }} {% x %}<|im_end|>\r\n"}
    ],
    "empty": [{"role": "user", "content": ""}],
}
OPTIONS = [
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"add_generation_prompt": False},
    {"tools": TOOLS},
    {"tools": TOOLS, "tools_in_user_message": False, "date_string": "1 Jan 2030"},
    {"builtin_tools": ["code_interpreter", "add"]},
]
DATE = {"date": "1 May 2030", "date_string": "1 May 2030"}  # strftime_now is of one day on our side, today on theirs
UNKNOWN = "?"  # a refusal
REPLIES = "It is four.", "<think>\nTwo and two.\n</think>\n\nIt is four."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer_python", default=sys.executable, help="the Python that has transformers")
    parser.add_argument("--templates", default=str(ROOT / "tests/data/templates"), help="folder of *.jinja files")
    parser.add_argument("--json", metavar="FILE", help="write the differences there as well")
    parser.add_argument("--worker", nargs=2, metavar=("TEMPLATES", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return theirs(*map(pathlib.Path, args.worker))
    if not list(pathlib.Path(args.templates).glob("*.jinja")):
        parser.error(f"no *.jinja files in {args.templates}")
    sys.path.insert(0, str(ROOT))
    from rpg_jax.data import load_tokenizer
    from rpg_jax.environments import Observations

    with tempfile.TemporaryDirectory() as out:
        command = [args.peer_python, __file__, "--worker", args.templates, out]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 2:
            print(
                f"transformers is not installed in {args.peer_python}: install {pathlib.Path(__file__).parent}"
                "/requirements.txt into a virtual environment and pass its Python as --peer_python",
                file=sys.stderr,
            )
            sys.exit(2)
        if done.returncode:
            sys.exit(f"transformers failed:\n{done.stderr[-2000:]}")
        wrong = {}  # case -> [ours, theirs]
        for folder in sorted(pathlib.Path(out).iterdir()):
            expected = json.loads((folder / "expected.json").read_text())
            found = answers(load_tokenizer(folder), Observations)
            for key in expected:
                if found[key] != expected[key]:
                    wrong[f"{folder.name} {key}"] = [found[key], expected[key]]
            same = sum(found[key] == expected[key] for key in expected)
            refused = sum(answer == UNKNOWN for answer in expected.values())
            print(
                f"{folder.name:32s} {same} of {len(expected)} the same ({refused} refused by transformers)", flush=True
            )
        for key, (ours, peer) in wrong.items():
            print(f"DIFFERENT {key}\n  ours   {ours!r}\n  theirs {peer!r}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(wrong, indent=1))
    sys.exit(bool(wrong))


def answers(tokenizer, observations):
    """What a tokenizer of ours says of every case, and what follows a reply by `observations`, made once for each role
    and set of options: it knows neither the conversation nor the reply."""
    found, made = {}, {}
    for name, messages, options in cases():
        try:
            text = tokenizer.render(messages, **options)
            found[f"{name} text"], found[f"{name} ids"] = text, tokenizer.encode_prompt(text)
        except ValueError:
            found[f"{name} text"] = found[f"{name} ids"] = UNKNOWN
    for name, role, messages, options in continued():
        try:
            tokenizer.render(messages, **options)
            key = json.dumps([role, options])
            made[key] = made.get(key) or observations(tokenizer, role, options)
            found[name] = made[key](messages[-1]["content"], None)
        except ValueError:
            found[name] = UNKNOWN
    found |= {f"decode {i}": tokenizer.decode(ids) for i, ids in enumerate(random_ids(tokenizer.vocab_size))}
    ids = ("bos_id", "eos_id", "pad_id", "vocab_size")
    return found | {"ids": [getattr(tokenizer, key) for key in ids]}


def theirs(templates, out):
    """Saves a tokenizer with each template and what transformers says of every case (in the peer's Python)."""
    try:
        import transformers
    except ImportError:
        sys.exit(2)
    for path in sorted(templates.glob("*.jinja")):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=trained(), bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
            extra_special_tokens=SPECIAL[3:], chat_template=path.read_text(),
        )  # fmt: skip
        tokenizer.save_pretrained(out / path.stem)
        found = {}
        for name, messages, options in cases():
            options = {"add_generation_prompt": True, **options}
            try:
                found[f"{name} text"] = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                found[f"{name} ids"] = tokenizer.apply_chat_template(messages, **options)["input_ids"]
            except Exception:  # whatever a template raises
                found[f"{name} text"] = found[f"{name} ids"] = UNKNOWN
        for name, _, messages, options in continued():
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
                found[name] = tokenizer(text.split(REPLIES[0])[1], add_special_tokens=False)["input_ids"]
            except Exception:
                found[name] = UNKNOWN
        for i, ids in enumerate(random_ids(len(tokenizer))):
            found[f"decode {i}"] = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found["ids"] = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)]
        (out / path.stem / "expected.json").write_text(json.dumps(found))


def trained():
    """A byte-level tokenizer as those of Qwen and Llama 3 are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(CONVERSATIONS, ensure_ascii=False)], trainer)
    return tokenizer


def cases():
    """(name, messages, options) of every conversation under every set of options."""
    for name, messages in CONVERSATIONS.items():
        for options in OPTIONS:
            yield f"{name} {json.dumps(options)}", messages, DATE | options


def continued():
    """(name, role, messages, options) of every conversation that goes on: a reply, and an observation of that role."""
    for name, messages, options in cases():
        if "add_generation_prompt" not in options:
            for number, role in itertools.product(range(len(REPLIES)), ("user", "tool")):
                reply, said = {"role": "assistant", "content": REPLIES[number]}, {"role": role, "content": " higher\n"}
                yield f"{name}, reply {number}, {role}", role, [*messages, reply, said], options


def random_ids(vocab_size):
    """Lists of ids, most of whose bytes are not UTF-8."""
    numbers = random.Random(0)
    return [[numbers.randrange(vocab_size) for _ in range(40)] for _ in range(50)]


if __name__ == "__main__":
    main()
