"""A Hugging Face folder's settings of a tokenizer beside the vocabulary: special tokens, stop ids, chat template."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from rpg_jax import InputError
from rpg_jax.data.chat import PLAIN, ChatTemplate

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_DECODER = "added_tokens_decoder"
_FIELDS = {"content": str} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), bool)


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
    """({"bos_token": "<s>", …} of the named tokens, all special tokens) of the files of `_special`.

    Raises ValueError, with file and key, for what is no known token."""
    special = list(_special(folder))
    for key, text, file in special:
        if token_to_id(text) is None:
            raise InputError(
                f"{folder / file}: {key} {text!r} is not in the tokenizer's vocabulary; "
                "correct it there, or save the tokenizer again with this token added"
            )
    return {key: text for key, text, _ in special if key in _NAMED}, [text for _, text, _ in special]


def _special(folder):
    """(key, token, file) of each special token: of `tokenizer_config.json`, and, unless that has
    `added_tokens_decoder`, of `special_tokens_map.json`, which then has precedence, as transformers has it."""
    named, extra, files = {}, [], ["tokenizer_config.json", "special_tokens_map.json"]
    if read_json(folder / files[0]).get(_DECODER) is not None:
        files.pop()
    for file in files:
        settings = read_json(folder / file)
        named |= {key: (key, settings[key], file) for key in _NAMED if settings.get(key) is not None}
        for key in _EXTRA:
            tokens = settings.get(key)
            if not isinstance(tokens, list | dict | None):
                raise InputError(f"{folder / file}: {key} is {tokens!r:.60}, expected a list of tokens")
            tokens = tokens.values() if isinstance(tokens, dict) else tokens or ()
            extra += [(key, token, file) for token in tokens]
    for key, token, file in (*named.values(), *extra):
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or not text:
            raise InputError(f"{folder / file}: {key} is {str(token)[:60]!r}, expected a token's text")
        yield key, text, file


def added_tokens(folder: pathlib.Path) -> dict[int, dict[str, Any]]:
    """id -> what `tokenizers.AddedToken` takes, by ascending id, of the tokens beside those of the vocabulary file.

    They stand in `added_tokens_decoder` of `tokenizer_config.json`, else in `added_tokens.json`, where those are
    special that `_special` has. Raises ValueError for anything else there."""
    decoder, found = read_json(folder / "tokenizer_config.json").get(_DECODER), {}
    if decoder is None:
        special = {text for _, text, _ in _special(folder)}
        file, entries = "added_tokens.json", read_json(folder / "added_tokens.json")
        tokens = [(id, dict(content=text, special=text in special)) for text, id in entries.items()]
    else:
        file = f"tokenizer_config.json: {_DECODER}"
        if not isinstance(decoder, dict):
            raise InputError(f"{folder / file} is {decoder!r:.60}, expected an object of tokens by their ids")
        tokens = [(int(id) if id.isascii() and id.isdecimal() else id, token) for id, token in decoder.items()]
    for id, token in tokens:
        kept = {name: token[name] for name in _FIELDS if name in token} if isinstance(token, dict) else {}
        is_token = kept.get("content") and all(type(value) is _FIELDS[name] for name, value in kept.items())
        if type(id) is not int or id < 0 or not is_token:
            raise InputError(f"{folder / file}: {id!r:.60} is {token!r:.60}, expected an id and a token's content")
        found[id] = kept
    return dict(sorted(found.items()))


def refuse_id(folder: pathlib.Path, id: int, token: str, next_id: int) -> InputError:
    """The error for a token of `added_tokens` with an id that the vocabulary has no place for."""
    return InputError(
        f"{folder}: the added token {token!r} has id {id}, and the next one after the vocabulary is {next_id}; "
        "save the tokenizer again, or copy all of its files from one model"
    )


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
