"""The command: what it says, what it writes, and how it leaves."""

import functools
import json
import pathlib
import re

import jax.numpy as jnp
import pytest

from rpg_jax.lab.forms import reduction_faults
from rpg_jax.objectives import CLIPS, reductions

MINE = """
import jax
import jax.numpy as jnp

def weighted(log_ratio, advantage): return -jnp.exp(log_ratio) * advantage
def unweighted(logp, advantage): return -advantage * logp
def silent(logp, advantage): return unweighted(logp, advantage)

weighted.declares = "exact per sample"
unweighted.declares = ("exact per sample", "exact in expectation")
number = 3

def infinite(log_ratio): return jnp.sqrt(jnp.abs(log_ratio))
def undefined(logp): return 0 * jnp.log(logp)
def listed(logp): return logp

listed.divergence, listed.beta, listed.declares = ["rkl"], 0.1, ("biased",)

def broken(logp):
    raise RuntimeError("two\\nlines")

def clipped(log_ratio, advantage): return -jnp.exp(jnp.clip(log_ratio, -5, 5)) * advantage
def floored(log_ratio, advantage): return -jnp.exp(jnp.maximum(log_ratio, -20)) * advantage
def clamped(log_ratio, advantage, logp, reference_logp):
    return weighted(log_ratio, jax.lax.stop_gradient(advantage - 0.1 * jnp.maximum(logp - reference_logp, -18)))

clamped.divergence, clamped.beta = "urkl", 0.1

def bounded(log_ratio, advantage): return weighted(log_ratio, jnp.minimum(advantage, 50))
def rolled(log_ratio, advantage): return weighted(log_ratio, jnp.roll(advantage, 2, 0))
def shifted(log_ratio, advantage): return weighted(log_ratio, jnp.pad(advantage, ((0, 0), (1, 0)))[:, :-1])
def averaged(log_ratio, advantage): return weighted(log_ratio, 3 * advantage / advantage.shape[1])
def others(log_ratio, advantage):
    rows = len(advantage)
    return weighted(log_ratio, advantage - (advantage.sum(0) - advantage) / max(rows - 1, 1))
"""
FAR, MEAN = "biased (NUMBER %), far ratios", "exact in expectation NUMBER"
OF_ROWS = "three have other gradients in one call than in three, from the advantage of other rows"
OF_COLUMNS = "a gradient depends on the number of columns beyond a row's tokens"


@pytest.fixture
def call(tmp_path, call_command):
    """The command, in a folder with objectives of its own."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "half.py").write_text("def f(:")
    return functools.partial(call_command, "verify")


def test_everything_built_in_is_what_it_declares(call):
    status, out, err = call("--json=out.json")
    assert status == 0 and "All are what they declare" in out, err
    report = json.loads(pathlib.Path("out.json").read_text())
    entries = report["objectives"]
    assert report["ok"] and all(entry["holds"] for entry in entries)
    assert len({entry["divergence"] for entry in entries if entry["objective"] == "rpg"}) == 9
    exact, mean, biased = "exact per sample", "exact in expectation", "biased"  # on policy, off policy
    for entry in entries:
        name, clip, verdict = entry["objective"], entry["clip"], tuple(entry["verdict"].values())
        if name in ("rpg", "grpo_corrected") and clip == "none":
            assert verdict == (exact, exact)
        elif name == "rpg" and clip in CLIPS:
            mean_only = clip == "dual" and entry["divergence"] in ("rkl", "urkl")
            assert verdict == (mean if mean_only else exact, biased)
        elif name == "grpo":
            assert verdict == (biased, biased)
    named = {(entry["objective"], entry["clip"]): tuple(entry["verdict"].values()) for entry in entries}
    assert named["rloo", "-"] == (exact, exact)
    assert named["rloo, KL in the reward", "-"] == named["reinforce_pp, KL in the reward", "none"] == (mean, biased)
    assert named["gspo", "ppo"] == named["gspo", "none"] == (biased, biased)
    assert named["gpg", "-"] == named["sapo", "-"] == named["cispo", "-"] == named["dr_grpo", "ppo"] == (exact, biased)
    assert named["reinforce_pp", "ppo"] == named["reinforce_pp_baseline", "none"] == (exact, biased)
    mixtures = [entry for entry in entries if "two policies" in entry["objective"]]
    assert len({(entry["objective"], entry["level"]) for entry in mixtures}) == 4
    for entry in mixtures:
        near = [one for one in entry["measurements"] if "situation" not in one]  # the table's own conditions
        gaps = [one[gap] for one in near for gap in ("per_sample_gap", "expected_gap")]
        assert max(gaps) < 1e-9 if entry["objective"].endswith("recorded") else min(gaps) > 0.01
    moved = {(entry["objective"], entry["clip"]): list(entry["bias_percent_by_kl"].values()) for entry in entries}
    assert moved["dapo", "none"] == moved["grpo_corrected", "none"] == [0, 0, 0, 0]
    for name, clip in (("reinforce", "-"), ("grpo", "none"), ("reinforce_pp_baseline", "none"), ("cispo", "-")):
        assert moved[name, clip] == sorted(moved[name, clip]) and moved[name, clip][-1] > 20
    natural = report["natural_gradient_gaps"]
    assert max(natural["rkl"]) < 1e-9 and 0.01 > natural["fkl"][1] < natural["fkl"][0] / 9
    assert len(report["full_vocabulary_gaps"]) >= 4 and max(report["full_vocabulary_gaps"].values()) < 1e-9
    assert not report["divergence_faults"]
    controlled = {(entry["objective"], entry["level"]): tuple(entry["verdict"].values()) for entry in entries}
    for level in ("token", "sequence"):
        assert controlled["rpg, control optimal", level] == controlled["rpg, control -0.5", level] == (mean, mean)
    assert controlled["rpg, to go", "sequence"] == controlled["rpg, to go", "path"] == (mean, biased)
    assert controlled["rpg, to go", "token"] == (biased, biased)
    assert "away, by KL(behavior || policy)" in out and "KL 0.001  KL 0.01" in out
    one = entries[0]["measurements"]
    assert len(one) == 52 and all(m["expected_gap"] < 1e-12 for m in one if "situation" not in m)


def test_a_function_that_keeps_its_word(call):
    status, out, _ = call("--objective=mine.py:weighted")
    assert status == 0 and out.count("exact per sample") == 2 and "All are what they declare" in out
    status, out, _ = call("--objective=mine.py:infinite")  # on policy, and it declares nothing
    assert (status, out) == (1, "mine.py:infinite: the gradient is infinite for finite inputs, on policy\n")
    status, out, _ = call("--objective=mine.py:undefined", "--json=out.json")
    assert (status, out) == (1, "mine.py:undefined: the loss is NaN for finite inputs\n")
    assert json.loads(pathlib.Path("out.json").read_text())["ok"] is False


def test_a_function_that_does_not(call):
    status, out, _ = call("--objective=mine.py:unweighted", "--json=out.json")
    assert status == 1 and "Not what they declare: 1" in out
    [entry] = json.loads(pathlib.Path("out.json").read_text())["objectives"]
    assert entry["verdict"] == {"on_policy": "exact per sample", "off_policy": "biased"} and not entry["holds"]
    assert call("--objective=mine.py:weighted", "--divergence=urkl", "--beta=0.1")[0] == 1  # it lacks the regularizer
    status, out, _ = call("--objective=mine.py:silent")
    assert status == 0 and "declares nothing" in out and "Nothing was declared" in out
    assert call("--objective=mine.py:unweighted", "--declares=exact per sample, biased")[0] == 0


@pytest.mark.parametrize("name, on_policy, off_policy, named", [
    ("clipped", "exact per sample NUMBER", FAR, ""), ("floored", "exact per sample NUMBER", FAR, ""),
    ("clamped", FAR, FAR, ""), ("bounded", *2 * ["biased (NUMBER %), large advantages"], ""),
    ("rolled", *2 * ["biased (NUMBER %)"], OF_ROWS), ("others", MEAN, MEAN, OF_ROWS),
    ("shifted", *2 * ["biased (NUMBER %)"], "a token's gradient depends on the advantage of other tokens"),
    ("averaged", *2 * ["exact per sample NUMBER"], OF_COLUMNS),
])  # fmt: skip
def test_what_is_wrong_far_away_or_in_a_batch_alone_is_named(call, name, on_policy, off_policy, named):
    status, out, _ = call(f"--objective=mine.py:{name}")
    lines = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?(?= %|  )", "NUMBER", out).splitlines()
    [row] = [line for line in lines if line.startswith(f"mine.py:{name} ")][:1]
    assert re.split(" {2,}", row.strip())[-3:-1] == [on_policy, off_policy]
    assert status == int(named == OF_COLUMNS) and any(line.endswith(named) for line in lines)
    claims = ", ".join(f'"{words.split(" NUMBER")[0].split(" (")[0]}"' for words in (on_policy, off_policy))
    assert lines[-1].startswith(f"Declare what it is: {name}.declares = ({claims})")


def test_a_count_that_is_wrong_is_seen(monkeypatch):
    assert not reduction_faults()
    monkeypatch.setattr(reductions, "count", lambda reduction, mask: jnp.sum(jnp.ones_like(mask, bool)))
    assert set(reduction_faults()) == {"token_mean", "sequence_mean", "sequence_mean_token_mean"}


@pytest.mark.parametrize("arguments, words", [
    (["--objective=mine.py:missing"], ["missing", "weighted"]),
    (["--objective=mine.py:number"], ["int", "number", "function"]),
    (["--objective=mine.py:listed"], ["divergence=['rkl']", "urkl"]),
    (["--objective=half.py:f"], ["half.py, line 1: invalid syntax"]),
    (["--objective=mine.py:weighted", "--beta=0.1"], ["divergence"]),
    (["--objective=mine.py:weighted", "--json=nowhere/out.json"], ["nowhere"]),
    (["--beta=0.1"], ["--beta", "--objective"]), (["--jason=x"], ["jason"]),
])  # fmt: skip
def test_mistakes_are_one_line(call, arguments, words):
    status, out, err = call(*arguments)
    assert status == 2 and not out
    assert err.count("\n") == 1 and all(word in err for word in words)


def test_what_a_users_function_raises_shows_its_lines(call):
    status, _, err = call("--objective=mine.py:broken")
    assert status == 1 and "Traceback" in err and 'raise RuntimeError("two\\nlines")' in err
