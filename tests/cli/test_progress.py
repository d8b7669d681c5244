"""The progress of a run, on a terminal and in a file."""

from __future__ import annotations

import io
import sys

import pytest
from dadplug.examples.runs import RunProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(**settings) -> None:
    progress = RunProgress("rankdad", epochs=2, steps=3, **settings)
    for epoch in range(2):
        for step in range(3 - epoch):  # the second epoch is shorter at this site
            progress.step(loss=f"{3 * epoch + step}.5")
        progress.end_epoch(accuracy=f"0.{epoch + 1}")
    progress.close()


def test_a_file_gets_one_line_an_epoch(capsys):
    run()
    out, err = capsys.readouterr()
    assert out == "rankdad: epoch 1/2, loss=2.5, accuracy=0.1\nrankdad: epoch 2/2, loss=4.5, accuracy=0.2\n"
    assert err == ""


def test_a_terminal_gets_one_bar_that_ends_full(capsys, monkeypatch):  # so that the stream is restored first
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    run()
    assert capsys.readouterr().out == ""
    last = sys.stderr.getvalue().rstrip("\n").rpartition("\r")[2]
    assert last.startswith("rankdad: 100%")
    assert "6/6" in last
    assert "epoch=2/2, loss=4.5, accuracy=0.2" in last
    assert sys.stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_other_sites_show_nothing(capsys, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    run(shown=False)
    assert capsys.readouterr().out == ""
    assert sys.stderr.getvalue() == ""
