"""The tokenizer round trips every text, keeps symbols apart, and is the same for the same texts."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpg_jax.data import TASKS, load_tokenizer
from rpg_jax.data.tasks import draw
from rpg_jax.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [text for name in TASKS for problem in draw(name, "train", 100, rng) for text in problem[:2]]


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer(texts, 512))
    return load_tokenizer(path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("  two  spaces \n\n and lines\n")
@example("\u2581a\u2581\u2581 b")
@example("<s></s><pad><0x41>\x00\t\r\n")
@example("e\u0301 \u00e9 \ufb01 \U0001f600 \ufffd")
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 < i < tokenizer.vocab_size for i in ids), "text never makes pad, bos, eos or unknown"


def test_decode_drops_special_tokens_and_takes_arrays(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("Answer: 12"), tokenizer.eos_id, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode(np.array(ids, np.int32)) == "Answer: 12"
    assert len({tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}) == 3
    assert tokenizer.stop_ids == (tokenizer.eos_id,)


def test_digits_letters_and_operators_are_one_token_wherever_they_stand_and_no_token_spans_a_solution(tokenizer, texts):
    for text in ("47+35=82", "(1*2-3)/4", "a>b,c>d,h>a", "\n\n\n"):
        assert len(tokenizer.encode(text)) == len(text)
    after_space, after_comma = tokenizer.encode("Answer: a"), tokenizer.encode(",a")
    assert after_space[-1] == after_comma[-1]
    assert len(after_space) == 3, "Answer:, space, letter"
    for prompt, solution in zip(texts[::2], texts[1::2], strict=True):
        assert tokenizer.encode(prompt) + tokenizer.encode(solution) == tokenizer.encode(prompt + solution)


def test_same_texts_same_bytes_within_a_limit(texts, tmp_path):
    assert train_tokenizer(texts, 512) == train_tokenizer(iter(texts), 512)
    assert train_tokenizer(texts, 512) != train_tokenizer(texts[:60], 512)
    path = tmp_path / "small.model"
    path.write_bytes(train_tokenizer(texts, 330))
    small = load_tokenizer(path)
    assert small.vocab_size <= 330 and small.decode(small.encode(texts[1])) == texts[1]
    with pytest.raises(ValueError, match="vocab_size=300 is too small.*take 3"):
        train_tokenizer(texts, 300)
