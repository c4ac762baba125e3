"""All rules, level by level, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from . import aborts, contract, exact, recover, surface
from .trial import Options, Rule

__all__ = ["LEVELS", "RULES", "find", "select"]

LEVELS = ("exact", "contract", "recover")

RULES: tuple[Rule, ...] = (
    *exact.RULES,
    *surface.RULES,
    *contract.RULES[:-1],
    *aborts.RULES,
    # Last of its level, so that leftovers of other rules are not counted.
    contract.RULES[-1],
    *recover.RULES,
)


def select(
    levels: Sequence[str] = LEVELS,
    names: Sequence[str] = (),
    options: Options | None = None,
) -> list[Rule]:
    """Return the rules of `levels`, in order.

    `names` takes the rules that are called so, and `options` those about its ops.
    """
    return [
        rule
        for rule in RULES
        if rule.level in levels
        and (not names or rule.name in names)
        and (options is None or rule.is_about(options))
    ]


def find(level: str, name: str) -> Rule:
    """Return the rule of this name; raises `KeyError` if there is none."""
    for rule in RULES:
        if (rule.level, rule.name) == (level, name):
            return rule
    raise KeyError(f"{level}: {name}")
