"""What a layout costs, read from the compiled program before anything is queued for it."""

from meshtrain.plan.hlo import Collective, collectives

__all__ = ["Collective", "collectives"]
