"""A SentencePiece model trained on the training split's text, and the tokenizer that wraps it."""

import io
from collections.abc import Iterable

import sentencepiece

# Always tokens of their own, so that a digit or letter is the same token wherever it stands. U+2581 is a space.
_SPACE = "\u2581"
_SYMBOLS = ["\n", _SPACE, *"+-*/()=,;<>"]
_PAD, _BOS, _EOS, _UNKNOWN = range(4)
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-pair model of at most `vocab_size` tokens, as the bytes of its file; the same bytes for the same texts.

    Digits are split, and what the texts lack falls back to bytes, so that every string has an encoding. Raises
    ValueError when `vocab_size` cannot hold bytes, symbols and every character of the texts.
    """
    lines = [line for text in texts for line in text.split("\n") if line]
    characters = set("".join(lines)) - set(_SYMBOLS) - {" "}
    least = 4 + _BYTES + len(_SYMBOLS) + len(characters)
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size} is too small: bytes, symbols and characters alone take {least}")
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


class Tokenizer:
    """Text to token ids and back: `decode(encode(text)) == text` for every text.

    `encode` adds neither BOS nor EOS; `decode` drops padding, BOS and EOS. `stop_ids` end a response.
    """

    def __init__(self, path):
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._model.vocab_size()
        self.pad_id = self._model.pad_id()
        self.bos_id = self._model.bos_id()
        self.eos_id = self._model.eos_id()
        self.stop_ids = (self.eos_id,)
        self._space_as_bytes = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        first, *rest = text.split(_SPACE)  # SentencePiece would read the character as a space
        ids = self._model.encode(first)
        for part in rest:
            ids += self._space_as_bytes + self._model.encode(part)
        return ids

    def decode(self, ids) -> str:
        return self._model.decode([int(i) for i in ids])
