"""Where the time goes: the backend tells engine seconds apart by graph."""

from pathlib import Path

import pytest

from helpers.table_models import TablePair, table_pair


@pytest.fixture
def pair(tmp_path: Path) -> TablePair:
    return table_pair(tmp_path / "pair")


def used(pair: TablePair, **controls: object) -> set[str]:
    """The folders whose graphs took any time, and the check that all of it is told."""
    with pair.open() as decoder:
        decoder.generate("w1 w2 w3", max_new_tokens=9, **controls)
        seconds = decoder.backend.seconds_by_graph
        assert sum(seconds.values()) == pytest.approx(decoder.backend.engine_s)
        return {graph.relative_to(pair.path).parts[0] for graph, taken in seconds.items() if taken > 0}


def test_seconds_of_all_graphs_add_up_to_those_of_the_engines(pair: TablePair) -> None:
    assert used(pair) == {"target", "draft", "sampling"}


def test_a_draft_that_does_not_run_takes_no_time(pair: TablePair) -> None:
    assert used(pair, draft="none") == {"target", "sampling"}
