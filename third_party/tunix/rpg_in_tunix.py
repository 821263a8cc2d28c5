"""Trains with our objectives inside tunix's own GRPO learner, and compares them with tunix's own loss there.

VENV/bin/pip install . -r third_party/tunix/requirements.txt
VENV/bin/python third_party/tunix/rpg_in_tunix.py

Three runs of tunix's learner, sampler and trainer, from the same random weights, prompts and sampling seeds:

* `tunix grpo`: tunix's own GRPO loss;
* `our grpo`: `objectives.make("grpo")`, the same formula, so that everything must agree to rounding;
* `our rpg`: RPG-REINFORCE with RPG-Style Clip and group-mean advantages.

The task is verifiable: the prompt shows a digit, and the reward is the share of the response's positions that repeat
it. Exits with status 1 if a loss or gradient of `our grpo` differs from tunix's, or if the first loss that tunix's
trainer reports differs from a direct call of our objective.
"""

import argparse
import importlib.util
import json
import sys

SAMPLES, PROMPTS, NEW = 8, 16, 8  # responses to a prompt, prompts a step, tokens of a response at most
VOCAB, PAD, BOS, EOS = 16, 0, 1, 2  # the other 13 token ids are the digits
TOLERANCE = 1e-5  # float32: of losses, which are of order 1, and of gradients relative to their largest entry


def make_policy_loss(objective):
    """Adapts an objective of ours to the signature of tunix's policy losses."""
    import jax
    from flax import nnx
    from tunix.rl import common

    from rpg_jax.objectives import metrics

    def policy_loss(model, train_example, algo_config, pad_id, eos_id, **_):
        logp = common.compute_per_token_logps(
            *nnx.split(model),
            prompt_tokens=train_example.prompt_ids,
            completion_tokens=train_example.completion_ids,
            pad_id=pad_id,
            eos_id=eos_id,
            stop_gradient=False,
            temperature=algo_config.temperature,
        )  # [B, T], T tokens of the response
        behavior_logp = train_example.old_per_token_logps
        if behavior_logp is None:  # one update a batch: the policy is the behavior policy
            behavior_logp = jax.lax.stop_gradient(logp)
        loss, measured = objective(
            logp,
            behavior_logp,
            train_example.advantages[:, None],  # [B] -> [B, 1]
            train_example.completion_mask,
            reference_logp=train_example.ref_per_token_logps,
        )
        values = metrics.values(measured)
        return loss, {**values, "kl": values["kl_reference_k3"], "pg_clipfrac": values["clip_fraction"]}

    return policy_loss


def our_objectives():
    """Ours, by the name under which tunix's registry gets them."""
    from rpg_jax import objectives

    return {
        "our grpo": objectives.make("grpo", beta=0.04, clip_low=0.2, clip_high=0.2),
        "our rpg": objectives.make("rpg", divergence="urkl", estimator="reinforce", clip="rpg", beta=1e-4),
    }


def make_configs(ours):
    """Puts our losses and RPG's advantage into tunix's registry; returns the `GRPOConfig` of every run, by name."""
    import numpy as np
    from tunix.rl import function_registry
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    from rpg_jax.objectives import advantages

    for name, objective in ours.items():
        function_registry.register_policy_loss_fn(name)(make_policy_loss(objective))

    @function_registry.register_advantage_estimator("group mean")
    def group_mean(rewards, num_generations):  # [P·G] -> [P·G]
        return np.asarray(advantages.group_mean(rewards.reshape(-1, num_generations))).reshape(-1)

    # The second update of a batch is off policy. tunix computes reference log-probs where its own beta is not 0.
    shared = dict(num_generations=SAMPLES, num_iterations=2)
    # Published GRPO estimates the KL by k3. tunix's default, log(policy / reference), has a gradient in which the
    # reference does not occur.
    grpo = dict(beta=0.04, epsilon=0.2, kl_loss_mode="low_var_kl", **shared)
    rpg = dict(beta=ours["our rpg"].beta, advantage_estimator="group mean", **shared)
    return {
        "tunix grpo": GRPOConfig(policy_loss_fn="grpo", **grpo),
        "our grpo": GRPOConfig(policy_loss_fn="our grpo", **grpo),
        "our rpg": GRPOConfig(policy_loss_fn="our rpg", **rpg),
    }


class Digits:
    """A tokenizer whose words are token ids."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def build_model(seed):
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def repeats(prompts, completions, **_):
    """The reward: the share of a response's NEW positions that hold the prompt's digit."""
    digits = [prompt.split()[-1] for prompt in prompts]
    return [text.split().count(digit) / NEW for digit, text in zip(digits, completions, strict=True)]


def train(config, steps, seed):
    """One run of tunix's learner. Returns its rewards (one a step), losses (one an update) and training examples."""
    import jax
    import numpy as np
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    rewards, examples = [], []

    class RecordingCluster(rl_cluster.RLCluster):
        def update_actor(self, train_ds, eval_ds, skip_jit=False):
            examples.extend(train_ds)
            super().update_actor(train_ds, eval_ds, skip_jit)

    def reward(prompts, completions, **_):
        scores = repeats(prompts, completions)
        rewards.append(float(np.mean(scores)))
        return scores

    def batches():
        rng = np.random.default_rng(seed)
        for step in range(steps):
            rollout.seed = jax.random.fold_in(jax.random.key(seed), step)  # unset, tunix draws the same noise each step
            yield {"prompts": np.array([f"{BOS} {digit}" for digit in rng.integers(EOS + 1, VOCAB, PROMPTS)])}

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    rollout = RolloutConfig(
        max_tokens_to_generate=NEW, max_prompt_length=2, kv_cache_size=2 + NEW, temperature=1.0, top_p=1.0
    )
    cluster = RecordingCluster(
        actor=build_model(seed),
        reference=build_model(seed),
        tokenizer=Digits(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)),
                eval_every_n_steps=10**9,
                max_steps=steps * config.num_iterations,
            ),
            rollout_config=rollout,
        ),
    )
    GRPOLearner(cluster, config, reward).train(batches())
    trainer = cluster.actor_trainer
    losses = trainer.metrics_logger.get_metric_history(trainer.metrics_prefix, "loss", "train")
    return rewards, losses, examples


def direct_loss(objective, model, example):
    """Our objective, called without tunix's loss or trainer: only the log-probs are of its model."""
    from flax import nnx
    from tunix.rl import common

    tokens = dict(prompt_tokens=example.prompt_ids, completion_tokens=example.completion_ids)
    logp = common.compute_per_token_logps(*nnx.split(model), **tokens, pad_id=PAD, eos_id=EOS)
    advantage, mask = example.advantages[:, None], example.completion_mask
    return objective(logp, example.old_per_token_logps, advantage, mask, reference_logp=example.ref_per_token_logps)[0]


def loss_and_gradient(config, model, example):
    """The policy loss that `config` names, on a training example: a scalar, and its gradient as one vector."""
    from flax import nnx
    from jax.flatten_util import ravel_pytree
    from tunix.rl import function_registry

    policy_loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)

    @nnx.jit
    def run(model, example):
        loss = lambda model: policy_loss(model, example, algo_config=config, pad_id=PAD, eos_id=EOS)  # noqa: E731
        return nnx.value_and_grad(loss, has_aux=True)(model)

    (loss, _), gradient = run(model, example)
    return loss, ravel_pytree(nnx.to_pure_dict(gradient))[0]


def compare(ours, configs, runs, seed):
    """What must agree, and by how much it differs."""
    import numpy as np

    gaps, start, elsewhere = {}, build_model(seed), build_model(seed + 1)
    for name, objective in ours.items():
        _, losses, examples = runs[name]
        direct = direct_loss(objective, start, examples[0])
        gaps[f"{name}: first loss in the trainer, direct call ({direct:.5f})"] = abs(losses[0] - direct)
    examples = runs["tunix grpo"][2]
    for which, example in (("first", examples[0]), ("last", examples[-1])):  # sampled by policies far from `elsewhere`
        mine, theirs = (loss_and_gradient(configs[name], elsewhere, example) for name in ("our grpo", "tunix grpo"))
        gaps[f"grpo, ours and tunix's: loss of the {which} batch ({theirs[0]:.5f})"] = abs(mine[0] - theirs[0])
        gap = np.max(np.abs(mine[1] - theirs[1])) / np.max(np.abs(theirs[1]))
        gaps[f"grpo, ours and tunix's: gradient of the {which} batch"] = gap
    return {what: float(gap) for what, gap in gaps.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="RL steps, two updates each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write rewards, losses and differences there as well")
    args = parser.parse_args()
    for package, source in (("tunix", "-r third_party/tunix/requirements.txt"), ("rpg_jax", ".")):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed in {sys.executable}: pip install {source}", file=sys.stderr)
            sys.exit(2)
    ours = our_objectives()
    configs = make_configs(ours)
    runs = {name: train(config, args.steps, args.seed) for name, config in configs.items()}
    print(f"{'mean reward at step':20s}" + "".join(f"{name:>12s}" for name in runs))
    for step in sorted({*range(0, args.steps, max(args.steps // 6, 1)), args.steps - 1}):
        print(f"{step:<20d}" + "".join(f"{rewards[step]:12.4f}" for rewards, _, _ in runs.values()))
    same = [mine == theirs for mine, theirs in zip(runs["our grpo"][0], runs["tunix grpo"][0], strict=True)]
    print(f"our grpo has exactly the rewards of tunix's for {[*same, False].index(False)} of {args.steps} steps")
    gaps = compare(ours, configs, runs, args.seed)
    for what, gap in gaps.items():
        print(f"{what:64s} {gap:8.1e}  {'same' if gap <= TOLERANCE else 'DIFFERENT'}")
    if args.json:
        series = {name: {"rewards": rewards, "losses": losses.tolist()} for name, (rewards, losses, _) in runs.items()}
        with open(args.json, "w") as file:
            json.dump({"runs": series, "differences": gaps}, file, indent=1)
    sys.exit(int(any(not gap <= TOLERANCE for gap in gaps.values())))


if __name__ == "__main__":
    main()
