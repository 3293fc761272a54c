"""Names of Lightning's classes for annotations. Evaluating such an annotation does not import Lightning.

jsonargparse, which LightningCLI uses, makes a command line from signatures. For that it runs a module's TYPE_CHECKING
imports, too. With both import roots installed, that could import the root that the program does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = LightningModule = Trainer = Any

__all__ = ["Callback", "LightningModule", "Trainer"]
