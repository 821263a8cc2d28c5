"""Conversations: turns between segments, observations as tokens, episodes in workers, whenever one answers."""

import dataclasses
import functools
import importlib
import itertools
import json
import pathlib
import random
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import metrics
from sequences import sequences as sequences_of
from test_rollout import settings as rollout_settings

from configs import environments
from rpg_jax import InputError, models, parallel
from rpg_jax.data import Problem, load_tokenizer
from rpg_jax.data.chat import ChatTemplate
from rpg_jax.data.tokenizer import train_tokenizer
from rpg_jax.environments import Environment, Observations, Outcome
from rpg_jax.environments.calculator import Calculator
from rpg_jax.environments.guess import Guess
from rpg_jax.objectives.advantages import turn_return
from rpg_jax.rewards import ENVIRONMENT, Scorer, scale_named, worker
from rpg_jax.rewards.pool import Failure
from rpg_jax.run.build import build_environment
from rpg_jax.sampling import Decoding, Sampling, decode, generate, prompts_to_answer
from rpg_jax.sampling.turns import Answer, Row, matched, spans, stop_table
from rpg_jax.training.collect import without_rows
from rpg_jax.training.episodes import Episodes
from rpg_jax.training.grading import logged, make_grade, watcher

module = importlib.import_module("rpg_jax.sampling.generate")  # the package has a function of that name
CONFIG = models.ModelConfig(40, 32, 48, 2, 4, 2, 8, qk_norm=True, max_length=128)
MODEL = models.Model(CONFIG)
KEY = jax.random.key(0, impl="threefry2x32")
NEW, SAMPLES, STOP = 24, 3, 7
ROOT = pathlib.Path(__file__).parents[1]
TEXTS = [f"{token:02d}" for token in range(40)]
NEVER = stop_table(["zzz"], TEXTS)  # of the shape of one that is found, so that both have one program
PROMPTS = np.random.default_rng(0).integers(8, 40, (4, 6)).astype(np.int32)
LENGTHS = np.array([6, 3, 5, 4], np.int32)


@functools.cache
@jax.jit
def params():
    tree = MODEL.init(jax.random.key(1))
    return models.unstack_layers(jax.tree.map(lambda leaf: 2.0 * leaf, tree))


class Talk:
    """Answers each turn by tokens that depend on what was said, or ends the episode; late, if it is told to."""

    def __init__(self, delay=None, stops=NEVER):
        self.stops, self.late, self.delay, self.turns = stops, [], delay, {}

    def reply(self, row):
        turns, length, prompt = spans(row.drawn), len(row.tokens), row.prompt
        said = sum(row.tokens[slice(*turns[-1])]) if turns else 0
        observation = [8 + (said + n) % 32 for n in range(said % 3)] if turns else [9] * (row.number % 2)
        left = prompt + NEW - length - len(observation)
        if len(turns) > 3 or left < 1 or said % 11 == 0 and turns:
            return Answer(row.number, ended=True, finished=said % 2 == 0)
        if turns and not observation:
            observation = [8]
        return Answer(row.number, observation, length + len(observation) - prompt + min(6, left))

    def __call__(self, rows, seconds):
        self.late += [(self.delay.randint(0, 3) if self.delay and seconds is not None else 0, row) for row in rows]
        now = [self.reply(row) for count, row in self.late if count == 0]
        self.late = [(count - 1, row) for count, row in self.late if count]
        return now


def run(conversation, slots=4, segment=None, pages=None, **changes):
    arrays = PROMPTS, LENGTHS, np.arange(len(LENGTHS), dtype=np.int32)
    rows = prompts_to_answer(*arrays, samples=SAMPLES, max_new=NEW)
    decoding = Decoding(slots, page_size=4, cache_pages=pages, segment=segment)
    drawn = generate(
        MODEL, params(), rows, key=KEY, step=0, samples=SAMPLES, max_new=NEW, decoding=decoding,
        sampling=Sampling.make(stop_ids=[STOP]), version=5, conversation=conversation, **changes,
    )  # fmt: skip
    return jax.tree.map(np.asarray, drawn)


@functools.cache
def reference():
    return run(Talk())


def test_a_conversation_has_turns_and_observations_and_its_log_probs_are_those_of_teacher_forcing():
    rows = reference()
    assert rows.complete.all() and 0 < rows.finished.sum() < rows.finished.size
    exists = np.arange(rows.tokens.shape[1]) < rows.length[:, None]
    after_prompt = np.arange(rows.tokens.shape[1]) >= rows.prompt_length[:, None]
    assert not (rows.loss_mask & ~(exists & after_prompt)).any()
    assert (exists & after_prompt & ~rows.loss_mask).sum() > 10  # observations
    turns = [len(spans(mask)) for mask in rows.loss_mask]
    assert max(turns) > 2 and min(turns) < max(turns)
    for name in ("sampler_logp", "model_logp", "version"):
        assert not getattr(rows, name)[~rows.loss_mask].any()
    assert (rows.version[rows.loss_mask] == 5).all() and not rows.tokens[~exists].any()
    expected = models.token_logprobs(MODEL, params(), rows.tokens, rows.loss_mask)
    np.testing.assert_allclose(rows.model_logp[rows.loss_mask], np.asarray(expected)[rows.loss_mask], rtol=0, atol=3e-5)


@pytest.mark.parametrize("seed, segment, pages", [(0, None, None), (1, 1, None), (2, 3, 12)])
def test_when_an_environment_answers_changes_no_token(seed, segment, pages):
    late = run(Talk(random.Random(seed)), segment=segment, pages=pages)
    jax.tree.map(np.testing.assert_array_equal, late, reference())


def test_rows_keep_their_pages_between_turns_while_pages_suffice(monkeypatch):
    seen, function = [], module.decode_segment

    def segment(*arguments):
        unfinished, ended, state = function(*arguments)
        seen.append((np.asarray(state.held)[np.asarray(state.status) == decode.ENDED], int(state.preemptions[0])))
        return unfinished, ended, state

    monkeypatch.setattr(module, "decode_segment", segment)
    for pages, kept in (None, True), (12, False):
        seen.clear()
        run(Talk(), segment=3, pages=pages)
        held, preemptions = zip(*seen, strict=True)
        assert (np.concatenate(held) > 0).all() == kept and (preemptions[-1] == 0) == kept


def test_a_row_that_was_cut_between_segments_goes_on_until_waits_for_every_answer_and_a_stop_for_none():
    some = run(Talk(random.Random(3)), until=2)
    again = run(Talk(random.Random(4)), until=2)
    jax.tree.map(np.testing.assert_array_equal, again, some)
    groups = some.complete.reshape(-1, SAMPLES).all(1)
    assert groups.sum() >= 2 and not groups.all()

    class Never(Talk):
        def __call__(self, rows, seconds):
            assert seconds is not None  # any time
            return []

    looks = []
    rows = run(Never(), until=2, should_stop=lambda: bool(looks.append(0)) or len(looks) > 2)
    assert not rows.complete.any()


# Stop strings.


@settings(max_examples=200)
@given(
    texts=st.lists(st.text("ab</>", max_size=4), min_size=1, max_size=8),
    strings=st.lists(st.text("ab</>", min_size=1, max_size=5), min_size=1, max_size=3),
    ids=st.lists(st.integers(0, 100), max_size=20),
)
@example(texts=["</", "a>", "a"], strings=["</a>"], ids=[2, 0, 1])
@example(texts=["<ab", "/"], strings=["<ab>", "ab/"], ids=[0, 1])
@example(texts=["a", "b"], strings=["aab"], ids=[0, 0, 0, 1])
def test_a_stop_string_is_found_wherever_tokens_begin(texts, strings, ids):
    table, state, said, found = stop_table(strings, texts), 0, "", False
    for token in (index % len(texts) for index in ids):
        said += texts[token]
        found = any(string in said for string in strings)
        state = int(table[state, token])
        assert (state == len(table)) == found
        if found:
            break


def test_a_stop_string_of_several_tokens_ends_a_turn():
    plain = reference()
    row = int(np.argmax(plain.loss_mask.sum(1)))
    begin, end = next(span for span in spans(plain.loss_mask[row]) if span[1] - span[0] > 3)
    string = "".join(TEXTS[token] for token in plain.tokens[row, begin + 1 : begin + 3].tolist())
    stopped = run(Talk(stops=stop_table([string[1:]], TEXTS)))  # begins in the middle of a token
    first = next(span for span in spans(stopped.loss_mask[row]) if span[0] == begin)
    assert first == (begin, begin + 3)
    np.testing.assert_array_equal(stopped.tokens[row, : begin + 3], plain.tokens[row, : begin + 3])


def test_stop_strings_without_meaning_and_those_that_no_text_of_tokens_shows_are_refused(tmp_path, capsys):
    for strings in (["a", ""], ["x" * 300]):
        with pytest.raises(InputError, match="stop strings"):
            stop_table(strings, ["a"])
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer(["<calc>12+34</calc>", "so it is"], 400))
    tokenizer, config = load_tokenizer(tmp_path), environments.get_config("guess")
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=tokenizer.vocab_size))
    config.environment.update(dict(name="guess", stop=["</calc>", "\u23f9"], workers=1))
    with pytest.raises(InputError, match="environment.name=guess: stop strings .* makes '\u23f9'"):
        build_environment(config, tokenizer, model)
    config.environment.stop = "</calc>"
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    with build_environment(config, load_tokenizer(tmp_path), model) as environment:
        assert capsys.readouterr().err.count("leaves earlier thinking out") == 1
        assert matched(environment.stops, tokenizer.encode("so <calc>12</calc> it is")) == len(environment.stops)


# Observations as tokens.

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (ROOT / "tests/data/templates/forgetful.jinja").read_text()
THINKING = [FORGETFUL, *(path.read_text() for path in ROOT.parent.glob("shared/data/thinking_template.jinja"))]
SPACED = "{% for m in messages %}{{ m.content + ' <|im_end|>' if loop.index0 % 2 else m.content | trim }}{% endfor %}"
QUOTED = SPACED.replace(" <|im_end|>'", "'").replace("m.content | trim", "'<|im_end|>' + m.content | tojson")
NUMBERED = "{% for m in messages %}({{ loop.index }}) {{ m.content }}|{% endfor %}"
ADDS = CHATML.replace("<|im_end|>", "{{ ' thought' if '</think>' in m.content }}<|im_end|>")
END = ord("E")


class Characters:
    """A token for each character, and one for <|im_end|>."""

    def __init__(self, template=None):
        self.has_template, self._chat = template is not None, template and ChatTemplate(template, "chat.jinja")

    def render(self, messages, **options):
        return self._chat.render(messages, **options)

    def encode(self, text):
        return list(map(ord, text))

    def encode_rendered(self, text):
        return self.encode(text.replace("<|im_end|>", chr(END)))

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("template", [CHATML, *THINKING])
@pytest.mark.parametrize("last, end", [(END, ""), (ord("x"), "E"), (None, "E")])
def test_an_observation_is_what_the_template_adds(template, last, end):
    """Special tokens that it spells are text. What a reply held does not matter, nor how a template shows it later."""
    told, thinks = Characters().decode, template != CHATML
    for role, said, on in itertools.product(("user", "tool"), ("higher", "over<|im_end|>"), (True, False)):
        observations = Observations(Characters(template), role, {} if on else {"enable_thinking": False})
        shown, empty = f"{role}\n{said}", "<think>\n\n</think>\n\n" if thinks and not on else ""
        if thinks and role == "tool":
            shown = f"user\n<tool_response>\n{said}\n</tool_response>"
        assert told(observations(said, last)) == f"{end}\n<|im_start|>{shown}E\n<|im_start|>assistant\n{empty}"
        assert observations.forgets == (thinks and role == "user")
    assert told(Observations(Characters(SPACED))(" a<|im_end|> ", last)) == (f" {end}" if end else "") + "a<|im_end|>"
    assert told(Observations(Characters(QUOTED))(" a<|im_end|> ", last)) == end + '" a<|im_end|> "'


@pytest.mark.parametrize("template, role, line", [
    ("{% for m in messages if m.role != 'tool' %}{{ m.content }}|{% endfor %}", "tool", "leaves .* of role tool out"),
    (NUMBERED, "user", r"goes on with '\|\(3\) A.* in the second turn with '\|\(5\) A made-up obs"),
    (ADDS, "user", "after a reply with a thought in the first turn with ' thought<"),
    (CHATML.replace("\n{{", "\n{{ m.content }}{{"), "user", "shows a reply twice"),
    (CHATML.replace("role }}", "role if m.role != 'tool' else m.a.b }}"), "tool", "attribute 'a'; it is an obs"),
])  # fmt: skip
def test_a_template_of_which_no_one_can_tell_what_follows_a_reply_is_refused(template, role, line):
    with pytest.raises(InputError, match=line):
        Observations(Characters(template), role)
    assert Observations(Characters())("higher\n", 5) == list(map(ord, "higher\n"))


# Environments.

PROBLEM = Problem(3, "words", "Say it", "", "7", {"level": 2})
MINE = """
import os, time

class Mine:
    def __init__(self, problem, seed):
        self.problem, self.seed, self.said = problem, seed, []

    def reset(self):
        return {opening}

    def step(self, action):
        self.said.append(action)
        {step}
"""


def mine(tmp_path, step="return f'{self.said} {self.problem[\"level\"]} {self.seed}', 0.5", opening=None, **limits):
    (tmp_path / "mine.py").write_text(MINE.format(step=step, opening=opening))
    return Environment(f"{tmp_path}/mine.py:Mine", Observations(Characters()), **{"workers": 1, **limits})


def test_an_episode_has_every_column_its_seed_and_its_actions_and_is_played_again_where_it_is_not_kept(tmp_path):
    with mine(tmp_path, workers=2) as environment:
        ask = functools.partial(environment.submit, problem=PROBLEM)
        assert ask("a", seed=5, actions=[]).result() == [None, []]
        assert ask("a", seed=5, actions=["x"]).result() == ["['x'] 2 5", [0.5]]
        assert ask("b", seed=6, actions=["u", "v"]).result() == ["['u', 'v'] 2 6", [0.5, 0.5]]
        assert ask("a", seed=5, actions=["x", "y"]).result() == ["['x', 'y'] 2 5", [0.5, 0.5]]


def test_actions_that_are_played_again_have_each_their_own_time_and_memory_is_not_all_kept(tmp_path):
    step = """self.big = bytearray(2**27) if action == 'big' else None
        time.sleep(0.6 * (action == 'slow'))
        return ('fine', 1.0) if action != 'end' else (None, 1.0)"""
    with mine(tmp_path, step, timeout_seconds=2.0, memory_mb=512) as environment:
        ask = functools.partial(environment.submit, problem=PROBLEM, seed=0)
        for count in range(3):
            for name in range(5):
                actions = ["big", "big", "end"][: count + 1]
                assert ask(str(name), actions=actions).result() == ["fine" if count < 2 else None, [1.0] * (count + 1)]
        assert ask("slow", actions=["slow"] * 4).result() == ["fine", [1.0] * 4]
        with pytest.raises(Failure, match="ended after 1 actions when they were played again, and not before"):
            ask("late", actions=["end", "a"]).result()


def test_a_worker_forgets_the_oldest_episodes(monkeypatch):
    monkeypatch.setattr(worker, "_MOST_EPISODES", 2)
    kept, made = {}, SimpleNamespace(reset=lambda: "go", step=lambda action: (action, 1.0))
    for name in "abac":  # "a" begins anew
        worker.play(kept, lambda problem, seed: made, name, {}, 0, [])
    assert list(kept) == ["a", "c"] and worker.play(kept, None, "b", {}, 0, ["x"]) is None


FAILURES = {
    "{}['lost']": "mine.py:13: KeyError: 'lost'",
    "3": "step returned 3 (int), not (observation, reward)",
    "('a', 'b')": "step returned the reward 'b', not a number between -1e+09 and 1e+09",
    "('a', float('nan'))": "step returned the reward nan, not a number between",
    "(5, 1.0)": "step returned the observation 5 (int), not text or None",
    "('x' * 10**7, 1.0)": "an observation of 10000000 characters, more than 1048576",
    "(chr(0xD800), 1.0)": "UnicodeEncodeError",
    "os._exit(3)": "exit status 3",
    "[bytearray(2**28) for _ in range(99)]": "mine.py:13: MemoryError (memory_mb=512)",
}


@pytest.mark.parametrize("seconds, failures", [(60.0, FAILURES), (2.0, {"time.sleep(60)": "took longer than 2 s"})])
def test_an_environment_that_fails_says_why_and_others_go_on(tmp_path, seconds, failures):
    """An action is what Python evaluates: it fails as a step might. So does the problem's answer as it is tried out."""
    fine = "('fine', 1.0)"
    with mine(tmp_path, "return eval(action)", timeout_seconds=seconds, memory_mb=512) as environment:
        ask = functools.partial(environment.submit, problem=PROBLEM, seed=0)
        for action, line in failures.items():
            assert ask("other", actions=[fine]).result() == ["fine", [1.0]]
            with pytest.raises(Failure) as failed:
                ask("first", actions=[action]).result()
            assert line in str(failed.value) and "\n" not in str(failed.value)
            assert ask("other", actions=[fine, fine]).result() == ["fine", [1.0, 1.0]]
        for answer, line in (("self.lost", "mine.py:13: AttributeError"), ("('', 0.0)", "an observation of no tokens")):
            with pytest.raises(InputError, match=rf"problem 3 \(words\) .* the first action: .*{line}"):
                environment.try_out(dataclasses.replace(PROBLEM, answer=answer))


@pytest.mark.parametrize("name, content, line", [
    ("mine.py:Mine", "class Mine:\n    def reset(self): pass", "Mine has no step; expected a class with __init__"),
    ("mine.py:Other", "class Mine: pass", "defines no class 'Other'; it defines Mine"),
    ("mine.py:Mine", "class Mine(", "mine.py:1: SyntaxError"), ("lost.py:Mine", "", "there is no file"),
    ("chess", "", "must be one of calculator, guess, textarena:NAME"),
])  # fmt: skip
def test_an_environment_that_cannot_be_is_refused(tmp_path, monkeypatch, name, content, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(InputError) as refused:
        Environment(name, Observations(Characters()), workers=1)
    assert line in str(refused.value)


def test_guess():
    game = Guess({"answer": "[3, 14]"}, seed=5)
    assert 3 <= game.number <= 14 and game.reset() is None
    assert game.step("what?") == game.step("1234567890") == ("no number\n", 0.0)
    assert game.step(str(game.number - 1)) == ("higher\n", 0.0)
    assert game.step(f"  {game.number + 1} ") == ("lower\n", 0.0)
    assert game.step(str(game.number)) == (None, 1.0)
    assert [{Guess({"answer": x}, n).number for n in range(20)} for x in ("8", "[8, 9]")] == [{8}, {8, 9}]


@pytest.mark.parametrize("action, expected", [
    ("I add <calc>1234567*89</calc>", ("109876463", 0.0)), ("<calc>(2 + 3)/4</calc>\n", ("1.25", 0.0)),
    ("<calc>__import__('os')</calc>", "error: expected"), ("<calc>9**9**9</calc>", "error: expected"),
    ("The sum is 1,234.", (None, 1.0)), ("", (None, 0.0)), ("<calc>1</calc> is 1234", (None, 1.0)),
    ("<calc>1200+34</calc>.\n", ("1234", 0.0)), ("1.00000000001234", (None, 0.0)), ("9" * 10**5, (None, 0.0)),
    ("<calc>" + "*".join(["9999999999"] * 31) + "/7</calc>", "error: expected"), ("10-1234", (None, 1.0)),
])  # fmt: skip
def test_calculator(action, expected):
    observation, reward = Calculator({"answer": "1234"}, 0).step(action)
    assert (observation, reward) == expected if isinstance(expected, tuple) else observation.startswith(expected)


SUM = json.dumps(dict(answer="1234", family="chain_sum", parameters={}, seed=7, index=0, digest="a2c99"))


@pytest.mark.parametrize("name, changes, said, before, expected", [
    (f"{ROOT}/docs/examples/my_environment.py:Hot", dict(answer="[7, 7]"), ["It is 5", "no", "7"],
     ["cold\n", [0.0, 0.0]], [None, [0.0, 0.0, 1.0]]),
    ("calculator", dict(task="gym:chain_sum", answer=SUM), ["It is 1234"], [None, []], [None, [1.0]]),
])  # fmt: skip
def test_that_of_the_documents_and_the_answer_of_a_family_of_reasoning_gym(name, changes, said, before, expected):
    assert (ROOT / "docs/examples/my_environment.py").read_text() in (ROOT / "docs/environments.md").read_text()
    problem = dataclasses.replace(PROBLEM, **changes)
    with Environment(name, Observations(Characters()), workers=1) as environment:
        environment.try_out(problem)
        assert environment.submit("a", problem, 0, said[:-1]).result() == before
        assert environment.submit("a", problem, 0, said).result() == expected


def test_a_game_of_textarena_draws_its_own_random_numbers():
    pytest.importorskip("textarena")
    with Environment("textarena:GuessTheNumber-v0", Observations(Characters()), workers=1) as environment:
        ask = functools.partial(environment.submit, problem=PROBLEM)
        one, other = (ask(name, seed=seed, actions=[]).result() for name, seed in (("a", 1), ("b", 2)))
        assert "between 1 and 20" in one[0] and one[1] == []
        hints = [ask(name, seed=1, actions=["[10]"]).result() for name in ("a", "c")]
        assert hints[0] == hints[1] and "The target number is" in hints[0][0]
        guesses, observation = list[str](), one[0]
        while observation is not None:
            guesses.append(f"[{len(guesses) + 1}]")
            observation, rewards = ask("a", seed=1, actions=guesses).result()
        assert rewards == [0.0] * (len(guesses) - 1) + [1.0]
    with pytest.raises(InputError, match="TextArena has no game 'Chess'"):
        Environment("textarena:Chess", Observations(Characters()), workers=1)


# Episodes: rows and environments together.


class Scripted:
    """An environment in this process, of any answers."""

    name, stops, seed, max_failures = "scripted", None, 1, 1.0

    def __init__(self, answer, max_turns=4, turn_tokens=6):
        self.answer, self.max_turns, self.turn_tokens = answer, max_turns, turn_tokens
        self.observations = Observations(Characters())

    def submit(self, episode, problem, seed, actions):
        future = Future()
        try:
            future.set_result(self.answer(actions))
        except Failure as failure:
            future.set_exception(failure)
        return future


def episodes(environment, groups=2, **settings):
    names, problems = zip(*(((0, n), dataclasses.replace(PROBLEM, id=n)) for n in range(groups)), strict=True)
    return Episodes(environment, Characters(), problems, names, **dict(samples=1, max_new=20) | settings)


def row(index, *parts):
    """A row of texts, of which the first is the prompt, and the second, fourth, ... are the policy's."""
    tokens = [ord(character) for part in parts for character in part]
    return Row(index, tokens, [n % 2 == 1 for n, part in enumerate(parts) for _ in part], len("".join(parts[:1])))


def test_a_row_goes_on_after_a_resume_in_a_turn_between_turns_and_at_its_end():
    said = []
    environment = Scripted(lambda actions: said.append(list(actions)) or (None, [0.5] * len(actions)))
    environment.stops = stop_table(["ST"], [chr(n) for n in range(128)])
    talk = episodes(environment, groups=3)
    under_way, between = row(0, "abcd", "one", "ok", "tS"), row(1, "abcd", "one", "ok")
    assert talk([under_way, between], 0) == [Answer(0, limit=11, matched=1), Answer(1, limit=11)] and not said
    assert talk([row(0, "abcd", "one", "ok", "tST")], None) == [Answer(0, ended=True, finished=True)]
    assert said == [["one", "tST"]] and talk.outcome(row(0)).result() == 1.0
    assert talk.outcome(row(2, "abcd", "one", "ok", "two")).result() == 1.0 and said[-1] == ["one", "two"]
    # An opening of no tokens is none, and a later observation of none fails.
    talk = episodes(Scripted(lambda actions: ("", [0.0] * len(actions))))
    assert talk([row(0, "abcd")], None) == [Answer(0, [], limit=6)]
    assert talk([row(0, "abcd", "one")], None) == [Answer(0, ended=True)]
    resumed = episodes(Scripted(lambda actions: ("" if "one" in actions else "long", [0.0])), max_new=7)
    for ended in talk.outcome(row(0)), resumed.outcome(row(0, "abcd", "one")):
        with pytest.raises(Failure, match="an observation of no tokens"):
            ended.result()
    assert "leaves none of rollout.max_new=7" in resumed.outcome(row(1, "abcd", "two")).note


def test_every_response_has_an_episode_and_a_seed_of_its_own():
    seeds = {}
    submit = lambda name, problem, seed, actions: seeds.update({name: seed})  # noqa: E731
    talk = episodes(SimpleNamespace(seed=1, stops=None, submit=submit), samples=2)
    for number in range(4):
        talk.outcome(row(number, "abcd"))
    assert [*seeds] == ["0-0-0", "0-0-1", "0-1-0", "0-1-1"] and len({*seeds.values()}) == 4


ANYTHING = st.none() | st.text("abc", max_size=30) | st.just(Failure("broken")) | st.text(max_size=3)


@settings(max_examples=100)
@given(
    answers=st.lists(ANYTHING, min_size=1, max_size=12), turns=st.lists(st.integers(1, 9), min_size=12, max_size=12),
    prompt=st.integers(1, 5), max_new=st.integers(1, 24), max_turns=st.integers(1, 5),
    turn_tokens=st.none() | st.integers(1, 6), batch=st.integers(1, 25),
)  # fmt: skip
def test_any_episode_ends_within_its_limits(answers, turns, prompt, max_new, max_turns, turn_tokens, batch):
    """Up to 25 at a time: what the environment says, and how much the policy, may be anything."""

    def answer(actions):
        said = answers[len(actions) % len(answers)]
        if isinstance(said, Failure):
            raise said
        return said, [1.0] * len(actions)

    talk = episodes(Scripted(answer, max_turns, turn_tokens), batch, max_new=max_new)
    rows = [row(n, "p" * prompt) for n in range(batch)]
    for number in range(max_turns + 2):
        answered = talk(rows, None)
        assert sorted(a.number for a in answered) == [r.number for r in rows]
        going, rows = [(r, a) for r, a in zip(rows, sorted(answered), strict=True) if not a.ended], []
        for old, a in going:
            length = len(old.tokens) + len(a.observation)
            assert length < prompt + a.limit <= prompt + max_new
            if turn_tokens is not None:
                assert prompt + a.limit - length <= turn_tokens
            drawn = min(turns[number], prompt + a.limit - length)
            tokens, mask = [*old.tokens, *a.observation], [*old.drawn, *[False] * len(a.observation)]
            rows.append(Row(old.number, tokens + [ord("y")] * drawn, mask + [True] * drawn, prompt))
        if not rows:
            break
    assert not rows
    for index in range(batch):
        outcome = talk.outcome(row(index, "p" * prompt))
        try:
            assert 0 <= len(outcome.rewards) <= max_turns
        except Failure as failure:
            assert str(failure)


# Rewards.


def test_the_return_is_a_reward_beside_others_and_failures_are_counted():
    environment = Scripted(lambda actions: (None, [2.0, -0.5]))
    environment.close = lambda: None
    talk = episodes(environment)
    outcomes = [talk.outcome(row(0, "abcd", "x")), Outcome(failure="broken")]
    items = [(PROBLEM, "It is\nAnswer: 7")] * 2
    with Scorer(environment=environment) as scorer:
        scores = scorer.submit(items, [1, 1], True, outcomes).result()
        assert [scorer.vote(PROBLEM, said) for said in ("no\n  vote ", " \n")] == ["no vote", None]
    assert scores.correct.tolist() == [1.5, 0.0] and scores.rewards[ENVIRONMENT].tolist() == [1.5, 0.0]
    assert scores.environment_failures == 1
    assert scores.failures == ["problem 3 (words): environment scripted: broken"]
    with Scorer(function="dapo", environment=environment, weights=dict(dapo=0.5)) as scorer:
        scores = scorer.submit(items, [1, 1], True, outcomes).result()
    assert scores.rewards["dapo"].tolist() == [1.0, 1.0] and list(scores.rewards) == [ENVIRONMENT, "dapo"]
    with Scorer(functions="dapo", evaluation="dapo", environment=environment) as scorer:
        scores = scorer.submit(items, [1, 1], True, outcomes).result()
    assert scores.correct.tolist() == [1.0, 0.0] and scores.rewards["dapo"].tolist() == [1.0, 1.0]
    environment.max_failures = 0.4
    with Scorer(environment=environment) as scorer, pytest.raises(InputError, match="failed on 1 of 2 responses"):
        scorer.submit(items, [1, 1], True, outcomes).result()


@pytest.mark.parametrize("failures, third", [("train", 0.0), ("mask", 0.25)])
def test_a_failed_episode_counts_or_is_left_out_and_observations_are_no_length(failures, third):
    outcomes = [Outcome([1.0]), Outcome([0.0]), Outcome(failure="broken")]
    rows = [row(n, "abcd", drawn, "said by others", "x") for n, drawn in enumerate(("five", "a", "b"))]
    begun, talk = {}, SimpleNamespace(outcome=lambda row: outcomes[row.number])
    sizes = dict(prompts=1, samples=3, max_prompt=4, slots=3, oversample=1.0, dynamic_sampling=False)
    settings = rollout_settings(**sizes, environment_failures=failures)
    environment = Scripted(None)
    environment.close = lambda: None
    with Scorer(environment=environment) as scorer:
        run = np.ones(1, bool)
        watcher(scorer, Characters(), [PROBLEM], [0], run, 3, begun, episodes=talk)(rows)
        groups, grade = [[begun[0, n] for n in range(3)]], functools.partial(make_grade, scorer, settings)
        graded = grade(scale_named("signed"), {})(np.arange(1), groups)
        half = grade(scale_named("signed"), {ENVIRONMENT: 0.5})(np.arange(1), groups)
    assert half.turn_reward.tolist() == [[[0.5, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]]
    measured, (example,), (line,) = logged(settings, [graded])
    assert line.endswith("broken; it scores 0")
    found = measured["environment_failures"], measured["reward_failures"], example["response"]
    assert found == (1, 0, begun[0, 0].text)
    assert graded.failed.tolist() == [[False, False, failures == "mask"]]
    np.testing.assert_allclose(graded.reward, [[0.5, 0.0, third]])  # five of six tokens cost 0.5
    np.testing.assert_allclose(graded.correct, [[1.0, 0.0, 0.0]])
    drawn = sequences_of(np.ones((8, 4)), np.ones((8, 4)) > 0)
    kept = without_rows(parallel.make_mesh(), drawn, np.arange(8) == 2)
    assert np.asarray(kept.loss_mask).sum(1).tolist() == [4, 4, 0, 4, 4, 4, 4, 4]


SIZES = [(1, 2, 1), (1, 3, 3), (2, 4, 1), (3, 4, 2)]  # groups, samples, turns


@settings(max_examples=60)
@given(st.data())
def test_turn_return_is_each_turns_return_to_go_normalized_over_the_group(data):
    groups, samples, turns = data.draw(st.sampled_from(SIZES))  # a program each
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    mask = rng.random((groups * samples, 9)) < 0.6
    exists = np.arange(turns) < rng.integers(1, turns + 1, (groups, samples, 1))
    each = np.where(exists, rng.normal(size=exists.shape), 0)
    rest, penalty = rng.normal(size=(groups, samples)), np.where(mask, rng.normal(size=mask.shape), 0)
    with jax.enable_x64():
        found = np.asarray(jax.jit(turn_return)(each.sum(-1) + rest, penalty, mask, each))
    for group in range(groups):
        values = {}
        for sample in range(samples):
            b = group * samples + sample
            for k, (begin, end) in enumerate(spans(mask[b])):
                value = rest[group, sample] + each[group, sample, k:].sum()
                values[b, begin, end] = np.array([value - penalty[b, t:].sum() for t in range(begin, end)])
        all_of = np.array([value[0] for value in values.values()])
        scale = all_of.std(ddof=1) + 1e-6 if len(all_of) > 1 else 1e-6
        for (b, begin, end), value in values.items():
            np.testing.assert_allclose(found[b, begin:end], (value - all_of.mean()) / scale, atol=1e-9)
    assert not found[~mask].any()


# Training.

LATE = """
import random, time

class Late:
    def __init__(self, problem, seed):
        self.left, self.late = 1 + seed % 3, random.SystemRandom()

    def reset(self):
        time.sleep(self.late.uniform(0, 0.02))
        return None

    def step(self, action):
        time.sleep(self.late.uniform(0, 0.02))
        self.left -= 1
        return (f"{len(action)}\\n" if self.left else None), 0.25 * (len(action) % 4)
"""


@pytest.mark.filterwarnings("error:Some donated buffers")
def test_a_run_is_the_same_however_late_answers_come_and_after_a_resume(call_command, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    flags = [f"--config={ROOT}/configs/environments.py:guess-smoke", "--config.environment.name=late.py:Late"]
    flags += ["--config.steps=3", "--config.checkpoint.keep_last=3", "--config.model.size=micro"]
    flags += ["--config.objective.advantage=turn_return", "--config.evaluation.every=3"]
    flags += ["--config.rollout.carry_over=True", "--config.rollout.oversample=2.0"]
    flags += ["--config.behavior.source=sampler", "--config.warm_start.steps=0"]

    def trained(folder):
        status, _, err = call_command("train", *flags, f"--workdir={folder}")
        assert status == 0, err
        return metrics(tmp_path / folder)

    straight = trained("straight")
    last = straight[-1]
    assert last["step"] == 3 and last["train/turns"] > 1 and last["train/observation_tokens"] > 0
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / str(step))
    (tmp_path / "again" / "summary.json").unlink()
    assert trained("again") == straight
    for name in ("samples.jsonl", "heldout.jsonl"):
        row = json.loads((tmp_path / "again" / name).read_text().splitlines()[-1])
        turns = (row["examples"][0] if "examples" in row else row)["turns"]
        assert all(turn.keys() == {"action", "observation", "reward"} for turn in turns)
