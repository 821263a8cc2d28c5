"""What the settings of an objective may be, and errors that say so."""

import difflib
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rpg_jax import InputError
from rpg_jax.objectives import controls, surrogates
from rpg_jax.objectives.advantages import ADVANTAGES
from rpg_jax.objectives.batch import UNITS
from rpg_jax.objectives.divergences import DIVERGENCES
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN, Claim
from rpg_jax.objectives.reductions import REDUCTIONS


def nearest(word: object, known: Iterable[str]) -> str:
    """A question in brackets that names the known word nearest to `word`; nothing where none is near."""
    close = difflib.get_close_matches(str(word), list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def choice(known: Iterable[str], key: str, value: Any) -> Any:
    """The value of a setting that must be one of `known`; raises ValueError, which lists them."""
    if value not in tuple(known):
        raise InputError(f"{key}={value!r}{nearest(value, known)}; expected one of: {', '.join(known)}")
    return value


def _control(key: str, value: Any) -> float | str:
    if value == controls.OPTIMAL:
        return controls.OPTIMAL
    return _number(math.isfinite, f"or {controls.OPTIMAL!r}", key, value)


def _number(fits: Callable, expected: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise InputError(f"{key}={value!r}; expected a number {expected}")
    return float(value)


def _advantage(key: str, value: Any) -> str:
    return value if ":" in str(value) else choice([*ADVANTAGES, "FILE.py:NAME"], key, value)


def _declared(key: str, value: Any) -> Claim:
    claims = (value, value) if isinstance(value, str) else value
    known = (EXACT, EXACT_MEAN, BIASED)
    if not isinstance(claims, tuple | list) or len(claims) != 2 or not all(claim in known for claim in claims):
        raise InputError(f"{key}={value!r}; expected one of: {', '.join(known)}; or a pair of them, on and off policy")
    return Claim(*claims)


CHECKS: dict[str, Callable] = {
    "divergence": functools.partial(choice, DIVERGENCES),
    "estimator": functools.partial(choice, surrogates.ESTIMATORS),
    "level": functools.partial(choice, UNITS),
    "reduction": functools.partial(choice, REDUCTIONS),
    "beta": functools.partial(_number, lambda x: 0 <= x < math.inf, "of at least 0"),
    "clip_low": functools.partial(_number, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "clip_high": functools.partial(_number, lambda x: x > 0, "above 0"),
    "clip_c": functools.partial(_number, lambda x: x > 1, "above 1"),
    "control": _control,
    "kl": functools.partial(choice, controls.KINDS),
    "alpha": functools.partial(
        _number, lambda x: math.isfinite(x) and x not in (0, 1), "other than 0 and 1, the limits ufkl and urkl"
    ),
    "declares": _declared,
    "z_old": functools.partial(_number, lambda x: 0 < x < math.inf, "above 0"),
    "advantage": _advantage,
    "sampler_correction": functools.partial(_number, lambda x: 0 < x < math.inf, "above 0, the largest weight"),
}


def check(key: str, value: Any) -> Any:
    """The value as `CHECKS` leaves it; a key that is not there is a bound of a clip, a number above 0."""
    return CHECKS.get(key, functools.partial(_number, lambda x: 0 < x < math.inf, "above 0"))(key, value)


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings or facts of an objective as `CHECKS` leave them; a value that is None is left so."""
    return {key: value if value is None else check(key, value) for key, value in settings.items()}
