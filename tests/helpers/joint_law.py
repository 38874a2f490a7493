"""For tests of joint laws: how well counts fit one."""

import math
from collections.abc import Mapping

from forerun.oracle import Tokens
from forerun_export.certify.statistics import chi_square_tail


def p_value(observed: Mapping[Tokens, int], expected: Mapping[Tokens, float]) -> float:
    """Of the G-test: the chance of a fit as bad as this if the law is `expected`; rare sequences share a cell."""
    total = sum(observed.values())
    cells = [(observed.get(key, 0), total * p) for key, p in expected.items() if total * p >= 5]
    rest = (total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells))
    cells += [rest] if rest[1] >= 5 else []
    g = 2 * sum(count * math.log(count / mean) for count, mean in cells if count)
    return chi_square_tail(g, len(cells) - 1)
