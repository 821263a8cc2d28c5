"""A Hugging Face folder's settings of a tokenizer beside the vocabulary: special tokens, stop ids, chat template."""

import json
import pathlib
from collections.abc import Callable

from rpg_jax import InputError
from rpg_jax.data.chat import PLAIN, ChatTemplate

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def read_text(path: pathlib.Path) -> str:
    """The text of a file; raises ValueError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def read_json(path: pathlib.Path) -> dict:
    """The JSON object in a file, {} if there is no file; raises ValueError for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not JSON, or cut short: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def special_tokens(folder: pathlib.Path, token_to_id: Callable[[str], int | None]) -> tuple[dict[str, str], list[str]]:
    """({"bos_token": "<s>", …} of the named tokens, all special tokens) of `special_tokens_map.json` and
    `tokenizer_config.json`, which has precedence. Raises ValueError, with file and key, for what is no known token."""
    named, extra = {}, {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_json(folder / file)
        named |= {key: (settings[key], file) for key in _NAMED if settings.get(key) is not None}
        extra |= {key: (settings[key], file) for key in _EXTRA if settings.get(key) is not None}
    for key, (tokens, file) in extra.items():
        if not isinstance(tokens, (list, dict)):
            raise InputError(f"{folder / file}: {key} is {tokens!r:.60}, expected a list of tokens")
        extra[key] = [(token, file) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]

    def content(key, token, file):
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or not text:
            raise InputError(f"{folder / file}: {key} is {str(token)[:60]!r}, expected a token's text")
        if token_to_id(text) is None:
            raise InputError(
                f"{folder / file}: {key} {text!r} is not in the tokenizer's vocabulary; "
                "correct it there, or save the tokenizer again with this token added"
            )
        return text

    texts = {key: content(key, *value) for key, value in named.items()}
    others = [content(key, *value) for key, values in extra.items() for value in values]
    return texts, [*texts.values(), *others]


def stop_ids(folder: pathlib.Path, eos_id: int | None, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's EOS, if it has one, and the `eos_token_id` of `generation_config.json`, else of `config.json`.

    Raises ValueError for an id outside of the vocabulary, or if there is none."""
    stops = [] if eos_id is None else [eos_id]
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file).get("eos_token_id")
        if value is None:
            continue
        for stop in value if isinstance(value, list) else [value]:
            if type(stop) is not int or not 0 <= stop < vocab_size:
                raise InputError(
                    f"{folder / file}: eos_token_id {stop!r:.60} is not an id of the tokenizer, 0..{vocab_size - 1}; "
                    "do the files of the folder belong to one model?"
                )
            stops.append(stop)
        break
    if not stops:
        raise InputError(f"{folder}: no token ends a response; name the eos_token in tokenizer_config.json")
    return tuple(dict.fromkeys(stops))


def chat_template(folder: pathlib.Path, variables: dict[str, str], template=None) -> ChatTemplate | None:
    """The chat template of a folder, found as transformers does, or None if it has none.

    `variables` are the named special tokens; `template` is "plain" (`chat.PLAIN`) or a Jinja file to use instead.
    Raises ValueError, naming the file, for a template that does not compile.
    """
    if template == "plain":
        return ChatTemplate(PLAIN, "template plain", variables)
    if template is not None and not pathlib.Path(template).is_file():
        raise InputError(f"template={str(template)!r} is neither plain nor a file")
    jinja = folder / "chat_template.jinja" if template is None else pathlib.Path(template)
    if template is not None or jinja.exists():
        return ChatTemplate(read_text(jinja), str(jinja), variables)
    for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        source = read_json(path).get("chat_template")
        if isinstance(source, list):  # several by name: [{"name": …, "template": …}, …]
            sources = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            if "default" not in sources:
                raise InputError(f"{path}: of its chat templates none is called default; found {list(sources)}")
            source = sources["default"]
        if source is not None:
            if not isinstance(source, str):
                raise InputError(f"{path}: chat_template is {str(source)[:60]!r}, expected a Jinja template")
            return ChatTemplate(source, str(path), variables)
    return None
