"""A loss from a user's file, as an objective like any other."""

import pathlib
import re
import textwrap
import traceback
from unittest import mock

import jax
import numpy as np
import pytest
from test_objectives import run, sample

from configs.sweeps import small
from rpg_jax import InputError, objectives
from rpg_jax.exact.certify import full_vocabulary_gaps
from rpg_jax.objectives import metrics
from rpg_jax.run import build, job
from rpg_jax.training.record import Record

ROOT = pathlib.Path(__file__).resolve().parents[1]
WEIGHTED = f"{ROOT}/tests/data/my_objective.py:my_objective"
TEMPERED = f"{ROOT}/docs/tempered.py:tempered"
MINE = """
import functools
import jax.numpy as jnp
from rpg_jax import objectives

def plain(logp, advantage, *, scale=1.0, bound=None): return -scale * advantage * logp, {"scaled": advantage}
def rows(advantage, logp, level="sequence"): return -advantage * logp
def one(logp, advantage): return logp * 0 + jnp.sign(advantage) / jnp.sign(advantage)
def said(logp, *, beta=0.2): return logp
said.divergence, said.advantage, said.reduction = "rkl", "leave_one_out", "sequence_mean"
many = functools.partial(said)
def telling(logp, advantage, *, estimator="mine", clip_low=2.0):
    return logp, {"up": advantage > 0, "count": jnp.arange(4), "kl_reference_weighted": 1e9 * advantage}
def reward(log_ratio, advantage, *, divergence="rkl", beta=0.2): return -jnp.exp(log_ratio) * advantage
def penalized(log_ratio, advantage, logp, reference_logp, *, divergence="rkl", beta=0.2):
    return jnp.exp(log_ratio) * (beta * (logp - reference_logp) - advantage)
def gate(log_ratio, advantage, tau=1.0):
    smooth = 4 / tau / (1 + jnp.exp(-tau * (jnp.exp(log_ratio) - 1)))
    return -smooth * advantage, {"gate": smooth}

# Losses that are refused, or raise.
def old(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None): ...
def half_listed(log_ratio, *rest): return -jnp.exp(log_ratio) * rest[0]
def by_place(log_ratio, advantage, /): return -jnp.exp(log_ratio) * advantage
def scalar(logp): return jnp.sum(logp)
def no_dict(logp): return logp, None
def forgets(logp): -logp
def tells(logp): return logp, {"method": "tells"}
def row_by_token(logp, level="sequence", reduction="token_mean"): return -logp
def required(logp, *, power): return logp
def short(logp): return logp * jnp.ones(8)[: logp.shape[1]]
def claims(logp): return logp
claims.declares = "right"
def raises(logp):
    raise RuntimeError("two\\nlines")
def branches(logp):
    return logp if logp.sum() > 0 else -logp

# Advantages; the last five are refused, or raise.
def paced(rewards, lengths, step):
    return (rewards - rewards.mean(1, keepdims=True)) / lengths ** jnp.minimum(step / 100, 1.0)
def centered(r): return r - r.mean(1, keepdims=True)
def by_name(step, *, rewards, scale=2.0): return scale * rewards + step
def everything(rewards, **more): return rewards + more["lengths"] + more["step"]
def by_turn(rewards, mask, turn_reward):
    turn = jnp.cumsum(jnp.diff(mask, axis=-1, prepend=False) & mask, axis=-1) - 1
    return jnp.take_along_axis(turn_reward, jnp.clip(turn, 0, turn_reward.shape[-1] - 1), axis=-1)
def column(rewards): return rewards.mean(1, keepdims=True)
def signs(rewards): return jnp.sign(rewards).astype(int)
def wrong(rewards): return rewards * stepp
def chooses(rewards, step): return rewards if step < 3 else -rewards
def other(rewards, gamma): return rewards

made = objectives.make("rloo", beta=0.2)
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(MINE))
    return lambda name: name if ":" in name else f"{file}:{name}"


@pytest.mark.parametrize(("spec", "settings", "ours"), [
    (WEIGHTED, {}, dict(name="rpg", divergence="urkl", beta=0.1)),
    (TEMPERED, dict(power=1.0), dict(name="rpg", beta=0.0)),
    ("gate", {}, dict(name="sapo", tau_neg=1.0, reduction="token_mean")), ("rows", {}, dict(name="rloo", beta=0.0)),
])  # fmt: skip
def test_the_same_loss_is_the_same_objective(mine, spec, settings, ours):
    """Losses and gradients, whole and in microbatches, with all that is done around a loss; and the metrics."""
    theirs, ours = objectives.make(mine(spec), **settings), objectives.make(**ours)
    *arrays, mask = sample(seed=3)
    weight = np.linspace(0.5, 2, 6)[:, None] * np.ones(5)
    if spec == "rows":
        arrays[1] = arrays[0]  # it has no ratio
    arrays[3] = np.where(mask, arrays[3], np.nan)
    count = theirs.count(mask)
    assert count == ours.count(mask)
    for rest in ({}, {"denominator": count}):
        a, b = (run(x, *arrays, mask, weight=weight, **rest) for x in (ours, theirs))
        np.testing.assert_allclose(a[0], b[0], rtol=1e-12)
        np.testing.assert_allclose(a[1], b[1], rtol=1e-12, atol=1e-15)
    logp, mu, reference, advantage = arrays
    ours, theirs = (metrics.values(x(logp, mu, advantage, mask, reference)[1]) for x in (ours, theirs))
    for name in theirs.keys() & ours.keys():
        np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-6)
    assert "kl_reference_weighted" in theirs and "clip_fraction" not in theirs  # whether it clips is not known


@pytest.mark.parametrize(("c", "divergence", "clip"), [(0.0, "urkl", "rpg"), (1.0, "rkl", "rpg"), (1.0, "rkl", "none")])
def test_the_loss_of_a_study_has_both_reverse_kls(c, divergence, clip):
    settings = dict(beta=0.3, branch=c, coefficient=c, clipped=clip == "rpg")
    *arrays, mask = sample(seed=4)
    gradients = [run(x, *arrays, mask)[1] for x in (
        objectives.make("docs/study/sign_loss.py:loss", **settings),
        objectives.make("rpg", divergence=divergence, beta=0.3, clip=clip, advantage="group_mean"),
    )]  # fmt: skip
    np.testing.assert_allclose(*gradients, rtol=1e-12, atol=1e-15)
    other = objectives.make("docs/study/sign_loss.py:loss", **settings | dict(branch=1 - c))
    assert np.array_equal(run(other, *arrays, mask)[1], gradients[0]) == (clip == "none")


def test_a_divergence_may_be_taken_outside_of_the_loss(mine):
    """Of whole distributions, exactly; and what later tokens add to it, as rpg has it."""
    assert max(full_vocabulary_gaps(objectives.make(mine("reward"), kl="full"), count=2).values()) < 1e-12
    *arrays, mask = sample(seed=5)
    rpg = objectives.make("rpg", divergence="rkl", beta=0.2, kl="to_go", estimator="differentiable")
    gradients = [run(x, *arrays, mask)[1] for x in (rpg, objectives.make(mine("penalized"), kl="to_go"))]
    np.testing.assert_allclose(*gradients, rtol=1e-12, atol=1e-15)
    assert objectives.make(mine("plain")).full_kl is None


def test_settings_are_the_other_parameters(mine):
    *arrays, mask = sample()
    one, three = objectives.make(mine("plain")), objectives.make(mine("plain"), scale=3, advantage="leave_one_out")
    loss = run(one, *arrays, mask, denominator=2.0)[0]
    assert run(three, *arrays, mask, denominator=2.0)[0] == pytest.approx(3 * loss)
    of_all = {"advantage": "leave_one_out", "sampler_correction": None, "kl": "token"}
    assert three.settings == {"scale": 3.0, "bound": None} | of_all
    _, measured = one(arrays[0], arrays[1], arrays[3], mask, denominator=2.0)
    assert measured["scaled"].value() == pytest.approx(arrays[3][mask].mean(), rel=1e-5)  # averaged under the mask
    assert run(objectives.make(mine("one")), *arrays, mask)[0] == 1  # so is a loss that is NaN elsewhere


def test_what_is_said_of_a_function(mine):
    said = objectives.make(mine("said"))
    assert (said.divergence, said.beta, said.reduction) == ("rkl", 0.2, "sequence_mean")
    assert said.settings["advantage"] == "leave_one_out" and objectives.make(mine("said"), beta=0.0).divergence is None
    assert objectives.make(mine("many")).reduction == "sequence_mean"
    rows = objectives.make(mine("rows"))
    assert (rows.level, rows.reduction) == ("sequence", "sequence_mean")
    assert objectives.make(mine("rows"), level="token").reduction == "token_mean"
    made = objectives.make(mine("made"), sampler_correction=3.0)  # one of ours is what it is there
    assert (made.reward_beta, made.level) == (0.2, "sequence")
    assert made.settings == objectives.make("rloo", beta=0.2, sampler_correction=3.0).settings


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("plain", {"scal": 1.0}, "no setting 'scal' .did you mean 'scale'.*it has: scale, bound, advantage"),
    ("plain", {"advantage": "best"}, "advantage='best'"),
    ("old", {}, r"old takes .logp, .*; expected of log_ratio, advantage, .*: def loss.log_ratio, advantage.: ret"),
    ("half_listed", {}, r"takes .log_ratio, \*rest., .* so \*rest gets nothing"),
    ("by_place", {}, r"takes .log_ratio, advantage, /., .* so log_ratio gets nothing; .*: def loss"),
    ("scalar", {}, r"scalar returns float32\[\]; expected the loss of every entry, floats \[2, 3\], alone or"),
    ("no_dict", {}, r"no_dict returns float32\[2, 3\] and a NoneType; expected"),
    ("forgets", {}, "forgets returns a NoneType; expected"),
    ("tells", {}, "tells logs a str as 'method'; expected real arrays, under names"),
    ("row_by_token", {}, "reduction='token_mean' averages tokens; level='sequence' takes sequence_mean"),
    ("required", {}, r"required needs power, which has no default: set it .--config.objective.power="),
    ("reward", {"kl": "full", "beta": 0.0}, "kl='full' needs a divergence and a beta above 0"),
    ("claims", {}, "declares='right'; expected one of: exact per sample"),
    ("made", {"beta": 0.1}, "no setting 'beta'.*; leave beta unset"),
    ("nowhere.py:f", {}, "there is no file nowhere.py"), (":f", {}, "expected FILE.py:NAME"),
])  # fmt: skip
def test_what_is_refused(mine, name, settings, words):
    with pytest.raises(InputError, match=words):
        objectives.make(mine(name), **settings)


@pytest.mark.parametrize(("name", "kind", "line"), [
    ("raises", RuntimeError, 'raise RuntimeError("two\\nlines")'),
    ("branches", jax.errors.TracerBoolConversionError, "return logp if logp.sum() > 0 else -logp"),
])  # fmt: skip
def test_what_a_function_raises_stays_what_it_is_and_has_its_line(mine, name, kind, line):
    with pytest.raises(kind) as raised:
        objectives.make(mine(name))
    assert line in [frame.line for frame in traceback.extract_tb(raised.tb) if frame.filename.endswith("mine.py")]


REWARDS = np.array([[1, 0, 0], [1, 1, 0]], np.float32)
LENGTHS = np.array([[1, 2, 3], [4, 5, 5]])


@pytest.mark.parametrize(("name", "expected"), [
    ("paced", lambda step: (REWARDS - REWARDS.mean(1, keepdims=True)) / LENGTHS ** min(step / 100, 1)),
    ("centered", lambda _: REWARDS - REWARDS.mean(1, keepdims=True)), ("by_name", lambda step: 2 * REWARDS + step),
    ("everything", lambda step: REWARDS + LENGTHS + step),
])  # fmt: skip
def test_an_advantage_of_ones_own_sees_lengths_and_the_step(mine, name, expected):
    """One program for all steps; what a KL in the reward takes off a response is off its reward."""
    made = objectives.make("grpo", advantage=mine(name))
    assert made.settings["advantage"] == mine(name)
    compute, mask = jax.jit(made.advantages), np.arange(5) < LENGTHS.reshape(-1, 1)
    for step in (0, 50, 200):
        found = compute(REWARDS, np.zeros(mask.shape), np.zeros(mask.shape), mask, np.int32(step))
        assert found.shape == (6, 1) and found.dtype == np.float32
        np.testing.assert_allclose(found.reshape(2, 3), expected(step), rtol=1e-5, atol=1e-7)
    assert compute._cache_size() == 1
    if name == "centered":
        penalized = objectives.make("rloo", beta=0.5, advantage=mine(name)).advantages
        found = jax.jit(penalized)(REWARDS, np.ones(mask.shape), np.zeros(mask.shape), mask).reshape(2, 3)
        left = REWARDS - 0.5 * LENGTHS
        np.testing.assert_allclose(found, left - left.mean(1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_an_advantage_of_ones_own_may_tell_turns_apart(mine):
    rewards, turn_reward = REWARDS[:, :2], np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    mask = np.array([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])
    given = rewards, np.zeros(mask.shape), np.zeros(mask.shape), mask
    found = objectives.make("grpo", advantage=mine("by_turn")).advantages(*given, turn_reward=turn_reward)
    np.testing.assert_array_equal(np.asarray(found)[mask > 0], [0, 1, 1, 2, 2, 4, 5, 6])
    found = objectives.make("grpo", advantage=mine("by_turn")).advantages(*given)
    np.testing.assert_array_equal(found, np.zeros(mask.shape))


@pytest.mark.parametrize(("name", "kind", "words"), [
    ("column", InputError, "column returns float32[4, 1]; expected floats of the shape of rewards, [4, 4], or of mask"),
    ("signs", InputError, "signs returns int32[4, 4]; expected floats"),
    ("wrong", NameError, "name 'stepp' is not defined"),
    ("chooses", jax.errors.TracerBoolConversionError, "boolean"),
    ("other", InputError, "takes (rewards, gamma); expected (rewards [P, G], lengths [P, G], step, mask [P, G, T], tu"),
])  # fmt: skip
def test_an_advantage_is_tried_before_weights_load(mine, name, kind, words):
    config = small.get_config("smoke")
    config.objective.advantage = mine(name)
    with pytest.raises(kind, match=re.escape(words)):
        build.build_objective(config)


def test_settings_that_are_not_ours_may_be_anything_and_booleans_are_shares(mine):
    made = objectives.make(mine("telling"))
    assert made.settings["estimator"] == "mine" and made.settings["clip_low"] == 2.0
    *arrays, mask = sample()
    own = metrics.values(made(arrays[0], arrays[1], np.where(mask, arrays[3], 0), mask)[1])
    assert own["up"] == pytest.approx((arrays[3][mask] > 0).mean()) and own["count"] == 1.5
    assert own["kl_reference_weighted"] < 1e6  # ours, which the reference schedule reads
    loop, groups = build.build_settings(small.get_config("smoke"))["loop"], mock.MagicMock(metrics={"reward": 0.5})
    groups.seconds = {"rollout": 1.0}
    record = Record(loop, groups)
    record.before = {"entropy": metrics.mean_of(1.0)}
    record.during = dict.fromkeys(("entropy", "reward", "mine"), metrics.mean_of(7.0))
    record.clock.seconds["update"], record.microbatches = 1.0, 1
    row = record.row(mock.MagicMock())
    assert (row["train/entropy"], row["train/reward"], row["train/mine"]) == (1.0, 0.5, 7.0)


def test_a_config_may_name_it_and_hosts_must_have_the_same_file(mine, monkeypatch):
    config = small.get_config("smoke")
    config.objective.name, config.objective.sampler_correction = mine("plain"), 2.0
    assert build.build_objective(config).settings["sampler_correction"] == 2.0
    config.objective.name = mine("short")
    with pytest.raises(ValueError, match=r"Incompatible shapes .*\(8,\)"):
        build.build_objective(config)
    compared = []
    config.objective.name = mine("plain")
    monkeypatch.setattr(job.multihost, "check_same", compared.append)
    job.check_same(config)
    file = pathlib.Path(mine("plain").removesuffix(":plain"))
    file.write_text(file.read_text() + "\n# changed")
    job.check_same(config)
    assert [key for key in compared[0] if compared[0][key] != compared[1][key]] == ["config.code.objective"]
