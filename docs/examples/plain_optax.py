"""A complete RL loop in plain JAX and Optax around an objective of RPG-JAX: `python docs/examples/plain_optax.py`.

The policy is a small recurrent network. The prompt is a number, and a response is right if its digits (1 to 3, ended
by a 0) add up to it.
"""

import jax
import jax.numpy as jnp
import optax

from rpg_jax import objectives

VOCAB, LENGTH, WIDTH = 4, 5, 32  # next tokens, tokens of a response at most, units of the network
PROMPTS, SAMPLES = jnp.arange(4, 12), 16  # prompt n asks for digits that add up to n; 16 responses to each

objective = objectives.make("rpg", divergence="urkl", estimator="reinforce", clip="rpg", beta=1e-3)
optimizer = optax.adam(1e-2)


def init(key):
    shapes = {"embed": (12, WIDTH), "recur": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.2 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def advance(params, state, token):  # state [B, WIDTH], token i32[B] -> state, logits [B, VOCAB] of the next token
    state = jnp.tanh(params["embed"][token] + state @ params["recur"])
    return state, state @ params["head"]


def sample(params, prompts, key):  # i32[B] -> tokens i32[B, T] and mask bool[B, T], true up to the first 0 and there
    def step(carry, key):
        state, logits = advance(params, *carry)
        token = jax.random.categorical(key, logits)
        return (state, token), token

    start = jnp.zeros((len(prompts), WIDTH)), prompts
    tokens = jax.lax.scan(step, start, jax.random.split(key, LENGTH))[1].T
    return tokens, jnp.cumsum(tokens == 0, axis=1) - (tokens == 0) == 0


def token_logp(params, prompts, tokens):  # f32[B, T]; column t is log p(token t | prompt, tokens before t)
    inputs = jnp.concatenate([prompts[:, None], tokens[:, :-1]], axis=1)
    state = jnp.zeros((len(prompts), WIDTH))
    logits = jax.lax.scan(lambda state, token: advance(params, state, token), state, inputs.T)[1]  # [T, B, VOCAB]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens.T[..., None], axis=-1)[..., 0].T


def reward(prompts, tokens, mask):  # f32[B], 0 or 1
    return (jnp.sum(tokens * mask, axis=1) == prompts).astype(jnp.float32)


@jax.jit
def train_step(params, opt_state, key):
    """Samples with the current policy, then takes two updates: the second one is off policy."""
    prompts = jnp.repeat(PROMPTS, SAMPLES)  # [B]: responses to one prompt stand together
    tokens, mask = sample(params, prompts, key)
    rewards = reward(prompts, tokens, mask)
    behavior_logp = token_logp(params, prompts, tokens)  # before any update, and constant from here on
    advantage = objective.advantages(rewards.reshape(-1, SAMPLES), behavior_logp, behavior_logp, mask)  # [B, 1]

    def loss(params):
        return objective(token_logp(params, prompts, tokens), behavior_logp, advantage, mask)

    for _ in range(2):
        (_, measured), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradient, opt_state)
        params = optax.apply_updates(params, updates)
    return params, opt_state, jnp.mean(rewards), objectives.metrics.values(measured)


def train(steps, seed=0):
    """Returns the parameters and the mean reward of each step."""
    key, params_key = jax.random.split(jax.random.key(seed))
    params, rewards = init(params_key), []
    opt_state = optimizer.init(params)
    for step in range(steps):
        params, opt_state, mean_reward, metrics = train_step(params, opt_state, jax.random.fold_in(key, step))
        rewards.append(float(mean_reward))
        if step % 50 == 0 or step == steps - 1:
            kl, clipped = metrics["kl_behavior_k3"], metrics["clip_fraction"]
            print(f"step {step:3d}: reward {rewards[-1]:.3f}  kl_behavior {kl:.5f}  clip_fraction {clipped:.3f}")
    return params, rewards


if __name__ == "__main__":
    train(300)
