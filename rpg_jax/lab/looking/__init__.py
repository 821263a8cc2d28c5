"""`python -m rpg_jax.look`: every token of a response under the objective that trains it."""
