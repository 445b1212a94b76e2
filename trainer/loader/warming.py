"""Cold files: brought into memory beside the first epoch or, where they do not fit, row by row."""

from __future__ import annotations

import threading

from protocol.errors import DataError
from trainer.loader.plan import Rows
from trainer.loader.rows import Rows as Source


class Warming:
    """Reads a source's files in order, in a thread of its own, until all of them are read or it is
    stopped. Once that is done, or was found not to fit, it is not begun again."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._over = threading.Event()
        self._done = False
        self._fits = True
        self._error: DataError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, or go on, in the background."""
        self.stop()
        if not self._done:
            self._over.clear()
            self._thread = threading.Thread(target=self._read, name="loader-warming", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, which takes no longer than to read 8 MiB."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread and thread is not threading.current_thread():
            thread.join()

    def _read(self) -> None:
        try:
            read = self._source.preload(self._over.is_set)
        except DataError as error:
            self._error = error
            return
        if not self._over.is_set():
            self._done, self._fits = True, read

    def expect(self, rows: Rows) -> None:
        """Say which rows are used soon: they are asked for where the files do not fit.

        Raises DataError when a file was found to be unreadable meanwhile.
        """
        if self._error:
            raise self._error
        if not self._fits:
            self._source.will_need(rows)
