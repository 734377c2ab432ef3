"""Cells on ranks that stay, in the process that calls the ranks."""

from mlaunch.cells.caller.cell_calls import Cells as Cells
