"""Chat templates render as they say, and what a template raises or tries ends in one line."""

import pathlib

import pytest

from rpg_jax.data.chat import PLAIN, ChatTemplate

TEMPLATES = pathlib.Path(__file__).parent / "data" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": " Solve. "}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}


def template(name):
    path = TEMPLATES / f"{name}.jinja"
    return ChatTemplate(path.read_text(), str(path), SPECIAL)


THINKING, DATED = template("thinking"), template("dated")
ASKED = "<|turn|>user\nWhat is 2 + 2?<|end|>\n"


@pytest.mark.parametrize(("messages", "options", "text"), [
    ([USER], {}, ASKED + "<|turn|>assistant\n"),
    ([USER], {"enable_thinking": False}, ASKED + "<|turn|>assistant\n<think>\n\n</think>\n\n"),
    ([USER, THOUGHT, USER], {"add_generation_prompt": False},
     ASKED + "<|turn|>assistant\n4<|end|>\n" + ASKED),  # thoughts before the last question are forgotten
    ([USER, {"role": "assistant", "content": "4", "reasoning": "Easy.", "tool_calls": None}],
     {"add_generation_prompt": False}, ASKED + "<|turn|>assistant\n<think>\nEasy.\n</think>\n\n4<|end|>\n"),
    ([SYSTEM, USER], {"tools": [{"name": "a<b>&'é"}], "add_generation_prompt": False},
     '<|turn|>system\nSolve.\nTools:\n{"name": "a<b>&\'é"}<|end|>\n' + ASKED),
])  # fmt: skip
def test_a_template_of_a_thinking_model(messages, options, text):
    assert THINKING.render(messages, **options) == text


def test_a_template_with_a_date_and_special_tokens():
    parts = [{"type": "text", "text": "Is it"}, {"type": "image"}, {"type": "text", "text": "4?"}]
    messages = [SYSTEM, USER, {**THOUGHT, "content": "4\n", "scores": {"a": [1]}}, {"role": "user", "content": parts}]
    assert DATED.render(messages, date="1 May 2030") == (
        "<s>[system]\n\nToday: 1 May 2030\nSolve.</s>\n"
        "[user]\n\nWhat is 2 + 2?</s>[assistant]\n\n4</s>(a = [\n  1\n])[user]\n\nIs it 4?</s>[assistant]\n\n"
    )
    assert "Today: 26 Jul 2024\n" in DATED.render([USER]), "the same on every day"


def test_a_prompt_is_the_same_at_any_time_and_place(monkeypatch):
    source = "{{ strftime_now('%c %Z') }} {{ range(9999) | random }}"
    texts = set()
    for zone in ("America/New_York", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        one = ChatTemplate(source, "one")
        texts |= {one.render([USER]), one.render([USER])}
    assert len(texts) == 1 and min(texts).startswith("Fri Jul 26 00:00:00 2024 ")


def test_contents_are_data_and_plain_is_what_the_messages_say():
    text = "{{ 7 * 7 }}{% for %} \u2581\U0001f600 <b>&amp;\r\n"
    assert text in THINKING.render([{"role": "user", "content": text}])
    plain = ChatTemplate(PLAIN, "plain")
    assert plain.render([SYSTEM, USER]) == " Solve. \nWhat is 2 + 2?\n"
    with pytest.raises(ValueError, match="plain.*can only concatenate"):
        plain.render([{"role": "user", "content": ["a", "part"]}])


def test_what_a_template_raises_is_one_line_with_file_and_problem():
    with pytest.raises(ValueError, match=r"dated\.jinja.*'What is 2 \+ 2\?'.*Roles must alternate: ") as error:
        DATED.render([USER, USER])
    assert "\n" not in str(error.value)
    assert DATED.render([USER]), "and the next rendering is none the worse"


@pytest.mark.parametrize(("source", "complaint"), [
    ("\n\n{% for m in messages %}", "line 3"), ("{{ x | no_such_filter }}", "no_such_filter"),
    ("{{" + "(" * 50_000, "recursion"),
])  # fmt: skip
def test_a_template_that_does_not_compile(source, complaint):
    with pytest.raises(ValueError, match=f"(?s)^some/file: the chat template .*({complaint})"):
        ChatTemplate(source, "some/file").render([USER])


ESCAPES = [
    "{{ ''.__class__.__mro__ }}", "{{ ''.__class__ }}", "{% if messages.__class__ %}{% endif %}",
    "{{ messages | attr('__class__') }}", "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ '%s' | format(messages.__len__) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ self.__init__ }}", "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}", "{{ messages[0].pop('role') }}",
    "{{ dict.fromkeys('ab') }}", "{{ namespace(__class__=1) }}", "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
]  # fmt: skip
BOMBS = [
    ("{{ range(10**10) | list }}", "Range too big"), ("{{ [].no.such }}", "no attribute"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "complaint"), [*((source, "") for source in ESCAPES), *BOMBS])
def test_the_sandbox_and_python_refuse_in_one_line(source, complaint):
    with pytest.raises(ValueError, match=f"^escape.jinja: the chat template fails on 1 message.*{complaint}"):
        ChatTemplate(source, "escape.jinja").render([USER])
