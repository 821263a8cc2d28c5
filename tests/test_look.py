"""`python -m rpg_jax.look`: the coefficients that it shows, and its page in headless Chromium."""

import html
import json
import pathlib
import re
import shutil
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from rpg_jax import InputError
from rpg_jax.exact import certify
from rpg_jax.lab.looking import numbers, page
from rpg_jax.storage import logs, workdir

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --dump-dom"
EVIL = '</script><img src=x onerror="document.title=1"><script>document.title="ran"</script>'
SAID = ["a good response", f"b {EVIL} & <b>bold</b>", "c €\n2", "d short"]


@pytest.mark.parametrize("spec", [
    "rpg", "rpg+clip=coefficient", "rpg+divergence=rkl+clip=dual+clip_c=3", "rpg+clip=icepop", "gspo", "dr_grpo",
    "rpg+level=sequence+clip=none+beta=0.3", "rpg+kl=to_go+clip=none", "grpo", "sapo",
    "tests/data/my_objective.py:my_objective",
])  # fmt: skip
def test_coefficients_are_the_gradients_that_verify_examines(spec):
    """Of every sequence of the enumerated policies; what is kept in float32 differs by its rounding."""
    config = quickstart.get_config()
    config.objective.beta = 0.1
    with jax.enable_x64():
        objective = numbers.shown(config, spec).objective
        expected = certify.sample_gradients(objective, 2, 0)
        for space, gradients in expected.items():
            policies = certify._problems(2, 0)[space]
            logs_of = jax.vmap(lambda x, space=space: certify.token_logprobs(space, x, observed=True))
            current, behavior, reference = (np.asarray(logs_of(x)) for x in policies[:3])
            advantage = np.asarray(policies.advantage)
            rows = [
                [dict(tokens=space.token[n], loss_mask=space.mask[n], current_logp=current[s, n], weight=[1.0],
                      behavior_logp=behavior[s, n], reference_logp=reference[s, n], advantage=advantage[s, n])]
                for s in range(0, len(current), 7) for n in range(len(space.token))
            ]  # fmt: skip
            arrays = numbers.arrays_of(rows)
            found, cut = numbers.of_groups(objective, arrays)
            scale = jax.vmap(lambda mask: numbers.shares(objective, mask))(jnp.asarray(arrays["mask"]))
            wanted = -np.asarray(gradients)[::7].reshape(len(rows), 1, -1)
            np.testing.assert_allclose(found / np.asarray(scale)[:, None, None], wanted, rtol=1e-6, atol=1e-12)
            assert cut.dtype == bool and not (cut & ~arrays["mask"]).any()


class Characters:
    """A tokenizer whose ids are characters; 0 says nothing, and 1, 2 and 3 are the bytes of a euro sign."""

    def decode(self, ids):
        parts = {0: b"", 1: b"\xe2", 2: b"\x82", 3: b"\xac"}
        return b"".join(parts.get(id, chr(id).encode()) for id in ids).decode(errors="replace")

    def tokens(self):
        return ["<end>", "<E2>", "<82>", "<AC>"]


def row_of(number, text, step=2, ratio=0.0):
    ids = [id for character in text for id in ([1, 2, 3] if character == "€" else [ord(character)])] + [0]
    size = len(ids)
    mask = np.arange(size) % 4 != 3 if number == 3 else np.ones(size, bool)
    behavior = np.full(size, -1.0, np.float32)
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False]))
    return dict(
        update=7, group=0, sample=number, problem=5, task=EVIL, prompt=f"What? {EVIL}", answer="4", finished=True,
        rewards=json.dumps({"reward": number}), turns=edges.astype(np.int32), tokens=np.array(ids, np.int32),
        loss_mask=mask, behavior_logp=behavior, current_logp=behavior + np.where(np.arange(size) == 2, ratio, -0.01),
        reference_logp=behavior - 0.1, entropy=behavior + 2, weight=np.ones(size, np.float32), age=1 * mask,
        advantage=np.array([1.5 - number], np.float32), step=step,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder: in response 0 the third token's ratio is e and its advantage positive, so that clips cut it."""
    workdir.open_workdir(tmp_path, quickstart.get_config(), False)
    workdir.record(tmp_path, tmp_path, quickstart.get_config())
    with logs.RunLog(tmp_path, 0, {}, tensorboard=False) as log:
        for step in (2, 4):
            log.write({"step": step}, look=[row_of(*pair, step, 1.0) for pair in enumerate(SAID)])
    monkeypatch.setattr(page, "tokenizer_of", lambda config: Characters())
    return tmp_path


def write(folder, **changes):
    page.main(types.SimpleNamespace(workdir=str(folder), **dict(step=None, objectives=None, out=None) | changes))
    return folder / "look.html"


def dump(tmp_path, text, name="page.html"):
    (tmp_path / name).write_text(text)
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/{name}#step=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@browser
def test_the_page_in_a_browser(run, tmp_path):
    """Its own policy lets no script of a test run, nor any of a response; here it is taken away."""
    text = write(run, objectives=["rpg", "rpg+clip=coefficient", "rpg+clip=none"]).read_text()
    drive = pathlib.Path(__file__).with_name("data").joinpath("look.html").read_text()
    driven = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</html>", drive + "</html>")
    text = html.unescape(re.search(r"<pre>(.*?)</pre>", dump(tmp_path, driven), re.DOTALL)[1])
    start, token, second, back, color, earlier, first = json.loads(text)
    assert start["step"] == "4" and [earlier["step"], first["step"]] == ["2", "2"]
    # A ratio of e and a positive advantage, in two responses: Algorithm 2, and equation 4.1.
    assert start["cut"] == ["0 2 0", "1 2 0"] and start["held"] == ["0 2 1", "1 2 1"]
    assert all(said.count(SAID[1]) == 1 for said in start["responses"][1]) and len(start["responses"][1]) == 3
    assert start["responses"][2][0] == "c \ufffd<82>€↵\n2<end>" and EVIL in start["prompt"]
    assert start["elements"] == 0 and all(one["title"] == f"look: {run}" for one in (start, first))
    assert start["turns"] == 3 * ["policy", "environment", "policy", "environment"]
    assert "ratio to behavior2.718" in token["detail"] and "0, cut" in token["detail"], token["detail"]
    assert [one["place"] for one in (second, back)] == [2, 1]
    assert color["color"] == "behavior" and [len(one) for one in color["responses"]] == [1] * 4
    assert color["painted"] != start["painted"] != "" and start["bars"] == 3 * 41 and start["other"] == 6


@browser
def test_the_page_runs_under_its_own_policy_and_no_script_of_a_response_does(run, tmp_path):
    dom = dump(tmp_path, write(run).read_text())
    assert 'class="response"' in dom and f"<title>look: {run}</title>" in dom
    assert "<script>document.title" not in dom and "<img" not in dom
    with_markup = write(run).read_text().replace("</main>", f"</main>{EVIL[9:]}")  # as if a response were markup
    assert f"<title>look: {run}</title>" in dump(tmp_path, with_markup)


def test_a_page_is_data_in_a_template_and_steps_are_chosen(run, monkeypatch):
    text = write(run).read_text()
    contents = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1])
    assert [group["step"] for group in contents["groups"]] == [2, 4] and text.count("</script>") == 2
    assert [one["rewards"]["reward"] for one in contents["groups"][0]["responses"]] == [0, 1, 2, 3]
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg|http-equiv", "", text)
    monkeypatch.setattr(page, "MOST_TOKENS", 200)
    (kept,), (note,) = page.read_groups(run / logs.LOOK, None)
    assert kept[0]["step"] == 4 and note.startswith("1 of 2 kept steps are left out")
    assert [rows[0]["step"] for rows in page.read_groups(run / logs.LOOK, 2)[0]] == [2]


@pytest.mark.parametrize(("changes", "words"), [
    (dict(step=3), "--step=3: tokens are kept of the steps 2, 4"), (dict(out="x.txt"), "--out=x.txt: expected a file"),
    (dict(objectives=["rgp"]), "unknown objective 'rgp'"), (dict(objectives=["grpo+clp=none"]), "clp"),
    (dict(objectives=["rpg+clip"]), "'clip' sets nothing"), (dict(objectives=["rpg+name=grpo"]), "'name=grpo' sets"),
])  # fmt: skip
def test_mistakes(run, changes, words):
    with pytest.raises(InputError, match=re.escape(words)):
        write(run, **changes)


def test_a_log_that_is_none(run):
    (run / logs.LOOK).write_bytes(b"PAR1")
    with pytest.raises(InputError, match="is no parquet file, or cut short"):
        write(run)
    (run / logs.LOOK).unlink()
    with pytest.raises(InputError, match="holds no tokens: .*log.look_every is 0"):
        write(run)
