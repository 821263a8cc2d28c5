"""Trust regions, control variates and KL-to-go, entry by entry against docs/method.md 4 in numpy."""

import functools

import jax
import numpy as np
import pytest
from test_objectives import run, sample

from configs import quickstart
from rpg_jax.objectives import make
from rpg_jax.run import build

BETA = 0.4
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)
BOUNDS = {"icepop": (0.3, 0.5), "sequence_mask": (0.3, 0.5), "geometric_mask": (0.1, 0.1), "dppo": (0.03, 0.05)}


def arrays(spread=0.3, seed=0):
    logp, mu, ref, advantage, mask = sample(6, 5, seed, spread)
    return logp, mu, ref, np.where(mask, advantage, 0), mask


def coefficients(objective, logp, mu, ref, advantage, mask, **more):
    """−dL/dlogp at denominator 1."""
    return -run(objective, logp, mu, ref, advantage, mask, denominator=1.0, **more)[1]


def unclipped(logp, mu, ref, advantage, mask):
    """w(A − beta·log u), the coefficient of urkl; 0 where masked."""
    return np.where(mask, np.exp(logp - mu) * (advantage - BETA * (logp - ref)), 0)


def alive(clip, low, high, logp, mu, ref, advantage, mask):
    """Where the coefficient survives, from the definitions."""
    w, row = np.exp(logp - mu), np.where(mask, logp - mu, 0).sum(1, keepdims=True)
    if clip == "icepop":
        return (w >= 1 - low) & (w <= 1 + high)
    if clip == "dppo":
        shaped, moved = advantage - BETA * (logp - ref), np.exp(logp) - np.exp(mu)
        return ~(((shaped > 0) & (moved > high)) | ((shaped < 0) & (moved < -low)))
    if clip == "geometric_mask":
        row = row / np.maximum(mask.sum(1, keepdims=True), 1)
    return np.broadcast_to((np.exp(row) >= 1 - low) & (np.exp(row) <= 1 + high), mask.shape)


@pytest.mark.parametrize("clip", BOUNDS)
def test_a_dead_entry_has_no_gradient_and_stays_in_the_denominator(clip):
    low, high = BOUNDS[clip]
    batch = arrays()
    objective = make("rpg", clip=clip, clip_low=low, clip_high=high, beta=BETA, reduction="constant")
    survive = alive(clip, low, high, *batch)
    assert survive[batch[4]].any() and not survive[batch[4]].all()
    expected = np.where(survive, unclipped(*batch), 0)
    close(coefficients(objective, *batch), expected)
    loss, _ = run(objective, *batch, denominator=1.0)
    np.testing.assert_allclose(loss, -(expected * batch[0]).sum(), rtol=1e-12)  # a dead entry's value is 0, too
    mean = make("rpg", clip=clip, clip_low=low, clip_high=high, beta=BETA)
    np.testing.assert_allclose(run(mean, *batch)[0], loss / batch[4].sum(), rtol=1e-12)


def test_rows_die_whole_at_level_sequence():
    """There, the product of the tokens' ratios is the ratio itself: `sequence_mask` and `icepop` are one."""
    batch = arrays()
    masks = [
        coefficients(make("rpg", clip=clip, level="sequence", reduction="constant", beta=BETA), *batch)
        for clip in ("sequence_mask", "icepop")
    ]
    np.testing.assert_array_equal(*masks)
    dead = ~masks[0].any(1)
    assert dead.any() and not dead.all()
    geometric = make("rpg", clip="geometric_mask", level="sequence", reduction="constant", beta=BETA)
    assert (~coefficients(geometric, *batch).any(1)).sum() < dead.sum()  # whose bounds do not tighten with the length


def test_m2po_drops_the_largest_squared_log_ratios_until_their_mean_is_small_enough():
    logp, mu, ref, advantage, mask = arrays()
    for threshold in (1e-4, 0.04, 10.0):
        objective = make("rpg", clip="m2po", clip_m2=threshold, beta=BETA, reduction="constant")
        survive = coefficients(objective, logp, mu, ref, advantage, mask) != 0
        squared = (logp - mu) ** 2
        ordered = np.sort(squared[mask])
        count = (np.cumsum(ordered) / np.arange(1, len(ordered) + 1) <= threshold).sum()
        assert survive.sum() == count
        np.testing.assert_array_equal(survive[mask], squared[mask] <= (ordered[count - 1] if count else -1))
    assert make("rpg", clip="m2po").settings["clip_m2"] == 0.04


@pytest.mark.parametrize("divergence, own, z", [("rkl", 1.0, 0.5), ("urkl", 0.0, 1.0)])
def test_control_replaces_the_constant(divergence, own, z):
    logp, mu, ref, advantage, mask = arrays()
    for control in (None, own, -2.0):
        objective = make("rpg", divergence=divergence, control=control, beta=BETA, z_old=z, reduction="constant")
        c = own if control is None else control
        log_u = logp - ref - np.log(z)
        expected = np.where(mask, np.exp(logp - mu) * (advantage - BETA * (log_u + c)), 0)
        close(coefficients(objective, logp, mu, ref, advantage, mask), expected)
    clipped = make("rpg", divergence=divergence, control=own, clip="rpg", beta=BETA, reduction="constant")
    plain = make("rpg", divergence=divergence, clip="rpg", beta=BETA, reduction="constant")
    batch = (logp, mu, ref, advantage, mask)
    close(coefficients(clipped, *batch), coefficients(plain, *batch))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_optimal_control_is_of_the_other_responses(level):
    """Row i's own data do not move its constant, other rows' do; and the constant is the least squares solution."""
    logp, mu, ref, advantage, mask = arrays()
    mask[1] = True
    objective = make("rpg", divergence="rkl", control="optimal", level=level, beta=BETA, reduction="constant")

    def entries(logp, advantage):
        if level == "token":
            return logp, mu, ref, advantage, mask, (1 - np.exp(logp)) ** 2
        sums = [np.where(mask, x, 0).sum(1, keepdims=True) for x in (logp, mu, ref, (1 - np.exp(logp)) ** 2)]
        return *sums[:3], np.where(mask, advantage, 0).sum(1, keepdims=True) / mask.sum(1, keepdims=True), 1, sums[3]

    def expected(logp, advantage):
        x, m, r, a, valid, score = entries(logp, advantage)
        w = np.exp(x - m)
        weight = np.where(valid, w**2 * score, 0)
        returns = a - BETA * (x - r)
        rows = [[(weight * returns)[j].sum(), weight[j].sum()] for j in range(len(mask))]
        total = np.sum(rows, axis=0)
        baseline = np.array([[(total[0] - n) / (total[1] - d)] for n, d in rows])
        return np.where(mask, np.broadcast_to(w * (returns - baseline), mask.shape), 0)

    batch = (logp, mu, ref, advantage, mask)
    np.testing.assert_allclose(coefficients(objective, *batch), expected(logp, advantage), rtol=1e-9, atol=1e-12)
    alone = [x[:1] for x in batch]  # nothing to estimate it from: the divergence's own constant
    own = make("rpg", divergence="rkl", level=level, beta=BETA, reduction="constant")
    close(coefficients(objective, *alone), coefficients(own, *alone))
    huge = logp.copy()
    huge[0] += 300.0  # a row whose squared weight is e^600 of the others'
    assert np.isfinite(coefficients(objective, huge, mu, ref, advantage, mask)[1:]).all()


@pytest.mark.parametrize("kl", ["token", "to_go"])
def test_a_tokens_own_kl_is_a_control_variate_of_every_history(kl):
    """Summed over every response of two tokens: the expected gradient is that without it, and the variance smaller."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 3)) * np.array([1.0, 1.0, 3.0])[:, None, None]  # policy, behavior, reference
    log_p, mu, ref = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    history = np.array([(0, 1 + a) for a in range(3) for _ in range(3)])
    token = np.array([(a, b) for a in range(3) for b in range(3)])
    mask, groups = np.ones((9, 2), bool), np.zeros((9, 1))

    def gradients(control, mu):  # [9, 4, 3], of each response
        objective = make("rpg", divergence="rkl", control=control, kl=kl, beta=BETA, advantage="batch_mean")
        with jax.enable_x64():
            of_history = (np.exp(mu) * (mu - ref)).sum(-1)[history]
            given = mu[history, token], ref[history, token], mask
            advantage = objective.advantages(groups, *given, kl=of_history)

            def loss(table, history, token, *row):
                behavior, reference, mask, advantage = (x[None] for x in row)
                logp = jax.nn.log_softmax(table)[history, token][None]
                return objective(logp, behavior, advantage, mask, reference, denominator=1.0)[0]

            of_rows = jax.vmap(jax.grad(loss), (None, *[0] * 6))
            return np.asarray(jax.jit(of_rows)(logits[0], history, token, *given, advantage))

    for drawn_by, narrows in ((mu, False), (log_p, True)):
        weight = np.exp(drawn_by[history, token].sum(1))
        means, spreads = [], []
        for control in (0.0, "kl"):
            each = gradients(control, drawn_by)
            means.append(np.einsum("n,nhv->hv", weight, each))
            spreads.append(np.einsum("n,nhv->", weight, (each - means[-1]) ** 2))
        close(means[1], means[0])
        assert spreads[1] < 0.8 * spreads[0] or not narrows
    with pytest.raises(ValueError, match="control='kl' needs kl"):
        make("rpg", control="kl").advantages(np.zeros((3, 3)), *(np.zeros((9, 2)),) * 2, mask)


@pytest.mark.parametrize("control", [None, 0.4])
def test_kl_to_go_charges_a_token_with_all_later_ones(control):
    logp, mu, ref, advantage, mask = arrays()
    objective = make("rpg", divergence="rkl", kl="to_go", control=control, beta=BETA, reduction="constant")
    log_u = np.where(mask, logp - ref, 0)
    to_go = np.cumsum(log_u[:, ::-1], axis=1)[:, ::-1] + (1.0 if control is None else control)
    expected = np.where(mask, np.exp(logp - mu) * (advantage - BETA * to_go), 0)
    close(coefficients(objective, logp, mu, ref, advantage, mask), expected)


def test_a_config_names_them_and_a_microbatch_of_one_has_no_others():
    config = quickstart.get_config("smoke")
    config.objective.update(dict(clip="icepop", clip_high=4.0, clip_c=None, control="optimal", kl="to_go"))
    assert build.build_objective(config).settings["control"] == "optimal"
    config.learner.update(dict(microbatch_rows=1, pack=False))
    with pytest.raises(ValueError, match="learner.microbatch_rows=1 has no others"):
        build.build_objective(config)
    config.objective.control = 0.5
    assert build.build_objective(config).settings["control"] == 0.5


def test_a_kl_over_the_vocabulary_is_added_to_the_loss_and_needs_a_reference_tree():
    """Its reduction, times beta; the surrogate has the reward alone."""
    logp, mu, ref, advantage, mask = arrays()
    objective, bare = make("rpg", kl="full", beta=BETA), make("rpg", beta=0.0)
    kl = np.random.default_rng(1).random(mask.shape)
    with jax.enable_x64():
        loss, metrics = jax.jit(objective)(logp, mu, advantage, mask, ref, full_kl=np.where(mask, kl, np.nan))
        plain, _ = jax.jit(bare)(logp, mu, advantage, mask, ref)
        assert float(loss - plain) == pytest.approx(BETA * kl[mask].mean(), rel=1e-12)
        assert float(metrics["kl_reference_full"].value()) == pytest.approx(kl[mask].mean(), rel=1e-12)
    with pytest.raises(ValueError, match="kl='full' needs full_kl"):
        jax.eval_shape(objective, logp, mu, advantage, mask, ref)
    config = quickstart.get_config("smoke")
    config.objective.update(dict(clip="rpg", kl="full"))
    with pytest.raises(ValueError, match="objective.kl=full needs the reference's distributions"):
        build.build_settings(config)
    config.reference.update(dict(mode="ema", decay=0.9))
    assert build.build_settings(config)["objective"].full_kl is not None
