"""A sketch that can be summed: every element is added to three cells, and comes back by peeling.

A cell that only one unknown element hits *is* that element; taking it out of its other two cells
frees others. Where non-zero elements are fewer than cells / 1.23 this reaches all of them but with
a chance that falls with their number. The three cells lie in three thirds of the table, so they
differ.
"""

import numpy as np

from commpress.kernels.cpu.compiled import Kernels

loops = Kernels("cell_loops")


def to_quanta(values, left, starts, quanta, most=2.0**126):
    """values := whole multiples, at most ``most``, of their part's quantum; left += what that
    leaves out.

    The usual ``most`` only keeps multiples finite.

    Part p is the elements from starts[p] to starts[p + 1].
    """
    loops.round(values.numpy(), left.numpy(), starts, quanta, np.float32(most))


def scaled(values, starts, factors, out):
    """out := values · the factor of their part."""
    loops.scale(values.numpy(), starts, factors, out.numpy())


def peaks(values, starts):
    """The largest magnitude of each part."""
    out = np.empty(len(starts) - 1, np.float32)
    loops.peaks(values.numpy(), starts, out)
    return out


def add(values, table, bitmap, *, seed=0):
    """table += the sketch of ``values``; bitmap (one bit per element, lowest first) marks those
    that are not zero."""
    loops.add(values.numpy(), table.numpy(), bitmap.numpy(), np.uint32(seed))


def peel(table, bitmap, out, *, seed=0):
    """out := the elements that ``bitmap`` marks; returns how many could not be told apart. The
    table is used up."""
    return int(loops.peel(table.numpy(), bitmap.numpy(), out.numpy(), np.uint32(seed)))
