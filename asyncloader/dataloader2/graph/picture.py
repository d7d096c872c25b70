"""Draws a graph of datapipes, with the package graphviz.

Data path: none; for the user to look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data.datapipes.iter.combining import _ChildDataPipe

from asyncloader.dataloader2.graph.utils import DataPipe, DataPipeGraph, parts_of, traverse_dps

if TYPE_CHECKING:
    import graphviz


def to_graph(dp: DataPipe, *, debug: bool = False) -> graphviz.Digraph:
    """Draw a graph: a box for each part, and an arrow to each part that reads from it.

    Args:
        dp: the end of the graph.
        debug: draw also the internal parts by which several readers share one source; default False.

    Returns:
        The picture; its ``render()`` saves it as a file, which needs the program Graphviz, and ``source`` is its text.

    Raises:
        ModuleNotFoundError: the package graphviz is not installed.
    """
    try:
        import graphviz
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The package `graphviz` is required to be installed to use this function. Please `pip install graphviz`."
        ) from None
    parts = parts_of(dp)
    names = {id(part): f"{number}" for number, part in enumerate(parts)}
    drawn = graphviz.Digraph(node_attr={"shape": "box", "style": "filled", "fontname": "monospace", "fontsize": "10"})
    for part in parts:
        if debug or not _is_internal(part):
            sources = _sources(traverse_dps(part), debug)
            color = "darkolivegreen1" if part is dp else "lightgrey" if sources else "lightblue"
            name = type(part).__name__.replace("IterDataPipe", "").replace("MapDataPipe", "").lstrip("_")
            drawn.node(names[id(part)], name or type(part).__name__, fillcolor=color)
            for source in sources:
                drawn.edge(names[id(source)], names[id(part)])
    return drawn


def _is_internal(part: Any) -> bool:
    return isinstance(part, _ChildDataPipe)


def _sources(graph: DataPipeGraph, debug: bool) -> list[Any]:
    """Return the sources of a graph's end. An internal part stands for its own sources, unless it is drawn."""
    ((_, before),) = graph.values()
    found: list[Any] = []
    for number, (source, further) in before.items():
        found += _sources({number: (source, further)}, debug) if _is_internal(source) and not debug else [source]
    return found
