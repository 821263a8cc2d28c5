"""The rules of reasoning-gym's families, for a worker: importing this loads the package, before any response waits."""

try:
    import reasoning_gym  # noqa: F401
except ImportError as error:
    raise ImportError(f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym") from None

from rpg_jax.gym import credit, gym  # noqa: F401
