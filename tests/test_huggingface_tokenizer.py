"""Tokenizers of Hugging Face folders: round trips, special tokens, stop ids, templates, and every way to be damaged."""

import io
import json
import re
import shutil

import pytest
import real_path
import sentencepiece
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import processors

from rpg_jax.answer import EXTRACTIONS
from rpg_jax.data import load_tokenizer

SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|turn|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = [{"role": "user", "content": "1 + 1 = 2"}]


def save(folder, **changes):
    """A folder as transformers saves it; `changes` are keys of tokenizer_config.json, None to leave one out."""
    model = real_path.byte_level(["1 + 1 = 2, Answer: 2", "12 - 3 = 9, Answer: 9"] * 9, 320, SPECIAL)
    model.add_tokens(["<think>"])  # a token of its own that is not special
    model.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.enable_truncation(4)  # left over from a training run
    model.enable_padding(length=8, pad_id=2, pad_token="<|pad|>")
    model.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "special": True}
    config = dict(bos_token="<|begin|>", eos_token=eos, pad_token="<|pad|>", extra_special_tokens=["<|turn|>"])
    config["chat_template"] = TEMPLATE
    write(folder, "tokenizer_config", {key: value for key, value in (config | changes).items() if value is not None})
    return folder


def write(folder, name, value):
    (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture(scope="module")
def tokenizer(saved):
    return load_tokenizer(saved)


@given(TEXT)
@example("<|begin|><|end|><think> text is text")
@example("  \u2581 \r\n\t\x00 e\u0301 \U0001f600 \ufffd")
def test_round_trip_of_any_text_and_of_a_character_cut_in_two(tokenizer, text):
    ids, euro = tokenizer.encode(text), tokenizer.encode("€")
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {0, 1, 2, 3}, "text never makes a special token"
    assert len(euro) == 3 and tokenizer.decode(ids + euro) == text + "€"
    for cut in (1, 2):
        assert tokenizer.decode(ids + euro[:cut]) == text + "\ufffd"
        assert tokenizer.decode(euro[cut:] + ids) == "\ufffd" * (3 - cut) + text


@given(TEXT, st.data())
def test_special_tokens_and_foreign_ids_say_nothing(tokenizer, text, data):
    ids = tokenizer.encode(text)
    foreign = st.sampled_from([0, 1, 2, 3, -1, -(2**40), tokenizer.vocab_size, 151_935, 2**31, 2**70])
    for i in data.draw(st.lists(foreign, max_size=5)):
        ids.insert(data.draw(st.integers(0, len(ids))), i)
    assert tokenizer.decode(ids) == text


def test_tags_that_are_special_tokens_are_text_of_a_response(folder):
    """As training scripts add them; another pair too, but no token of the model's own."""
    tags = ["<answer>", "</answer>", "<think>", "</think>", "<plan>", "</plan>", "<image>", "<unused1>", "<s>", "</s>"]
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens(tags)
    model.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config", config | {"additional_special_tokens": ["<|turn|>", "<answer>", "</answer>"]})
    found = load_tokenizer(folder)
    ids = found.encode_prompt("".join(["<|begin|>", *tags, "é €<answer> 5\n6</answer><|end|>"]))
    assert not set(ids) & set(found.encode("<>")), "each is one token"
    text = found.decode(ids)
    assert text == "<answer></answer><think></think><plan></plan>é €<answer> 5\n6</answer>"
    assert EXTRACTIONS["tags"](text) == "5\n6"
    write(folder, "generation_config", {"eos_token_id": [1, found.encode_prompt("</answer>")[0]]})
    assert load_tokenizer(folder).decode(ids) == text, "also where the tag ends a response"


def test_ids_and_a_prompt_that_holds_the_special_tokens_of_its_template_once(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (0, 1, 2, (1,))
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<think>", "the largest id is that of the token added last"
    text = tokenizer.render(MESSAGES)
    assert text == "<|begin|><|turn|>user\n1 + 1 = 2<|end|>"
    assert tokenizer.encode_prompt(text) == [0, 3, *tokenizer.encode("user\n1 + 1 = 2"), 1]


def test_plain_prompts_get_bos_where_the_tokenizer_adds_one(folder):
    plain = load_tokenizer(folder, template="plain")
    assert plain.render(MESSAGES) == "1 + 1 = 2\n"
    assert plain.encode_prompt("1 + 1 = 2\n") == [0, *plain.encode("1 + 1 = 2\n")]
    contents = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer", contents | {"post_processor": None})
    assert load_tokenizer(folder, template="plain").encode_prompt("1") == plain.encode("1")


def test_where_templates_are_found(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config", {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    bare = load_tokenizer(folder)
    with pytest.raises(ValueError, match=f"{folder}: no chat template there; choose template=plain, or a Jinja file"):
        bare.render(MESSAGES)
    assert bare.encode_prompt("1") == [0, *bare.encode("1")]
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of the list"}]
    write(folder, "tokenizer_config", config | {"chat_template": named})
    assert load_tokenizer(folder).render(MESSAGES) == "of the list"
    write(folder, "chat_template", {"chat_template": "of the JSON file"})
    assert load_tokenizer(folder).render(MESSAGES) == "of the JSON file"
    (folder / "chat_template.jinja").write_text("of the Jinja file")
    assert load_tokenizer(folder).render(MESSAGES) == "of the Jinja file"
    (folder / "mine.jinja").write_text("mine: {{ messages[0].content }}{{ eos_token }}")
    mine = load_tokenizer(folder, template=folder / "mine.jinja")
    assert mine.encode_prompt(mine.render(MESSAGES)) == [*mine.encode("mine: 1 + 1 = 2"), 1]


def test_stop_ids_come_from_the_files_of_the_model(folder):
    write(folder, "config", {"eos_token_id": 2})
    assert load_tokenizer(folder).stop_ids == (1, 2)
    write(folder, "generation_config", {"eos_token_id": [3, 1, 3]})
    assert load_tokenizer(folder).stop_ids == (1, 3)
    write(folder, "tokenizer_config", {})
    bare = load_tokenizer(folder)
    assert (bare.bos_id, bare.eos_id, bare.pad_id, bare.stop_ids) == (None, 3, 3, (3, 1))
    assert bare.encode_prompt("1") == bare.encode("1")


def test_special_tokens_of_the_map_and_of_tokens_not_marked_as_special(folder):
    write(folder, "tokenizer_config", {"eos_token": "<|turn|>"})
    write(folder, "special_tokens_map", {"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}})
    both = load_tokenizer(folder)
    assert (both.bos_id, both.eos_id, both.pad_id) == (0, 1, 1)  # the map wins
    write(folder, "special_tokens_map", {"bos_token": "<|begin|>"})
    write(folder, "tokenizer_config", {"eos_token": "<think>"})
    marked = load_tokenizer(folder)
    assert marked.eos_id == marked.vocab_size - 1 and marked.decode([marked.eos_id]) == ""


def im(**flags):
    return dict(content="<|im|>", lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) | flags


STRIPS, BESIDE = dict(lstrip=True, rstrip=True), dict(added_tokens={"<|im|>": 275, "<think>": 274})
PLAIN, STRIPPED = [20, 224, 275, 263], [20, 275, 21]  # "1 <|im|> 2", as transformers 5.23 has it


@pytest.mark.parametrize(("config", "more", "eos", "special", "ids"), [
    (dict(eos_token="<|im|>", added_tokens_decoder={"275": im()}), {}, 275, True, PLAIN),
    (dict(eos_token=im(), added_tokens_decoder={"275": im(**STRIPS)}), {}, 275, True, STRIPPED),
    (dict(added_tokens_decoder={"275": im(special=False, **STRIPS)}), {}, 1, False, STRIPPED),
    (dict(added_tokens_decoder={"275": {"content": "<|im|>"}}), dict(special_tokens_map={"eos_token": "<|turn|>"}),
     1, False, PLAIN),
    (dict(eos_token="<|turn|>"), BESIDE | dict(special_tokens_map={"eos_token": im()}), 275, True, PLAIN),
    (dict(eos_token="<|im|>"), BESIDE, 275, True, PLAIN),
    (dict(eos_token="<|turn|>"), BESIDE, 3, False, PLAIN),
    (dict(extra_special_tokens={"image_token": "<|im|>"}), BESIDE, 1, True, PLAIN),
])  # fmt: skip
def test_tokens_beside_those_of_the_vocabulary_file(folder, config, more, eos, special, ids):
    files = dict(tokenizer_config=config | dict(chat_template=TEMPLATE), generation_config={"eos_token_id": 1}) | more
    for name, value in files.items():
        write(folder, name, value)
    found = load_tokenizer(folder)
    assert (found.vocab_size, found.eos_id, found.encode_rendered("1 <|im|> 2")) == (276, eos, ids)
    assert found.decode([275]) == ("" if special else "<|im|>")
    assert (275 in found.encode("1 <|im|> 2")) != special, "text makes no special token"


@pytest.mark.parametrize(("name", "text", "complaint"), [
    ("tokenizer", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": ', "or cut short"),
    ("tokenizer_config", '{"bos_token": ', "not JSON, or cut short"),
    ("tokenizer_config", "[" * 100_000, "not JSON, or cut short: maximum recursion"),
    ("tokenizer_config", '{"pad_token": "<none>"}', "pad_token '<none>' is not in the tokenizer's vocabulary"),
    ("tokenizer_config", '{"eos_token": 7}', "eos_token is '7', expected a token's text"),
    ("tokenizer_config", '{"extra_special_tokens": "<|turn|>"}', "expected a list"),
    ("tokenizer_config", '{"eos_token": "<|end|>", "chat_template": [{"name": "rag", "template": ""}]}',
     "none is called default"),
    ("tokenizer_config", '{"eos_token": "<|end|>", "chat_template": "{% if %}"}', "does not compile: line 1"),
    ("tokenizer_config", "{}", "no token ends a response"),
    ("tokenizer_config", '{"added_tokens_decoder": ["<|im|>"]}', "expected an object of tokens by their ids"),
    ("tokenizer_config", '{"added_tokens_decoder": {"275": "<|im|>"}}', "275 is '<|im|>', expected an id and a token"),
    ("tokenizer_config", '{"added_tokens_decoder": {"a": {"content": "<|im|>"}}}', "'a' is {'content'"),
    ("added_tokens", '{"<|im|>": "275"}', "'275' is {'content': '<|im|>', 'special': False}, expected an id"),
    ("generation_config", '{"eos_token_id": [1, 100000]}', "eos_token_id 100000 is not an id of the tokenizer"),
    ("config", '{"eos_token_id": 1.5}', "eos_token_id 1.5 is not an id"),
])  # fmt: skip
def test_a_damaged_file_is_one_line_with_its_name(folder, name, text, complaint):
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        load_tokenizer(folder)
    where = folder if "no token ends" in complaint else folder / f"{name}.json"
    assert str(error.value).startswith(str(where)) and "\n" not in str(error.value)


def test_files_that_are_not_there(folder, tmp_path):
    for path, complaint in [
        (tmp_path, "no tokenizer there; expected tokenizer.json or a SentencePiece tokenizer.model"),
        (tmp_path / "tokenizer.json", "No such file"),
        (tmp_path / "tokenizer.model", "there is no such file"),
        (tmp_path / "nowhere", "there is no such file"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {complaint}"):
            load_tokenizer(path)
    with pytest.raises(ValueError, match="template='plian' is neither plain nor a file"):
        load_tokenizer(folder, template="plian")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json: not UTF-8 text"):
        load_tokenizer(tmp_path)


TAGS = ["<answer>", "</answer>", "<turn>"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a SentencePiece model shaped like Llama 2's: no pad, a space put before every text."""
    folder, model = tmp_path_factory.mktemp("llama"), io.BytesIO()
    texts = ["hello world, this is a test", "1 + 1 = 2 [INST] x [/INST]"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=320, hard_vocab_limit=False,
        byte_fallback=True, pad_id=-1, minloglevel=2, user_defined_symbols=TAGS,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def test_tags_and_tokens_beside_those_of_a_sentencepiece_folder(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "tags")
    write(folder, "tokenizer_config", {"additional_special_tokens": TAGS})
    found = load_tokenizer(folder)
    ids = [1, *found.encode("<turn>so <answer>5</answer>"), 2]
    assert found.decode(ids).strip() == "so <answer>5</answer>"
    folder, size = shutil.copytree(llama, tmp_path / "beside"), load_tokenizer(llama).vocab_size
    placeholder = load_tokenizer(llama).encode("<turn>")[-1]
    tokens = {0: im(content="<unk>"), placeholder: im(), size: im(content="<|end|>", lstrip=True)}
    tokens |= {size + 1: {"content": "<hm>"}, size + 2: im(content="<think>"), size + 3: im(content="</think>")}
    write(folder, "tokenizer_config", dict(added_tokens_decoder=tokens, eos_token="<|end|>", chat_template=TEMPLATE))
    found = load_tokenizer(folder)
    assert (found.vocab_size, found.bos_id, found.stop_ids) == (size + 4, 1, (size,))
    text = "<|im|>hello <hm> world  <|end|>"
    ids, literal = found.encode_rendered(text), found.encode(text)
    assert ids == [placeholder, *found.encode("hello <hm> world"), size] and size + 1 in ids
    assert found.decode(ids) == "hello <hm> world" and found.decode([size + 2, size + 3]) == "<think></think>"
    assert not {placeholder, size} & set(literal) and found.decode(literal) == text.replace("  ", " ")
    write(folder, "tokenizer_config", {})
    write(folder, "added_tokens", {"<pad>": size + 1})
    for name in ("tokenizer.model", "tokenizer.json"):
        with pytest.raises(ValueError, match=f"<pad>' has id {size + 1}, and the next one after the vocabulary is"):
            load_tokenizer(folder / name)
        save(folder)


def test_a_llama_sentencepiece_folder(llama, tmp_path):
    bare = load_tokenizer(llama)
    assert (bare.bos_id, bare.eos_id, bare.pad_id, bare.stop_ids) == (1, 2, 2, (2,))
    assert bare.encode_prompt("hello") == [1, *bare.encode("hello")]
    assert bare.decode([1, *bare.encode("hello €"), 2, -1, 320, 10**12]) == "hello €"
    assert bare.decode(bare.encode("€")[:-1]).endswith("\ufffd")
    with pytest.raises(ValueError, match="no chat template there"):
        bare.render(MESSAGES)

    folder = shutil.copytree(llama, tmp_path / "chat")
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"
    write(folder, "tokenizer_config", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    write(folder, "generation_config", {"eos_token_id": [2, 5]})
    chat = load_tokenizer(folder)
    assert chat.render(MESSAGES) == "<s>[INST] 1 + 1 = 2 [/INST]</s>"
    assert chat.encode_prompt(chat.render(MESSAGES)) == [1, *chat.encode("[INST] 1 + 1 = 2 [/INST]"), 2]
    assert chat.stop_ids == (2, 5)
    write(folder, "generation_config", {"eos_token_id": 320})
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id 320 is not an id of the.*0\.\.3"):
        load_tokenizer(folder)


def test_a_damaged_sentencepiece_model(llama, tmp_path):
    path = tmp_path / "tokenizer.model"
    for damaged in (b"", (llama / "tokenizer.model").read_bytes()[:-100], b"not a model" * 9):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"^{path}: not a SentencePiece model, or cut short"):
            load_tokenizer(tmp_path)
