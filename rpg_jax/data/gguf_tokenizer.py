"""The tokenizer of a GGUF file in Hugging Face's format: byte-level BPE or SentencePiece, from `tokenizer.*` keys."""

import math
from typing import Any

from rpg_jax import InputError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> how text is cut before merges: a pattern of its own or None, GPT-2's; whether each digit stands
# alone; whether text is brought to the normal form NFC; whether a word that is a token is kept whole, without merges.
_PRE = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, True, False, False),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST, False, False, True),
    "qwen2": (_WORDS + r"\p{N}" + _REST, False, True, False),
}
_SPACE = "\u2581"  # what stands for a space in tokens of SentencePiece
_BOS_BY_DEFAULT = ("llama-bpe",)  # where the file does not say, as llama.cpp has it
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our name -> GGUF's
_STOPS = ("eos", "eot", "eom")


def files(metadata: dict[str, Any]) -> dict[str, dict | str]:
    """{file name: JSON values, or text} of the tokenizer, its chat template and the ids that end a response.

    Raises ValueError, naming the key, for a kind that is not supported, or keys that contradict each other.
    """
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    ids = {name: _id(keys, f"{theirs}_token_id") for name, theirs in _NAMED.items()}
    stops = list(dict.fromkeys(_id(keys, f"{name}_token_id") for name in _STOPS if f"{name}_token_id" in keys))
    adds_bos = bool(keys.get("add_bos_token", keys.get("pre") in _BOS_BY_DEFAULT)) and ids["bos"] is not None
    model = _tokenizer(keys, ids["bos"] if adds_bos else None)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{name}_token": keys["tokens"][id] for name, id in ids.items() if id is not None}
    settings["add_bos_token"] = adds_bos
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if ids[name] is not None}
    written: dict[str, dict | str] = {"tokenizer.json": model, "tokenizer_config.json": settings}
    written["generation_config.json"] = generation | ({"eos_token_id": stops} if stops else {})
    if template := metadata.get("tokenizer.chat_template"):
        written["chat_template.jinja"] = template
    return written


def _tokenizer(keys: dict, bos: int | None) -> str:
    """`tokenizer.json`; every text begins with the token `bos`, if it is given."""
    import tokenizers
    from tokenizers import processors

    if keys.get("model") not in _MODELS:
        raise InputError(f"tokenizer.ggml.model is {keys.get('model')!r}; only gpt2, byte-level BPE, and llama, "
                         "SentencePiece's, are supported")  # fmt: skip
    tokens = keys.get("tokens") or []
    kinds = keys.get("token_type", [_NORMAL] * len(tokens))
    if keys["model"] == "llama":  # llama.cpp writes spaces of user-defined tokens as they are in texts
        tokens = [t.replace(" ", _SPACE) if kind == _USER else t for t, kind in zip(tokens, kinds, strict=False)]
    if not tokens or len(kinds) != len(tokens):
        raise InputError("tokenizer.ggml.tokens or token_type is missing, or they are not of one length")
    used = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    if len(used) != len(kinds) - kinds.count(_UNUSED):
        raise InputError("tokenizer.ggml.tokens holds a token twice")
    model = _MODELS[keys["model"]](keys, used, kinds)
    for kind, add in ((_CONTROL, model.add_special_tokens), (_USER, model.add_tokens)):
        texts = (token for token, other in zip(tokens, kinds, strict=True) if other == kind)
        add([tokenizers.AddedToken(text, special=kind == _CONTROL, normalized=False) for text in texts])
    if bos is not None:
        parts = dict(single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B")
        model.post_processor = processors.TemplateProcessing(**parts, special_tokens=[(tokens[bos], bos)])
    return model.to_str()


def _byte_level(keys: dict, used: dict[str, int], kinds: list[int]):
    """GPT-2's BPE: merges are listed."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if keys.get("pre") not in _PRE:
        raise InputError(f"tokenizer.ggml.pre is {keys.get('pre')!r}, which is not supported; known: {', '.join(_PRE)}")
    pattern, digits, normalized, keeps_whole = _PRE[keys["pre"]]
    if not isinstance(merges := keys.get("merges"), list):
        raise InputError("tokenizer.ggml.merges is missing")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not used.keys() >= {*pair, "".join(pair)}:
            raise InputError(f"tokenizer.ggml.merges: {merge!r:.60} is no pair of tokens that make another")
    model = tokenizers.Tokenizer(models.BPE(vocab=used, merges=pairs, ignore_merges=keeps_whole))
    if normalized:
        model.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)
    model.decoder = decoders.ByteLevel()
    return model


def _sentencepiece(keys: dict, used: dict[str, int], kinds: list[int]):
    """SentencePiece's BPE without a space before texts, as Gemma has it: of two neighbours that make a token, those
    merge first whose token has the highest score, and before all of them spaces; characters without a token are bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    if keys.get("add_space_prefix", True) or keys.get("remove_extra_whitespaces") or "precompiled_charsmap" in keys:
        raise InputError("tokenizer.ggml.add_space_prefix is not false, or texts are normalized; only SentencePiece "
                         "models that take a text as it is, as Gemma's do, are supported")  # fmt: skip
    scores, unknown = keys.get("scores"), _id(keys, "unknown_token_id")
    if not isinstance(scores, list) or len(scores) != len(kinds) or unknown is None:
        raise InputError("tokenizer.ggml.scores or unknown_token_id is missing, or there is no score for each token")
    scored = {token: scores[id] for token, id in used.items() if kinds[id] == _NORMAL}
    scored |= {token: math.inf for token, id in used.items() if kinds[id] == _USER and not token.strip(_SPACE)}
    splits = ((token, token[:at], token[at:]) for token in scored for at in range(len(token) - 1, 0, -1))
    pairs = [(scored[token], left, right) for token, left, right in splits if left in scored and right in scored]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1])), reverse=True)
    model = tokenizers.Tokenizer(
        models.BPE(
            vocab=used,
            merges=[pair[1:] for pair in pairs],
            unk_token=keys["tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )  # fmt: skip
    )
    model.normalizer = normalizers.Replace(" ", _SPACE)
    model.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return model


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}  # tokenizer.ggml.model -> its Tokenizer


def _id(keys: dict, key: str) -> int | None:
    """The token id of a key, None if there is none."""
    value, count = keys.get(key), len(keys.get("tokens") or [])
    if value is not None and (not isinstance(value, int) or not 0 <= value < count):
        raise InputError(f"tokenizer.ggml.{key} is {value!r}, not an id of the {count} tokens")
    return value
