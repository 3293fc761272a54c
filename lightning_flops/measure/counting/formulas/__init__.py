"""From an operator and its shapes to FLOPs: how many it has, whether it has none, or whether that is unknown.

``lookup(op)`` answers for one operator; ``register_flop_formula`` adds what only a user can know.
"""

from lightning_flops.measure.counting.formulas.contract import Entry, Unreadable, Work
from lightning_flops.measure.counting.formulas.custom import register_flop_formula, watch_functions
from lightning_flops.measure.counting.formulas.registry import formulas_without_operator, hides_flops, lookup

__all__ = [
    "Entry",
    "Unreadable",
    "Work",
    "formulas_without_operator",
    "hides_flops",
    "lookup",
    "register_flop_formula",
    "watch_functions",
]
