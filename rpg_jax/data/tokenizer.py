"""Tokenizers with one interface: SentencePiece models, which can be trained here, and Hugging Face folders."""

import functools
import io
import pathlib
import re
from collections.abc import Iterable, Sequence

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from rpg_jax import InputError
from rpg_jax.data import tokenizer_files

# Always separate tokens, so that a digit or letter next to them keeps its token. U+2581 stands for a space.
_SPACE = "\u2581"
_SYMBOLS = ["\n", _SPACE, *"+-*/()=,;<>"]
_PAD, _BOS, _EOS, _UNKNOWN = range(4)
_BYTES = 256
_TAG = re.compile(r"</?(\w+)>")


class Tokenizer:
    """The interface of both kinds, and what they share: ids by name from the files of the folder, its chat template."""

    folder: pathlib.Path  # of its file
    vocab_size: int  # largest id + 1
    bos_id: int | None
    eos_id: int
    pad_id: int  # eos_id if the tokenizer has none
    stop_ids: tuple[int, ...]  # the ids that end a response, eos_id first
    has_template: bool  # whether the folder has a chat template

    def encode(self, text: str) -> list[int]:
        """The ids of text as text, without special tokens."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt.

        Special tokens in a rendered chat template are recognized, and none is added. Other text gets BOS in front if
        the tokenizer asks for one.
        """
        return self._before + self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a part of a rendered chat: special tokens are recognized, and none is added."""
        raise NotImplementedError

    def tokens(self) -> list[str]:
        """Each id's token as the vocabulary spells it; empty for an id without one."""
        raise NotImplementedError

    def token_texts(self) -> list[str]:
        """What each id adds to a text that it stands in; empty for special tokens."""
        before = self.encode("a")
        start = len(self.decode(before))
        return [self.decode([*before, id])[start:] for id in range(self.vocab_size)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens, but with tags such as <answer> (see `_tags`); never raises.

        Ids beyond the vocabulary are skipped, and bytes that are not UTF-8 (part of a character) become U+FFFD.
        """
        return self._decode([i for i in map(int, ids) if 0 <= i < self.vocab_size and i not in self._unsaid])

    def render(self, messages: list[dict], **options) -> str:
        """The messages by the chat template of the folder; see `chat.ChatTemplate.render`."""
        if self._chat is None:
            raise InputError(f"{self.folder}: no chat template there; choose template=plain, or a Jinja file")
        return self._chat.render(messages, **options)

    def _read_folder(self, path: pathlib.Path, named: dict[str, str], template: str | None, marked=frozenset()):
        """Sets ids and template, and what is not said. Returns the folder's special tokens, sorted.

        Args:
          named, marked: the special tokens of the vocabulary file, by name and without.
        """
        folder = self.folder = path.parent
        of_folder, special = tokenizer_files.special_tokens(folder, self._id)
        named = named | of_folder
        special = {*named.values(), *special}
        bos, eos, pad = (self._id(named.get(f"{name}_token", "")) for name in ("bos", "eos", "pad"))
        self.bos_id, self.stop_ids = bos, tokenizer_files.stop_ids(folder, eos, self.vocab_size)
        self.eos_id = self.stop_ids[0]
        self.pad_id = self.eos_id if pad is None else pad
        self._chat = tokenizer_files.chat_template(folder, named, template)
        self.has_template = self._chat is not None
        self._complete = self.has_template and template != "plain"  # rendered text contains BOS
        self._before = [] if self._complete or bos is None else [bos]
        control = {self._id(token) for token in named.values()} | set(self.stop_ids)
        self._unsaid = {self._id(token) for token in special | marked} - self._tags(special | marked, control)
        return sorted(special)

    def _tags(self, special: Iterable[str], control: set[int]) -> set[int]:
        """Those special tokens that are text of a response, which reward functions read.

        These are <answer>, <think>, every other <NAME> of which </NAME> is a special token too, and their ends; but of
        `control`, named tokens (<s>, </s>) and those that end a response, only </answer>.
        """
        tags = {token: found[1] for token in special if (found := _TAG.fullmatch(token))}
        names = {"answer", "think"} | {name for token, name in tags.items() if token.startswith("</")} - {"s"}
        said = {self._id(token) for token, name in tags.items() if name in names}
        return said - (control - {self._id("</answer>")})


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-pair model of at most `vocab_size` tokens, as the bytes of its file; the same bytes for the same texts.

    Digits are separate tokens, and characters missing from the texts are encoded as bytes, so that every string has an
    encoding. Raises ValueError if `vocab_size` is too small for bytes, symbols and every character of the texts.
    """
    lines = [line for text in texts for line in text.split("\n") if line]
    characters = set("".join(lines)) - set(_SYMBOLS) - {" "}
    least = 4 + _BYTES + len(_SYMBOLS) + len(characters)
    if vocab_size < least:
        raise InputError(f"vocab_size={vocab_size} is too small: bytes, symbols and characters alone take {least}")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        split_digits=True,
        split_by_unicode_script=False,
        byte_fallback=True,
        character_coverage=1.0,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=_SYMBOLS,
        pad_id=_PAD,
        bos_id=_BOS,
        eos_id=_EOS,
        unk_id=_UNKNOWN,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def load_tokenizer(path, template: str | None = None) -> Tokenizer:
    """The tokenizer of a folder (`tokenizer.json`, else a SentencePiece `.model`) or of one such file.

    `template` replaces the folder's chat template: "plain", the messages' contents each ended by a newline, for models
    without one; or a file with a Jinja template. Raises ValueError, naming the file, where one is missing, damaged, or
    contradicts the vocabulary.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        models = [path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))]
        model = next((model for model in models if model.exists()), None)
        if model is None:
            raise InputError(f"{path}: no tokenizer there; expected tokenizer.json or a SentencePiece tokenizer.model")
        path = model
    kind = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    return kind(path, template)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; the JSON files of a Hugging Face folder beside it are read where they exist.

    With byte pieces, as `train_tokenizer` makes them, `decode(encode(text)) == text` for every text.
    """

    def __init__(self, path, template: str | None = None):
        """`path` is the `.model` file; see `load_tokenizer`."""
        path = pathlib.Path(path)
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        added = tokenizer_files.added_tokens(path.parent)
        try:
            self._model = self._decoder = sentencepiece.SentencePieceProcessor(model_file=str(path))
            self.vocab_size = self._model.vocab_size()
            pieces = self.tokens()  # raises unless they are UTF-8
        except (RuntimeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not a SentencePiece model, or cut short: {error}") from error
        if any(self._id(token["content"]) is None for token in added.values()):
            self._model, self._decoder = (_extended(path, added, special) for special in ("CONTROL", "USER_DEFINED"))
            self.vocab_size = self._model.vocab_size()
            pieces = self.tokens()
        ids = {"bos": self._model.bos_id(), "eos": self._model.eos_id(), "pad": self._model.pad_id()}
        named = {f"{name}_token": pieces[id] for name, id in ids.items() if 0 <= id < self.vocab_size}
        marked = {token["content"]: token for token in added.values() if token.get("special")}
        special = {*self._read_folder(path, named, template, frozenset(marked)), *marked}
        patterns = (_pattern(text, marked.get(text, {})) for text in sorted(special, key=len, reverse=True))
        self._special = re.compile(f"({'|'.join(patterns)})")
        bytes_of_space = [self._id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._space_as_bytes = None if None in bytes_of_space else bytes_of_space

    def encode(self, text: str) -> list[int]:
        if self._space_as_bytes is None:
            return self._model.encode(text)
        first, *rest = text.split(_SPACE)  # SentencePiece would encode U+2581 as a space
        ids = self._model.encode(first)
        for part in rest:
            ids += self._space_as_bytes + self._model.encode(part)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        if not self._complete:
            return self.encode(text)
        parts = self._special.split(text)  # text, special token, text, …
        ids = (self._id(part) for part in parts[1::2])
        known = [[self._id(part.strip()) if id is None else id] for id, part in zip(ids, parts[1::2], strict=True)]
        return [id for k, part in enumerate(parts) for id in (known[k // 2] if k % 2 else self.encode(part))]

    def tokens(self) -> list[str]:
        return [self._model.id_to_piece(id) for id in range(self.vocab_size)]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids)

    def _id(self, piece: str) -> int | None:
        piece = piece.replace(" ", _SPACE)
        id = self._model.piece_to_id(piece)
        return id if self._model.id_to_piece(id) == piece else None


def _extended(path, added: dict[int, dict], special: str) -> sentencepiece.SentencePieceProcessor:
    """The model of a file with tokens after its own, or in place of pieces that stand where they should; special ones
    are pieces of the kind `special`. Raises InputError for an id that leaves a gap."""
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    known = {piece.piece for piece in model.pieces}
    for id, token in added.items():
        text = token["content"].replace(" ", _SPACE)
        if text in known:
            continue
        if id > len(model.pieces):
            raise tokenizer_files.refuse_id(path.parent, id, token["content"], len(model.pieces))
        piece = model.pieces[id] if id < len(model.pieces) else model.pieces.add()
        piece.piece = text
        if piece.type != piece.UNKNOWN:
            piece.type = getattr(piece, special if token.get("special") else "USER_DEFINED")
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def _pattern(text: str, token: dict) -> str:
    """What matches a token in text, with the space around it that its flags give it."""
    word = rf"(?<!\w){re.escape(text)}(?!\w)" if token.get("single_word") else re.escape(text)
    return r"\s*" * token.get("lstrip", False) + word + r"\s*" * token.get("rstrip", False)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with the JSON files beside it."""

    def __init__(self, path, template: str | None = None):
        """`path` is the `tokenizer.json` file; see `load_tokenizer`."""
        path = pathlib.Path(path)
        text, added = tokenizer_files.read_text(path), tokenizer_files.added_tokens(path.parent)
        try:
            import tokenizers

            self._model = _parse(text)
            new = {id: token for id, token in added.items() if self._id(token["content"]) is None}
            self._model.add_tokens([tokenizers.AddedToken(**token) for token in added.values()])
            self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            begin = self._model.encode("").ids  # the tokens that the file's post-processor adds to every text
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # bare Exceptions, and panics of Rust
            raise InputError(f"{path}: not a tokenizer of the Hugging Face format, or cut short: {error}") from error
        for id, token in new.items():
            if (place := self._id(token["content"])) != id:
                raise tokenizer_files.refuse_id(path.parent, id, token["content"], place)
        marked = {token.content for token in self._model.get_added_tokens_decoder().values() if token.special}
        special = self._read_folder(path, {}, template, marked)
        self._model.add_special_tokens([token for token in special if token not in marked])
        self._before = [id for id in begin if id in self._before]

    @functools.cached_property
    def _literal(self):
        """The same tokenizer, but it encodes special tokens in the text as plain text."""
        model = _parse(self._model.to_str())
        model.encode_special_tokens = True
        return model

    def encode(self, text: str) -> list[int]:
        return self._literal.encode(text, add_special_tokens=False).ids

    def encode_rendered(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def tokens(self) -> list[str]:
        return [self._model.id_to_token(id) or "" for id in range(self.vocab_size)]

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)

    def _id(self, token: str) -> int | None:
        return self._model.token_to_id(token)


def _parse(text: str):
    import tokenizers

    model = tokenizers.Tokenizer.from_str(text)
    model.no_truncation()  # the file keeps the settings of the last training run
    model.no_padding()
    return model
