"""Named waits with a limit: nothing waits for ever, and what took too long has a name.

deadlines = Deadlines(expire)
with deadlines.limit("compile", 3600):
    ...
"""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator


class Deadlines:
    """Watches the waits of one process from a thread of its own: what waits is often code that nothing interrupts."""

    def __init__(self, expire: Callable[[str, float], None]) -> None:
        """`expire(name, limit)` is called once, from the watching thread, when a wait is over its limit."""
        self._expire = expire
        self._changed = threading.Condition()
        self._waits: list[tuple[float, str, float]] = []  # (ends, name, limit), innermost last
        self._open = True
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, name: str, seconds: float) -> Iterator[None]:
        """The body may take so long."""
        wait = time.monotonic() + seconds, name, seconds
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                self._thread.start()
            self._waits.append(wait)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waits.remove(wait)

    def close(self) -> None:
        """Watches no more."""
        with self._changed:
            self._open = False
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._open:
                ends, name, limit = min(self._waits, default=(time.monotonic() + 3600, "", 0.0))
                if name and ends <= time.monotonic():
                    break
                self._changed.wait(ends - time.monotonic())
            else:
                return
        print(f"error: '{name}' took more than its limit of {limit:g} s; all threads stand here:", file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):  # standard error may be no file
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._expire(name, limit)
