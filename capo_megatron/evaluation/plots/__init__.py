"""Figures from metrics and records, as PNG and SVG.

methods.py    runs -> the methods that are compared: seeds together, named by the options that differ
figures.py    what each figure shows
drawing.py    how it looks; the only file that imports matplotlib
"""

from capo_megatron.evaluation.plots.drawing import spread
from capo_megatron.evaluation.plots.figures import FIGURES, plot_runs, training_figure

__all__ = ["FIGURES", "plot_runs", "spread", "training_figure"]
