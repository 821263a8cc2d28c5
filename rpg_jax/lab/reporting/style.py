"""What the figures of runs share: colors, the frame of a panel, and the mean that smooths a training curve."""

import numpy as np

INK, GRID = "#111111", "#e5e5e5"
COLORS = (INK, "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8a6d00")  # distinct for color-blind readers, too


def frame(axis, title: str, x: str, y: str) -> None:
    """Title and labels of a panel, and a grid in place of the box around it."""
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.xaxis.get_major_locator().set_params(nbins=5, integer=x == "RL step")
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The centered mean of the values [n] over a tenth of the run; over fewer of them at both ends."""
    window = np.ones(2 * (len(values) // 20) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def logarithmic(axis, y: bool = True) -> None:
    """Logarithmic axes whose labels are plain numbers: formulas are not drawn in these figures."""
    from matplotlib.ticker import LogLocator

    axis.set(xscale="log", **({"yscale": "log"} if y else {}))
    for dimension in (axis.xaxis, axis.yaxis) if y else (axis.xaxis,):
        dimension.set_major_locator(LogLocator(numticks=6))
        dimension.set_major_formatter("{x:g}")
        dimension.set_minor_formatter("")
