r"""Whether two numbers of sympy are equal: by value at every magnitude, a rounded decimal by its own digits.

math-verify rounds to six decimals, or drops what is below 10^-15, so that 10^-7 equals 2*10^-7. `use` puts these
functions in the place of its own. For a worker process only, because this imports sympy.
"""

import decimal
import re

from math_verify import grader
from sympy import Basic, Float, Integer, MatrixBase, MatrixExpr, Rational

_SIXTH = Rational(1, 10**6)
_numeric, _symbolic = grader.sympy_numeric_eq, grader.sympy_symbolic_eq


def use() -> None:
    """Lets math-verify compare numbers in this way, also those in sets, tuples, intervals, matrices and equations."""
    grader.sympy_numeric_eq = equal
    grader.sympy_symbolic_eq = lambda left, right: _symbolic(exact(left), exact(right))


def equal(left: Basic | MatrixBase, right: Basic | MatrixBase, *precision: int) -> bool:
    """Whether two numbers have one value, or one is the other, rounded. `precision` is math-verify's, and not used.

    Its own function walks through matrices, whose elements come back here, and compares 9% with 9.
    """
    integers = all(grader.is_atomic_or_pct_atomic(side, Integer) for side in (left, right))
    if integers or isinstance(left, MatrixBase | MatrixExpr):
        return _numeric(left, right, *precision)
    try:
        values = exact(left), exact(right)
        return is_zero(values[0] - values[1]) or rounds(values[1], left) or rounds(values[0], right)
    except Exception:  # whatever sympy raises, as math-verify
        return False


def exact(expression: Basic | MatrixBase) -> Basic | MatrixBase:
    """The expression, computed, with its decimals as fractions."""
    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)}).doit()


def is_zero(difference: Basic) -> bool:
    """Whether a difference is 0: exactly, or in the 100 digits to which sympy computes what is irrational."""
    if difference.is_Rational or difference.free_symbols:
        return difference == 0
    parts = difference.evalf(50).as_real_imag()
    return all(part == 0 or part.is_Float and part._prec == 1 for part in parts)  # 1: none of its digits is certain


def rounds(value: Basic, number: Basic) -> bool:
    r"""Whether a value, rounded to the digits of a decimal, is that decimal; also cut off, after the sixth place.

    A decimal may be multiplied by a power of ten: 3.333333\cdot 10^{-11} has seven digits. One that has fewer than six
    of them, or none in the sixth place after the point, was not rounded: 0.33 is no third.
    """
    literal, *others = number.atoms(Float) or [Float(0)]
    written = decimal.Decimal(str(literal)).normalize().as_tuple()
    if others or len(written.digits) < 6 or value.is_Integer or value.free_symbols:
        return False
    own, last = exact(number), Rational(10) ** written.exponent  # `last`: of the last digit that is written
    scale = abs(own / Rational(str(literal)))
    place, error = min(last, last * scale), abs(value - own)
    if not re.fullmatch("10*|1/10+", str(scale)) or place > _SIXTH:
        return False
    return bool(error <= last * scale / 2 or place < _SIXTH and error < last * scale and abs(value) > abs(own))
