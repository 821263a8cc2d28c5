"""What the settings of an objective may be, and errors that say so."""

import difflib
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


CHOICES: dict[str, Iterable[str]] = {
    "divergence": DIVERGENCES,
    "estimator": surrogates.ESTIMATORS,
    "level": UNITS,
    "reduction": REDUCTIONS,
    "kl": controls.KINDS,
}
ABOVE_0: tuple[str, Callable[[Any], bool]] = ("above 0", lambda x: 0 < x < math.inf)
NUMBERS = {  # what each must be; a number that is not here, such as a bound of a clip, is above 0
    "beta": ("of at least 0", lambda x: 0 <= x < math.inf),
    "clip_low": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "clip_high": ("above 0", lambda x: x > 0),
    "clip_c": ("above 1", lambda x: x > 1),
    "control": (f"or {controls.OPTIMAL!r} or {controls.OF_TOKEN!r}", math.isfinite),
    "alpha": ("other than 0 and 1, the limits ufkl and urkl", lambda x: math.isfinite(x) and x not in (0, 1)),
    "sampler_correction": ("above 0, the largest weight", ABOVE_0[1]),
}


def check(key: str, value: Any) -> Any:
    """The value of a setting or fact, numbers as floats; raises ValueError for what it may not be."""
    if key in CHOICES:
        return choice(CHOICES[key], key, value)
    if key == "advantage":
        return value if ":" in str(value) else choice([*ADVANTAGES, "FILE.py:NAME"], key, value)
    if key == "declares":
        claims, known = (value, value) if isinstance(value, str) else value, (EXACT, EXACT_MEAN, BIASED)
        if isinstance(claims, tuple | list) and len(claims) == 2 and all(claim in known for claim in claims):
            return Claim(*claims)
        expected = f"one of: {', '.join(known)}; or a pair of them, on and off policy"
        raise InputError(f"{key}={value!r}; expected {expected}")
    if key == "control" and value in (controls.OPTIMAL, controls.OF_TOKEN):
        return value
    expected, fits = NUMBERS.get(key, ABOVE_0)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise InputError(f"{key}={value!r}; expected a number {expected}")
    return float(value)


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings or facts of an objective as `check` leaves them; a value that is None is left so."""
    return {key: value if value is None else check(key, value) for key, value in settings.items()}
