"""Generation, one update and a whole RL step: rpg_jax beside tunix's sampler, trainer and GRPO learner.

python third_party/tunix/benchmark.py --peer_python=VENV/bin/python
"""

import os
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))

import interleave


class Numbers:
    """A tokenizer whose words are token ids; nothing ends a response early."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return -1

    def pad_id(self):
        return 0


def build_model(shape):
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=shape["layers"],
        vocab_size=shape["vocab"],
        embed_dim=shape["hidden"],
        hidden_dim=shape["mlp"],
        num_heads=shape["heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["kv_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0)), config


def random_prompts(shape, rows, length):
    import numpy as np

    tokens = np.random.default_rng(0).integers(2, shape["vocab"], (rows, length))
    tokens[:, 0] = 1  # or the sampler puts its own in front and pads to the next power of two
    return [" ".join(map(str, row)) for row in tokens]


def generation(shape, task):
    """Waves of `rows` responses: a batch is generated until its longest response is complete."""
    from tunix.generate import sampler

    model, config = build_model(shape)
    cache = sampler.CacheConfig(task["prompt"] + task["new"], config.num_layers, config.num_kv_heads, config.head_dim)
    sample = sampler.Sampler(model, Numbers(), cache)
    lengths, rows = interleave.response_lengths(task), task["rows"]
    prompts, seeds = random_prompts(shape, len(lengths), task["prompt"]), iter(range(10**9))
    waves = [(prompts[i : i + rows], int(lengths[i : i + rows].max())) for i in range(0, len(lengths), rows)]

    def step():
        for wave, longest in waves:
            settings = dict(temperature=1.0, top_p=1.0, max_prompt_length=task["prompt"], seed=next(seeds))
            out = sample(wave, longest, **settings)
            assert all(len(tokens) == longest for tokens in out.tokens)

    return step


def update(shape, task):
    """The RL trainer's own train step with its GRPO loss on given responses."""
    import jax
    import numpy as np
    import optax
    from tunix.rl import algo_core, common, trainer
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft import peft_trainer

    model, _ = build_model(shape)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
    actor = trainer.Trainer(model, optimizer, peft_trainer.TrainingConfig(eval_every_n_steps=10**9), lambda: {})
    config = GRPOConfig(num_generations=8, beta=0.0)
    config.temperature = 1.0
    actor.with_loss_fn(
        lambda model, train_example: algo_core.grpo_loss_fn(model, train_example, config, pad_id=0, eos_id=-1),
        has_aux=True,
    )
    actor.with_gen_model_input_fn(lambda example: {"train_example": example})
    rows, rng = task["rows"], np.random.default_rng(0)
    example = common.TrainExample(
        prompt_ids=rng.integers(2, shape["vocab"], (rows, task["prompt"])).astype(np.int32),
        prompt_mask=np.ones((rows, task["prompt"]), bool),
        completion_ids=rng.integers(2, shape["vocab"], (rows, task["new"])).astype(np.int32),
        completion_mask=np.ones((rows, task["new"]), bool),
        advantages=rng.normal(size=rows).astype(np.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    train_step, _ = actor.jit_train_and_eval_step()

    def step():
        jax.block_until_ready(train_step(example))

    return step


def rl_step(shape, task):
    """`GRPOLearner.train` in a thread, fed one batch of prompts a step: a step ends when it asks for the next."""
    import threading

    import jax
    import numpy as np
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    model, _ = build_model(shape)
    prompts = random_prompts(shape, task["rows"] // task["samples"], task["prompt"])
    asked, go = threading.Semaphore(0), threading.Semaphore(0)

    def batches():
        while True:
            asked.release()
            go.acquire()
            yield {"prompts": np.array(prompts)}

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in roles},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6)),
                eval_every_n_steps=10**9,
                max_steps=10**9,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=task["new"],
                max_prompt_length=task["prompt"],
                kv_cache_size=task["prompt"] + task["new"],
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )

    def even_share(prompts, completions, **_):
        numbers = [[int(word) for word in text.split()] for text in completions]
        return [sum(number % 2 == 0 for number in row) / max(len(row), 1) for row in numbers]

    config = grpo_learner.GRPOConfig(num_generations=task["samples"], beta=0.0)
    learner = grpo_learner.GRPOLearner(cluster, config, even_share)

    def train():
        try:
            learner.train(batches())
        except BaseException:  # else a step would wait for ever
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=train, daemon=True).start()
    asked.acquire()

    def step():
        go.release()
        asked.acquire()

    return step


if __name__ == "__main__":
    theirs = {"generation": generation, "long_tails": generation, "update": update, "rl_step": rl_step}
    interleave.main(__file__, "tunix", theirs, sizes=("m1", "m2"))
