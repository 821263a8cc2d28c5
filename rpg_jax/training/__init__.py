"""The RL step: `loop.rl_step` reads in order; what it calls is beside it.

Reading order: `loop` (a step, and the steps of a run), `collect` (prompts, responses, rewards), `experience` (log-probs
of the fixed policies, advantages), `update` (one optimizer update), then `packing`, `policies`, `evaluation`.
"""
