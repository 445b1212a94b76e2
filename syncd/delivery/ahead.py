"""Several calls at a time, their results in order.

For large contents: while one chunk is on its way, the next ones are read, hashed and sent too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def ahead(call: Callable[[S], T], items: Iterable[S], *, most: int) -> Generator[T, None, None]:
    """Yield what `call` returns for each item, in order, with up to `most` calls going on.

    Items are drawn in the caller's thread, each when there is room for its call, so no more than
    `most` of them and of their results are held at a time. A single item is called for without any
    thread. What a call raises is raised in its turn, after the calls that have begun have ended.
    """
    drawn = iter(items)
    first = list(itertools.islice(drawn, 2 if most > 1 else 0))
    if len(first) < 2:
        yield from map(call, itertools.chain(first, drawn))
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(most, thread_name_prefix="ahead") as pool:
        try:
            for item in itertools.chain(first, drawn):
                waiting.append(pool.submit(call, item))
                del item  # its call alone holds it
                if len(waiting) == most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
