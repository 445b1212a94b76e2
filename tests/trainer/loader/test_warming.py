"""Files are warmed beside the first epoch; with a source that says what is asked of it."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from waiting import eventually

from protocol.errors import DataError
from trainer.loader.warming import Warming


class Files:
    """Stands in for rows of files: reads when it is let, and notes what it is asked."""

    def __init__(self, *, fits: bool = True, error: DataError | None = None) -> None:
        self.fits = fits
        self.error = error
        self.begun = 0
        self.go = threading.Event()
        self.asked: list[int] = []

    def preload(self, stop: Callable[[], bool]) -> bool:
        self.begun += 1
        while not self.go.wait(0.001):
            if stop():
                return False
        if self.error:
            raise self.error
        return self.fits

    def will_need(self, rows: np.ndarray) -> None:
        self.asked += rows.tolist()


def warmed(files: Files) -> Warming:
    """One that has come to its end."""
    warming = Warming(files)  # type: ignore[arg-type]
    warming.start()
    files.go.set()
    eventually(lambda: not any(t.name == "loader-warming" for t in threading.enumerate()))
    return warming


def test_files_that_fit_are_read_once_and_no_row_is_asked_for():
    files = Files()
    warming = warmed(files)
    warming.start()
    warming.expect(np.array([1, 2]))
    warming.stop()
    assert files.begun == 1
    assert files.asked == []


def test_of_files_that_do_not_fit_each_row_is_asked_for():
    files = Files(fits=False)
    warming = warmed(files)
    warming.start()
    warming.expect(np.array([1, 2]))
    assert files.begun == 1
    assert files.asked == [1, 2]


def test_what_was_stopped_goes_on_the_next_time():
    files = Files()
    warming = Warming(files)  # type: ignore[arg-type]
    warming.start()
    eventually(lambda: files.begun)
    warming.stop()
    assert not any(t.name == "loader-warming" for t in threading.enumerate())
    warming.expect(np.array([1]))
    assert files.asked == []
    files.go.set()
    warming.start()
    eventually(lambda: files.begun == 2)
    warming.stop()


def test_a_file_that_cannot_be_read_is_told_before_its_rows_are_used():
    warming = warmed(Files(error=DataError("read", why="cut short")))
    with pytest.raises(DataError, match="cut short"):
        warming.expect(np.array([1]))
