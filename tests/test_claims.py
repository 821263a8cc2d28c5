"""What the pages of findings print is what the kept runs give, computed here anew by a few lines of pandas."""

import functools
import itertools
import json
import math
import pathlib
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).parents[1]
STUDY = ROOT / "docs/study"
SCORE = "eval/counting/mean@4"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def runs(name: str) -> dict[tuple[str, int], tuple[pd.Series, dict]]:
    """(variant, seed) -> (its scores by step, all that was logged) of the runs of a study's file."""
    found = {}
    for row in pd.read_parquet(STUDY / f"{name}.parquet").itertuples():
        columns = json.loads(row.metrics)
        scores = pd.Series(columns[SCORE], columns["step"], dtype=float).dropna()
        found[row.path.split("/")[-2], json.loads(row.settings)["seed"]] = scores, columns
    return found


def holm(p: list[float]) -> np.ndarray:
    order, adjusted = np.argsort(p), np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.sort(p) * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1)


def interval(values) -> tuple[float, float]:
    """Mean and half of the 95 % t interval."""
    return values.mean(), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def paired(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float]:
    """Of a − b over seeds: mean and 95 % t interval in points, p of the t-test, p of the exact sign-flip test."""
    gap = a - b
    mean, half = interval(100 * gap)
    flips = functools.reduce(lambda sums, x: np.r_[sums + x, sums - x], gap, np.zeros(1))
    return mean, half, stats.ttest_1samp(gap, 0).pvalue, np.mean(np.abs(flips) >= abs(gap.sum()) - 1e-12)


def corrected(found: dict) -> dict:
    """What `paired` found, by name, with both p after Holm's correction for all of them."""
    both = [holm([of[place] for of in found.values()]) for place in (2, 3)]
    return {name: (*of[:2], *p) for (name, of), *p in zip(found.items(), *both, strict=True)}


def cells(mean: float, half: float, t: float, flip: float) -> str:
    """A row's end in a table of paired differences."""
    return f"{mean:.2f} ± {half:.2f} | {t:.2g} | {flip:.2g}".replace("-", "−", int(mean < 0))


@pytest.fixture(scope="module")
def stale():
    """delay, score -> {(arm, arm): (mean, half, p of t after Holm, p of the sign-flip after Holm)}."""
    values = {}
    for (variant, seed), (scores, _) in runs("asynchrony").items():
        arm, delay = variant.split("-")
        area = np.trapezoid(scores, scores.index) / scores.index[-1]
        for key, value in (("final", scores.iloc[-1]), ("area", area)):
            values.setdefault((int(delay), key), {}).setdefault(arm, {})[seed] = value
    table = {}
    for key, arms in values.items():
        score = pd.DataFrame(arms).sort_index()
        pairs = {(a, b): paired(score[a].to_numpy(), score[b].to_numpy()) for a, b in itertools.combinations(score, 2)}
        table[key] = corrected(pairs)
        table[key] |= {(b, a): (-mean, *rest) for (a, b), (mean, *rest) in table[key].items()}
    return table


def test_stale_rollouts(stale):
    text = page("docs/study/asynchrony.md")

    def printed(delay, score, a, b, digits=2):
        mean, half, *_ = stale[delay, score][a, b]
        return f"{mean:.{digits}f} ± {half:.{digits}f}".replace("-", "−")

    for key, digits in {
        (16, "area", "none", "rpg"): 2, (16, "area", "urkl", "rpg"): 2, (16, "final", "rpg", "none"): 2,
        (16, "final", "rpg", "m2po"): 2, (16, "final", "dppo", "rpg"): 2, (16, "final", "rpg", "urkl"): 2,
        (64, "area", "urkl", "none"): 2, (64, "area", "urkl", "m2po"): 2, (64, "area", "urkl", "dppo"): 1,
        (64, "area", "urkl", "rpg"): 1, (64, "final", "urkl", "none"): 2,
    }.items():  # fmt: skip
        assert printed(*key, digits) in text, key
    late = stale[64, "area"]
    chances = [f"{late['urkl', arm][2]:.0e}" for arm in ("none", "m2po", "dppo", "rpg")]
    assert chances == ["6e-04", "4e-09", "2e-05", "2e-13"]
    assert {round(p[3], 2) for p in late.values()} == {0.02}
    assert max(p[2] for names, p in stale[64, "final"].items() if "rpg" in names) == pytest.approx(0.025, abs=5e-4)
    assert max(p[3] for names, p in stale[64, "final"].items() if "rpg" in names) == pytest.approx(0.041, abs=5e-4)
    assert stale[64, "final"]["urkl", "none"][2:] == pytest.approx((0.026, 0.07), abs=1e-3)
    assert stale[16, "final"]["rpg", "urkl"][2:] == pytest.approx((0.063, 0.059), abs=1e-3)
    assert min(p[2] for score in ("final", "area") for p in stale[0, score].values()) > 0.05


def test_as_printed_and_as_released():
    found = runs("equivalence")
    assert len(found) == 70
    for _, columns in found.values():  # no clip acted
        assert not np.any(np.array(columns["train/clip_fraction"], float) > 0)
    last = pd.Series({key: scores.iloc[-1] for key, (scores, _) in found.items()}).unstack(0)
    text = page("docs/study/released.md")
    half = stats.t.ppf(0.975, 9) * last.sem()
    for variant, mean in last.mean().items():
        assert f"| {mean:.4f} | {mean - half[variant]:.4f} – {mean + half[variant]:.4f} |" in text, variant
    alike = last.drop(columns=["as-released", "dapo"])
    assert all(abs(paired(alike[a], alike[b])[0]) < 0.1 for a, b in itertools.combinations(alike, 2))
    costs = [paired(last[name], last["as-released"])[0] for name in last if name != "as-released"]
    assert f"{min(costs):.1f} to {max(costs):.1f} points" in text
    rate = paired(last["algorithm-2-urkl"], last["as-released"])
    assert f"{rate[0]:.1f} ± {rate[1]:.1f} points" in page("docs/findings.md")


def test_the_coefficient_of_the_kl():
    rows = []
    for (variant, _), (scores, columns) in runs("betas").items():
        kl = pd.Series(columns["eval/kl_reference"], dtype=float).dropna()
        rows.append((*re.match(r"(.*)-([\d.e-]+)$", variant).groups(), scores.iloc[-1], kl.iloc[-1]))
    mean = pd.DataFrame(rows, columns=["family", "beta", "score", "kl"]).groupby(["family", "beta"]).mean()
    text = page("docs/study/kl.md")
    for family, of in mean.groupby("family"):
        for (_, beta), (score, kl) in of.iterrows():
            if float(beta) <= 0.01:
                assert f"{score:.3f}, {kl:.3f}" in text, (family, beta)
    last = mean.kl.unstack(0).loc[max(mean.index.levels[1], key=float)]
    assert [f"{last[a] / last[b]:.1f}" for a, b in (("fkl", "ufkl"), ("rkl", "urkl"))] == ["3.4", "3.8"]


def test_a_sampler_in_8_bits():
    last = {}
    for row in pd.read_parquet(STUDY / "quantized.parquet").itertuples():
        score = pd.Series(json.loads(row.metrics)["eval/all/mean@8"], dtype=float).dropna().iloc[-1]
        last.setdefault(row.path.split("/")[-2], {})[row.path.split("/")[-1]] = score
    last = 100 * pd.DataFrame(last)
    text, half = page("docs/study/quantized.md"), stats.t.ppf(0.975, 4) * last.sem()
    for variant, mean in last.mean().items():
        assert f"{mean:.1f} % ({mean - half[variant]:.1f} – {mean + half[variant]:.1f})" in text, variant


def test_distillation():
    """The page's table, from the runs' rows, and its score and entropy from what the trainings logged."""
    text, measures = page("docs/study/distillation.md"), ["score", "pass", "entropy", "reverse", "forward"]
    for file, count in ("distillation", 30), ("distillation_full", 20):
        kept = pd.read_parquet(STUDY / f"{file}.parquet")
        runs = kept[kept.rate == 2e-3]
        assert len(runs) == count and runs.groupby("arm").seed.nunique().eq(5).all()
        logged = [json.loads(columns)["eval/all/mean@8"][-1] for columns in runs.metrics]
        assert np.allclose(runs.score, logged)
        mean = runs.groupby("arm")[measures].mean()
        half = stats.t.ppf(0.975, 4) * runs.groupby("arm")[measures].std() / math.sqrt(5)
        for arm in mean.index:
            cells = " | ".join(f"{mean[name][arm]:.3f} ± {half[name][arm]:.3f}" for name in measures)
            assert f"| {cells} |" in text, arm
        for arm, slow in kept[kept.rate == 5e-4].sort_values("seed").groupby("arm"):
            cells = " | ".join(", ".join(f"{value:.3f}" for value in slow[name]) for name in measures)
            assert f"| {cells} |" in text, arm
        alone = kept[kept.rate.isna()].set_index("arm")
        for arm, names in {"before": measures, "teacher": measures[:3], "constant": measures[:1]}.items():
            cells = " | ".join(f"{alone[name][arm]:.3f}" for name in names)
            assert f"| {arm} | {cells} |" in text, arm
    wide = 100 * runs.pivot(index="seed", columns="arm")
    for column, one, other, more in [
        ("score", "rkl-full", "fkl-full", 8.2), ("pass", "fkl-full", "rkl-full", 2.1),
        ("score", "rkl-full", "js-full", 0.2), ("pass", "fkl-full", "js-full", 0.1),
    ]:  # fmt: skip
        gap = wide[column][one] - wide[column][other]
        assert f"{gap.mean():.1f} ± {stats.t.ppf(0.975, 4) * gap.sem():.1f}" in text and round(gap.mean(), 1) == more


def test_policies_that_the_clip_itself_made():
    """N* and cosines of each trajectory from the kept products of block means, with Student's intervals of ten."""
    kept, text = pd.read_parquet(STUDY / "makers.parquet"), page("docs/study/makers.md")

    def apart(products):  # off the diagonal, where both factors are independent
        square = np.reshape(products, (math.isqrt(len(products)), -1))
        return (square.sum() - np.trace(square)) / (square.size - len(square))

    truth, mean = kept.fresh_fresh.map(apart), kept.stale_stale.map(apart)
    product, variance = kept.stale_fresh.map(np.mean), kept.square.map(np.mean) - mean
    kept = kept.assign(bias=mean - 2 * product + truth, variance=variance)
    kept["cosine"] = product / np.sqrt(truth * (mean + variance / (128 / 8)))
    for (maker, updates), at in kept.groupby(["maker", "updates"]):
        of = at.pivot(index="trajectory", columns="estimator", values=["bias", "variance", "cosine"])
        none, clip = (of.xs(name, axis=1, level=1) for name in ("token", "token, RPG-Style Clip"))
        lead, half = interval(clip.cosine - none.cosine)
        star = np.log((8 * (none.variance - clip.variance) / (clip.bias - none.bias)).clip(1, 1e6))
        center, width = interval(star)
        ends = " – ".join(f"{math.exp(x):.1f}" for x in (center - width, center + width))
        outside = at.groupby("trajectory").outside.first()
        stars = "–" if outside.max() == 0 else f"{math.exp(center):.1f} ({ends})"
        cosines = f"{none.cosine.mean():.3f} | {clip.cosine.mean():.3f} | {lead:.3f} ± {half:.3f}".replace("-", "−")
        assert f"| {maker} | {updates} | {100 * outside.mean():.1f} % | {stars} | {cosines} |" in text, (maker, updates)
        if maker == "Algorithm 2" and updates > 4:
            findings = page("docs/findings.md")
            assert f"{lead:.2f} ± {half:.2f}".replace("-", "−") in findings and stars in findings
        if maker == "no clip" and updates == 16:  # errors of finding 1 are over trajectories
            names = ("token", "token, RPG-Style Clip", "token, truncated", "token, IcePop")
            said = {name: interval(of["cosine"][name]) for name in names}
            row = " | ".join(f"{mean:.3f} ± {width:.3f}" for mean, width in said.values())
            assert f"| 64 | 10 | {row} |" in page("docs/findings.md") and stars in page("docs/findings.md")
            paper = "{:.2f} ± {:.2f} with Algorithm 2 and {:.3f} ± {:.3f} with Remark F.2"
            assert paper.format(*said[names[1]], *said[names[2]]) in page("docs/paper.md")
            spread = f"mean of {clip.cosine.mean():.2f} and a standard deviation of {clip.cosine.std():.2f}"
            assert spread in page("docs/study/oracle.md")


def effects_of_the_constant(scores: pd.DataFrame) -> dict[str, pd.Series]:
    """By name, what branch and coefficient do to each seed's score, and the coefficient without a clip."""
    a, b, c, d = (scores[branch, constant, True] for branch in (0.0, 1.0) for constant in (0.0, 1.0))
    gaps = {"branch": (c + d - a - b) / 2, "coefficient": (b + d - a - c) / 2, "both together": (d - c - b + a) / 2}
    return gaps | {"no clip": scores[0.0, 1.0, False] - scores[0.0, 0.0, False]}


def test_the_constant_of_the_divergence():
    """Means of the arms, and effects over seeds at each beta and at one KL, from the scores of the runs."""
    kept, text = pd.read_parquet(STUDY / "sign.parquet"), page("docs/study/sign.md")
    arm = ["branch", "coefficient", "clipped"]
    for (beta, branch, coefficient, clipped), of in kept.groupby(["beta", *arm]):
        score, half = interval(100 * of.score)
        name = f"{beta:g} | {branch:.0f} | {coefficient:.0f}" if clipped else f"{beta:g} | no clip | {coefficient:.0f}"
        reached = f"{score:.1f} ± {half:.1f} | {of.kl.mean():.3f} | {100 * of['clip'].mean():.2f} %"
        assert f"| {name} | {reached} |" in text, name
    by_beta = {beta: of.pivot(index="seed", columns=arm, values="score") for beta, of in kept.groupby("beta")}
    gaps = {(beta, effect): gap for beta, of in by_beta.items() for effect, gap in effects_of_the_constant(of).items()}
    found = {name: paired(gap.to_numpy(), np.zeros(len(gap))) for name, gap in gaps.items()}
    for (beta, effect), of in corrected({name: of for name, of in found.items() if name[1] != "no clip"}).items():
        assert f"| {beta:g} | {effect} | {cells(*of)} |" in text, (beta, effect)
    leads = [interval(100 * ((of[0, 0, True] + of[1, 0, True]) / 2 - of[0, 0, False])) for of in by_beta.values()]
    leads = ["{:.1f} ± {:.1f}".format(*lead) for lead in leads]
    assert "above no clip with c = 0 by {2}, {1} and {0} points".format(*leads) in text
    findings = page("docs/findings.md")
    for (beta, effect), (mean, half, *_) in found.items():
        said = f"{abs(mean):.1f} ± {half:.1f}"
        assert said in text and (effect not in ("coefficient", "no clip") or said in findings), (beta, effect, said)
    kept["x"] = np.log(kept.kl)
    apart = kept[["x", "score"]] - kept.groupby(["beta", *arm])[["x", "score"]].transform("mean")
    slope = np.polyfit(apart.x, apart.score, 1)[0]
    kept["moved"] = kept.score - slope * (kept.x - kept.x.mean())
    assert f"−{-100 * slope:.1f} points" in text
    for beta, of in kept.groupby("beta"):  # the same at one KL
        gaps = effects_of_the_constant(of.pivot(index="seed", columns=arm, values="moved"))
        cell = [f"{mean:.1f} ± {half:.1f}" for mean, half in (interval(100 * gap) for gap in gaps.values())]
        assert f"| {beta:g} | {' | '.join(cell)} |".replace("-", "−") in text, beta
    reached = kept.groupby([*arm, "seed"]).kl  # no KL is reached by all
    assert f"{reached.min().max():.3f}" in text and f"{reached.max().min():.3f}" in text


def test_clips_with_tuned_bounds():
    """What each arm's area is above no clip, from the scores of the 20 seeds that chose no rate."""
    kept, text = pd.read_parquet(STUDY / "staleness.parquet"), page("docs/study/staleness.md")
    kept["area"] = kept.scores.map(lambda x: np.trapezoid(x) / (len(x) - 1))
    kept["fell"] = kept.scores.map(lambda x: (np.diff(x) < -0.05).any())
    of_regime = {}
    for (delay, reward), at in kept[kept.seed >= 300].groupby(["delay", "reward"]):
        area, by_arm = at.pivot(index="seed", columns="arm", values="area"), at.groupby("arm")
        found = corrected({arm: paired(*area[[arm, "no clip"]].to_numpy().T) for arm in area if arm != "no clip"})
        for arm in area:
            line = f"| {delay}, {reward} | {arm} | {by_arm.rate.first()[arm]:g} | {by_arm.fell.sum()[arm]} | "
            line += f"{area[arm].mean():.3f} | " + (cells(*found[arm]) if arm in found else "")
            assert line in text, line
        of_regime[delay, reward] = found
    stale = of_regime[64, "share"]
    tight, wide = "Algorithm 2, 0.2, 0.28", "Algorithm 2, 0.8, 4"
    printed = {"docs/findings.md": (tight, "Algorithm 2, 0.5, 1", wide, "decoupled, 0.2, 0.28")}
    printed["docs/paper.md"] = (tight, "equation 4.1, 0.2, 0.28", "Remark F.2, 0.2, 0.28")
    printed["docs/asynchrony.md"] = ("decoupled, 0.2, 0.28",)
    for name, arms in printed.items():
        for arm in arms:
            assert f"{abs(stale[arm][0]):.1f} ± {stale[arm][1]:.1f}" in page(name), (name, arm)
    for regime, arm in (((64, "whole"), tight), ((64, "whole"), wide), ((16, "share"), "decoupled, 0.2, 0.28")):
        mean, half, *_ = of_regime[regime][arm]
        assert f"{abs(mean):.1f} ± {half:.1f}" in text and f"{abs(mean):.1f} ± {half:.1f}" in page("docs/findings.md")


def test_the_pilot_of_a_real_model():
    """The page's table of two runs, from what each step logged."""
    kept, text = pd.read_parquet(STUDY / "real_model_pilot.parquet"), page("docs/study/real_model.md")
    accuracy = kept[kept.step >= 2].pivot(index="step", columns="arm", values="accuracy")
    for arm, of in kept.set_index("step").groupby("arm"):
        scores = " | ".join(f"{100 * score:.1f} %" for score in of.score.dropna())
        steps = f"{100 * accuracy[arm].mean():.1f} % | {100 * of.clipped.loc[2:].mean():.2f} %"
        assert f"| `{arm}` | {scores} | {steps} | {of.seconds.loc[1:10].sum():.0f} |" in text, arm
    gap = 100 * (accuracy.rpg - accuracy.grpo)
    assert f"differs by {gap.mean():.1f} points with a standard error of {gap.sem():.1f}" in text
    before = kept[kept.step == 0].set_index("arm").evaluation
    assert f"before took {before.rpg:.0f} and {before.grpo:.0f} seconds more" in text


def test_the_papers_own_family():
    """The page's table, from the responses that are kept."""
    kept, text = pd.read_parquet(STUDY / "qwen.parquet"), page("docs/study/qwen.md")
    assert kept.groupby(["set", "evaluation"]).digest.nunique().tolist() == [56] * 4 + [48] * 4
    trained = kept[kept.set == "trained"]
    assert trained.new.all() and "All 56 are new" in text
    groups = {"trained, together": trained} | dict(list(kept.groupby("family")))
    for name, of in groups.items():
        by_problem = of.groupby(["evaluation", "digest"]).correct
        mean, passed = (100 * x.groupby("evaluation").mean() for x in (by_problem.mean(), by_problem.max() == 1))
        constant = 100 * of.drop_duplicates("digest").right.mean()
        cells = [mean["before-sampled"], mean["after-sampled"], passed["before-sampled"], passed["after-sampled"]]
        cells = [f"{x:.1f} % (" for x in (*cells, mean["before-greedy"], mean["after-greedy"])]
        lines = (ROOT / "docs/study/qwen.md").read_text().splitlines()
        row = next(line for line in lines if line.startswith(f"| {name} |"))
        assert row.split(" | ")[1:3] == [str(of.digest.nunique()), f"{constant:.1f} %"]
        assert [cell[: len(x)] for cell, x in zip(row.split(" | ")[3:], cells, strict=True)] == cells
    sampled = trained[trained.evaluation.str.endswith("sampled")]
    finished = 100 * sampled.groupby("evaluation").finished.mean()
    assert f"{100 - finished['after-sampled']:.0f} % of the sampled responses after training" in text
    long = sampled[(sampled.evaluation == "before-sampled") & (sampled.tokens > 20)].groupby("family").correct
    for family in ("chain_sum", "simple_equations"):
        right = f"{100 * long.mean()[family]:.0f} % of {long.size()[family]}"
        assert right in text, right


def test_the_study_of_a_real_model():
    """The page's table of all runs, and of the seeds that are compared outcomes, differences and what stands beside."""
    kept, text = pd.read_parquet(STUDY / "real_model.parquet"), page("docs/study/real_model.md")
    arms = ["rpg", "none", "grpo"]
    for (seed, rate), of in kept.groupby(["seed", "rate"]):
        scores = of.set_index("arm").scores.map(lambda x: ", ".join(f"{100 * score:.1f}" for score in x))
        cell = " | ".join(scores.reindex(arms, fill_value="–"))
        assert f"| {seed} | {rate:g} | {cell} |".replace("e-0", "e-") in text
    kept["area"] = kept.scores.map(lambda x: 100 * np.mean(x[1:]))
    final, families, by_step = kept[kept.seed >= 120], {}, {}
    area = final.pivot(index="seed", columns="arm", values="area")
    assert area.shape == (5, 3) and not area.isna().any(axis=None)
    gaps = {arm: area[arm] - area.rpg for arm in arms[1:]}
    found = corrected({arm: paired(gap.to_numpy() / 100, np.zeros(5)) for arm, gap in gaps.items()})
    equal = dict(zip(gaps, holm([stats.t.sf((2 - abs(x.mean())) / x.sem(), 4) for x in gaps.values()]), strict=True))
    for arm, of in final.groupby("arm"):
        before, _, last = by_step[arm] = 100 * np.stack(of.scores).mean(axis=0)
        line = f"| `{arm}` | {of.rate.iloc[0]:g} | {before:.1f} % | {area[arm].mean():.1f} % | {last:.1f} % |"
        line = line.replace("e-0", "e-") + (f" {cells(*found[arm])} | {equal[arm]:.2g} |" if arm in found else "")
        assert line in text, line
        beside = []
        for name, digits in dict(kl=2, entropy=2, clipped=2, length=1).items():
            mean = (100 if name == "clipped" else 1) * np.stack(of[name]).mean(axis=0)
            beside.append(f"{mean.mean():.{digits}f}, {mean[-1]:.{digits}f}")
        assert f"| `{arm}` | {' | '.join(beside)} |" in text, (arm, beside)
        for name in (of_families := [json.loads(row) for row in of.families])[0]:
            scores = 100 * np.mean([row[name] for row in of_families], axis=0)
            families.setdefault(name.removeprefix("gym:"), {"base": scores[0]})[arm] = scores[-1]
    for name, of in families.items():
        row = " | ".join(f"{of[key]:.1f} %" for key in ("base", *arms))
        assert re.search(rf"\| {name} \| \d+ \| [\d.]+ % \| {row} \|", text), (name, row)
    _, early, late = by_step["none"] - by_step["rpg"]
    assert f"After 4 steps it is {early:.1f} points, after 8 steps {late:.1f}" in text
    for name in ("docs/findings.md", "README.md"):
        assert f"{found['none'][0]:.1f} ± {found['none'][1]:.1f} points" in page(name), name
