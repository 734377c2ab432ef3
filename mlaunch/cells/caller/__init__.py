"""Cells on ranks that stay, as their caller has them."""

from mlaunch.cells.caller.cell_calls import Cells as Cells
