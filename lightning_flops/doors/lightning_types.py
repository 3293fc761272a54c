"""Names of Lightning's classes for annotations, which load no Lightning when something evaluates them.

A command line that is made from signatures (jsonargparse, under LightningCLI) runs a module's imports for the type
checker, too; of two installed import roots that could be the one which the program does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = LightningModule = Trainer = Any

__all__ = ["Callback", "LightningModule", "Trainer"]
