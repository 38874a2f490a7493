"""`forerun certify --explain`: three rules on three tokens, in fractions that a reader can check by hand."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

Fractions = Sequence[Fraction]

P = (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10))
Q = (Fraction(2, 10), Fraction(3, 10), Fraction(5, 10))


def explain(p: Fractions = P, q: Fractions = Q) -> str:
    """The worked example for a target law p and a draft law q; everything in it is computed from these."""
    return "\n".join([*_the_laws(p, q), *_naive(p, q), *_residual(p, q), *_classical(p, q)])


def emitted(p: Fractions, q: Fractions, ratio: Fractions, after: Fractions) -> list[Fraction]:
    """The law of the emitted token: x comes from q and is kept with probability ratio(x), or else from `after`."""
    kept = [q_x * r for q_x, r in zip(q, ratio, strict=True)]
    return [k + (1 - sum(kept)) * a for k, a in zip(kept, after, strict=True)]


def variation(a: Fractions, b: Fractions) -> Fraction:
    """Total variation: half the sum of |a - b|."""
    return sum((abs(x - y) for x, y in zip(a, b, strict=True)), Fraction(0)) / 2


def usual_ratio(p: Fractions, q: Fractions) -> list[Fraction]:
    """min(1, p/q)."""
    return [min(Fraction(1), p_x / q_x) if q_x else Fraction(1) for p_x, q_x in zip(p, q, strict=True)]


def residual_law(p: Fractions, q: Fractions) -> list[Fraction]:
    """ReLU(p - q) normalised; p where nothing is left."""
    left = [max(Fraction(0), p_x - q_x) for p_x, q_x in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) else list(p)


def fixed_point(p: Fractions, q: Fractions) -> Fraction:
    """A = min of q/p over the tokens that p allows."""
    return min(q_x / p_x for p_x, q_x in zip(p, q, strict=True) if p_x)


def _the_laws(p: Fractions, q: Fractions) -> Iterator[str]:
    yield "One token. The draft proposes x from q; the target's law is p.\n"
    yield _row("p", p)
    yield _row("q", q)


def _naive(p: Fractions, q: Fractions) -> Iterator[str]:
    ratio = usual_ratio(p, q)
    accepted = sum(a * b for a, b in zip(q, ratio, strict=True))
    law = emitted(p, q, ratio, p)
    yield "\n1. The naive rule: keep x with probability min(1, p/q); after a rejection draw from p."
    yield _row("min(1, p/q)", ratio)
    yield f"   kept: sum of min(p, q) = {_number(Fraction(accepted))}"
    yield _row("min(p, q) + (1 - kept) p", law)
    yield f"   not p: total variation {_number(variation(law, p))}. {_judged(law, p)}"


def _residual(p: Fractions, q: Fractions) -> Iterator[str]:
    ratio, after = usual_ratio(p, q), residual_law(p, q)
    law = emitted(p, q, ratio, after)
    yield "\n2. The law `residual`: the same test, but after a rejection draw from ReLU(p - q), normalised."
    yield _row("ReLU(p - q) normalised", after)
    yield _row("min(p, q) + (1 - kept) that", law)
    yield f"   total variation from p {_number(variation(law, p))}. {_judged(law, p)}"


def _classical(p: Fractions, q: Fractions) -> Iterator[str]:
    a = fixed_point(p, q)
    ratio = [a * p_x / q_x if q_x else Fraction(0) for p_x, q_x in zip(p, q, strict=True)]
    law = emitted(p, q, ratio, p)
    accepted = sum((x * y for x, y in zip(q, ratio, strict=True)), Fraction(0))
    usual = sum((min(x, y) for x, y in zip(p, q, strict=True)), Fraction(0))
    yield "\n3. Classical rejection sampling: a draw from p after a rejection is right if the test is r = A p/q"
    yield "   with A = min of q/p. (A draw from p adds a multiple of p, so what was kept, q r, must be one too:"
    yield "   q r = A p. As r <= 1, A p <= q everywhere; A = sum of min(q, A p) says the same.)"
    yield f"   A = {_number(a)}"
    yield _row("r = A p/q", ratio)
    yield f"   kept: sum of q r = {_number(accepted)} = 1 / max(p/q); `residual` keeps {_number(usual)}"
    yield _row("A p + (1 - A) p", law)
    yield f"   total variation from p {_number(variation(law, p))}. {_judged(law, p)}"


def _judged(law: Fractions, p: Fractions) -> str:
    return "Exact." if list(law) == list(p) else "Biased."


def _row(name: str, values: Fractions) -> str:
    return f"   {name:28}" + "".join(f"{_number(value):>18}" for value in values)


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{value} = {float(value):.4g}"
