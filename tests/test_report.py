"""Reports: estimates against enumeration and scipy, pages of runs that are whole, unfinished or damaged, and the figure
of a training, which draws what was logged, whatever is missing."""

import itertools
import json
import math
import re
import xml.etree.ElementTree

import matplotlib.figure
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from fuzzing import call
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rpg_jax.lab.reporting import figures, runs, tables, training_curves
from rpg_jax.lab.reporting.comparison import compare, equal_pairs, equivalence, spelled
from rpg_jax.lab.reporting.compose import document
from rpg_jax.lab.reporting.estimates import difference, holm, least_p, over_runs, permutation_p

TASKS = ("arithmetic", "countdown")
SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


def test_intervals_are_the_t_interval_over_runs_and_that_of_a_difference_welchs():
    scores = np.random.default_rng(0).normal(size=10)
    index = pd.MultiIndex.from_tuples([("b", run) for run in range(10)] + [("a", 0)], names=["variant", "run"])
    found = over_runs(pd.Series([*scores, 0.3], index), "variant")
    expected = scipy.stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found.loc["b"], [10, scores.mean(), *expected], rtol=1e-12)
    assert list(found.index) == ["b", "a"] and found["value"]["a"] == 0.3 and np.isnan(found["low"]["a"])
    x, y = np.random.default_rng(0).normal(size=(2, 6)) * [[1.0], [3.0]]
    expected = scipy.stats.ttest_ind(x, y[:4], equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(difference(x, y[:4]), [x.mean() - y[:4].mean(), *expected], rtol=1e-12)


def runs_of(most):
    return st.integers(1, most).flatmap(lambda count: arrays(np.float64, count, elements=SCORES))


@settings(max_examples=20)
@given(runs_of(4), runs_of(4))
def test_the_permutation_test_counts_every_division(x, y):
    if min(len(x), len(y)) < 2:
        assert permutation_p(x, y) == 1.0
        return
    both = np.concatenate([x, y])
    splits = [list(chosen) for chosen in itertools.combinations(range(len(both)), len(x))]
    gaps = [abs(both[chosen].mean() - np.delete(both, chosen).mean()) for chosen in splits]
    expected = np.mean(np.array(gaps) >= gaps[0] - 1e-12)
    assert permutation_p(x, y) == pytest.approx(expected)
    apart = permutation_p(x, y + 10)  # the least p is that of separated runs
    assert permutation_p(x, y) >= apart - 1e-12 and apart == pytest.approx(least_p(len(x), len(y)))


def test_several_tests_are_corrected_as_holm_does():
    """R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")."""
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert list(holm([0.7, 0.6])) == [1.0, 1.0] and list(holm([0.02])) == [0.02]
    assert [spelled(p) for p in (2 / 252, 0.0498, 0.05, 0.09996)] == ["0.0079", "0.0498", "0.05", "0.1"]


def write_run(folder, scores, seed=0, steps=4, cut="", **changed):
    """A run's folder; `scores` are {step: score of both tasks}, and it has come to the last of them."""
    folder.mkdir(parents=True)
    settings = dict(seed=seed, steps=steps, evaluation=dict(k=8), rollout=dict(prompts=4, samples=2))
    for key, value in changed.items():
        section, name = key.split("__")
        settings.setdefault(section, {})[name] = value
    (folder / "config.json").write_text(json.dumps(settings))
    lines = []
    for step in range(max(scores, default=-1) + 1):
        row = {"step": step}
        if step:
            row |= {"train/reward": step / 4, "time/rollout": 2.0, "time/update": 1.0}
            row |= {"throughput/rollout_tokens_per_second": 50.0, "train/entropy": None}
        if step in scores:
            row |= {f"eval/{task}/mean@8": scores[step] + 0.01 * n for n, task in enumerate((*TASKS, "all"))}
            row |= {f"eval/{task}/mean@8_low": 0.0 for task in TASKS}
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines) + cut)
    return folder


def write_sweep(root, seeds=5):
    """Two variants that differ by much, and one like the first."""
    for seed in range(seeds):
        for name, gain in (("a", 0.0), ("b", 0.4), ("c", 0.0001)):
            scores = {0: 0.1, 2: 0.3 + gain + seed / 1000, 4: 0.2 + gain + seed / 1000}
            write_run(root / name / f"seed{seed}", scores, seed, objective__name=name)
    return root


def read(*folders):
    return runs.variants([runs.read(path) for path in runs.find(folders)])


def page_of(folder, *more):
    """The Markdown of a report."""
    return document("title", [runs.read(path) for path in runs.find([folder, *more])])[0]


def test_the_page_of_a_whole_sweep(tmp_path):
    text = page_of(write_sweep(tmp_path / "sweep"))
    assert "\\- is unset" in text
    assert "3 variants, 15 runs, 15 finished;" in text and "not compared" not in text
    last = text.split("## Last and best")[1].split("##")[0]
    assert "| b | 5 | **0.6020** | **0.7020** | **0.6120** | **0.7120** |" in last
    assert "| c | 5 | <ins>0.2021</ins> | <ins>0.3021</ins> |" in last and "| a | 5 | 0.2020 | 0.3020 |" in last
    assert "| objective.name |" in text and "| b | b |" in text
    assert "| 12.0 | 12.0 – 12.0 | 3.00 | 400 | 33 | - |" in text  # 4 steps of 3 s, 100 tokens each
    assert "| better | worse | difference of means | 95 % | p | p after Holm |" in text
    assert "| b | a | 0.4000 | 0.3977 – 0.4023 | **0.0079** | **0.024** |" in text
    assert "| b | c | 0.3999 | 0.3976 – 0.4022 | **0.0079** | **0.024** |" in text
    assert re.search(r"\| c \| a \| 0.0001 \| -0.0022 – 0.0024 \| (0.\d+) \| \1 \|", text)
    assert "2 of 3 pairs of variants differ significantly" in text and "for all 3 pairs leaves 2." in text


def test_what_is_unfinished_or_cut_short_is_shown(tmp_path):
    root = write_sweep(tmp_path / "sweep", seeds=2)
    write_run(root / "a" / "seed2", {0: 0.1, 2: 0.9}, 2, objective__name="a", cut='{"step": 3, "train/rew')
    write_run(root / "b" / "seed2", {}, 2, objective__name="b")
    write_run(root / "d" / "seed0", {}, objective__name="d")
    (root / "e" / "seed0").mkdir(parents=True)
    (root / "e" / "seed0" / "config.json").write_text("{}")
    (root / "e" / "seed0" / "log.txt").write_text("error: so it ended")
    text = page_of(root)
    assert "4 runs not compared, for no evaluation at step 4: see Runs" in text
    assert "| a, step 2 | - | 0.9000 | 0.9000 |" in text and "| 0.9050 | - |" in text
    assert "| a | 2 | unfinished | 2 of 4 | 2 | no |" in text
    assert "| a | 1 | finished | 4 of 4 | 4 | yes |" in text
    assert "| b | 2 | nothing logged | 0 of 4 | - | no |" in text
    assert "| d | 0 | nothing logged | 0 of 4 | - | no |" in text
    assert re.search(r"\| e \| - \| nothing logged", text)


def test_a_variant_that_has_hardly_begun_does_not_hold_up_the_others(tmp_path):
    root = write_sweep(tmp_path / "sweep")
    write_run(root / "new" / "seed0", {0: 0.5}, objective__name="new")
    text = page_of(root)
    assert "compared at step 4." in text and "2 of 3 pairs of variants differ significantly" in text
    assert "| new | 0 | unfinished | 0 of 4 | 0 | no |" in text and "| new, step 0 | - | 0.5000 |" in text
    found = compare(read(root))
    assert (found.variants, found.behind) == (["a", "b", "c"], ["new"]) and "new" in figures.curves(found)


def test_of_two_rows_of_a_step_the_later_counts_and_a_line_that_is_none_is_named(tmp_path):
    folder = write_run(tmp_path / "a", {0: 0.1, 2: 0.2})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x": 7}\n{"step": 2, "eval/arithmetic/mean@8": 0.5}\n{"step": 4, "eval/ar')
    run = runs.read(folder)
    assert run.last == 2 and run.metrics["x"][2] == 7 and run.scores["arithmetic"].to_dict() == {0: 0.1, 2: 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 6, is not a JSON object"):
        runs.read(folder)


def test_tasks_that_some_lack_are_named_and_one_run_has_no_interval(tmp_path):
    write_run(tmp_path / "a", {0: 0.1, 4: 0.3})
    rows = write_run(tmp_path / "b", {0: 0.1, 4: 0.2}, objective__beta=1.0) / "metrics.jsonl"
    rows.write_text(rows.read_text().replace("countdown", "sorting"))
    text = page_of(tmp_path)
    assert "left out: countdown, sorting" in text and "With 1 run a variant nothing can be significant" in text
    assert "| a | 1 | **0.3000** | **0.3000** | - |" in text and "| a | b | 0.1000 | - | 1 | 1 |" in text
    assert "nan" not in text


def test_names_cannot_break_the_page(tmp_path):
    name, other = "<b>a|b*_`[x](y)", "_$x_{$ ~~&lt;"
    write_run(tmp_path / name / "seed0", {0: 0.1, 4: 0.2})
    write_run(tmp_path / other / "seed0", {0: 0.1, 4: 0.2}, objective__beta=1.0)
    write_run(tmp_path / "1. #" / "seed0", {0: 0.1, 4: 0.2}, objective__beta=2.0)
    text = page_of(tmp_path)
    assert "\\<b>a\\|b" in text and r"\_\$x\_{\$ \~\~\&lt;" in text and "\n| 1\\. # |" in text
    drawn = re.findall(r">([^<>]+)</text>", figures.dynamics(read(tmp_path)))
    long = pd.DataFrame(dict(value=0.5, low=0.4, high=0.6), ["a" * 90 + "b"])
    assert ">aaaaaaaaaaaaaaa…aaaaaaaaaaaaaab<" in figures.intervals(long)
    escaped = [text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for text in (name, other)]
    assert {*escaped} <= set(drawn)  # as they are, in the legend


def test_the_command_writes_the_page_and_its_figures(tmp_path):
    root, out = write_sweep(tmp_path / "sweep", seeds=2), tmp_path / "new" / "study.md"
    assert call("report", str(root), f"--out={out}") == (0, "")
    stems = {path.stem.removeprefix("study") for path in out.parent.iterdir()}
    assert stems == {"", "-curves", "-dynamics", "-intervals"}
    for file in re.findall(r"\((study-\w+\.svg)\)", out.read_text()):
        xml.etree.ElementTree.parse(out.parent / file)


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "blank" / "seed0", {})
    write_run(tmp_path / "other" / "seed0", {0: 0.1})
    parts = {(): "name folders of runs", ("empty",): "empty holds no run", ("blank",): "none of these runs"}
    parts |= {("absent",): "is no folder", ("other", "--out=x.pdf"): "ends in .md", ("other", "--margin=0"): "margin"}
    for words, part in parts.items():
        status, line = call("report", *(word if "--" in word else f"{tmp_path}/{word}" for word in words))
        assert status == 2 and part in line


def test_equality_is_what_two_one_sided_tests_say():
    random = np.random.default_rng(0)
    differences = random.normal(0.001, 0.004, 10)
    found = equivalence(differences, 0.01)
    error = differences.std(ddof=1) / np.sqrt(10)
    expected = max(scipy.stats.t.sf((differences.mean() + sign * 0.01) / error * sign, 9) for sign in (1, -1))
    assert found["p"] == pytest.approx(expected) and found["p"] < 0.05
    assert -0.01 < found["low"] < found["difference"] < found["high"] < 0.01
    noisy = equivalence(10 * differences, 0.01)  # neither equal nor different
    assert noisy["p"] > 0.05 and noisy["p_different"] > 0.05
    assert equivalence(np.full(5, 0.02), 0.01)["p"] == 1 and equivalence(np.zeros(5), 0.01)["p"] == 0


def test_paired_runs_are_tested_for_equality(tmp_path):
    variants = read(write_sweep(tmp_path))  # c is a + 0.0001, b far from both
    comparison = compare(variants)
    table = equal_pairs(comparison, variants, 0.01)
    assert (table["holm"] < 0.05).sum() == 1 and table.loc[("a", "c"), "holm"] < 1e-6
    text = tables.equal(comparison, variants, 0.01)[1]
    assert "Of 3 pairs 1 are equal to within 0.01 and 3 differ" in text  # so do a and c, by less than the margin
    variants = read(tmp_path / "a" / "seed0", tmp_path / "b")
    with pytest.raises(ValueError, match="share fewer than 2"):
        equal_pairs(compare(variants), variants, 0.01)


def test_a_run_from_before_a_key_existed_is_of_the_variant_that_has_its_default(tmp_path):
    write_run(tmp_path / "a" / "seed0", {0: 0.1})
    write_run(tmp_path / "a" / "seed1", {0: 0.1}, 1, rollout__routes="recompute", reference__checkpoint=None)
    assert [len(variant.runs) for variant in read(tmp_path)] == [2]


TITLES = {"Held-out accuracy", *(title for title, *_ in training_curves.PANELS.values())}


def make_rows(steps, k=8):
    """What a run of some steps logs, evaluated every other step."""
    rows = []
    for step in range(steps + 1):
        row = {"step": step}
        if step:
            row |= {"train/reward": step / steps, "train/entropy": 1.0 / step, "train/response_length": 20.0 + step}
            row |= {"train/kl_behavior_k3": 1e-3 * step, "train/clip_fraction": 0.01}
            row |= {f"throughput/{name}_tokens_per_second": 14000.0 + step for name in ("rollout", "update")}
        if step % 2 == 0:
            for task, accuracy in (("arithmetic", 0.3), ("all", 0.4)):
                key, value = f"eval/{task}/mean@{k}", accuracy + step / 100
                row |= {key: value, f"{key}_low": value - 0.05, f"{key}_high": value + 0.05}
                row[f"eval/{task}/pass@{k}"] = 0.9
        rows.append(row)
    return rows


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """`draw(rows)` -> {panel title: axes}, after checking that the file is an image with something on it."""
    drawn, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path: (drawn.append(self), save(self, path)))

    def draw(rows):
        path = tmp_path / "figures" / "training.png"
        training_curves.training_figure(rows, path)
        image = matplotlib.image.imread(path)
        assert image.shape[1] >= 1200 and image[..., :3].std() > 0.01
        return {axis.get_title(loc="left"): axis for axis in drawn[-1].axes}

    return draw


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines if not line.get_label().startswith("_")}


def test_every_panel_shows_what_was_logged_without_what_is_no_number(draw):
    rows = make_rows(20)
    rows[2] |= {"train/reward": None, "eval/all/mean@8": math.nan}
    rows[3] |= {"train/reward": math.inf}
    panels = draw(rows)
    assert panels.keys() == TITLES
    [reward], [clipped] = (lines(panels[title]).values() for title in ("Training reward", "Clip fraction"))
    np.testing.assert_array_equal(clipped, [(step, 0.01) for step in range(1, 21)])
    np.testing.assert_array_equal(reward, [(step, step / 20) for step in (1, *range(4, 21))])
    assert list(lines(panels["Throughput"])) == ["rollout", "update"]
    accuracy = lines(panels["Held-out accuracy"])
    assert list(accuracy) == ["arithmetic", "all problems"]
    np.testing.assert_allclose(accuracy["all problems"], [(step, 0.4 + step / 100) for step in (0, *range(4, 21, 2))])
    assert panels["Held-out accuracy"].get_title(loc="right") == "40.0% \N{RIGHTWARDS ARROW} 60.0%"
    assert panels["Held-out accuracy"].get_ylabel() == "mean@8"


@pytest.mark.parametrize("rows", [[], make_rows(2)[:1], make_rows(1)[1:]])
def test_short_and_empty_runs_are_drawn(draw, rows):
    assert draw(rows).keys() == TITLES
