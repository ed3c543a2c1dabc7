"""Messages between two processes of a job: a JSON object a line, over one TCP connection."""

import contextlib
import json
import socket
import threading
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

MAX_BYTES = 1 << 20  # of one message; a flattened config has some 5 kB, a traceback is cut to MAX_TEXT
MAX_TEXT = 1 << 16  # characters of a traceback
SEND_SECONDS = 5.0  # a peer that takes nothing for so long, with its buffers full, is stopped or gone


class WireError(Exception):
    """The other side is gone, or sends what is no message."""


class Wire:
    """One connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._read = b""
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, **values: Any) -> None:
        """Sends one message.

        Raises:
            WireError: the other side is gone.
        """
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        assert len(line) <= MAX_BYTES, f"a message of {len(line)} bytes"
        try:
            with self._sending:
                self.connection.sendall(line)
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> list[Message]:
        """What has come: waits until something does, at most `SEND_SECONDS`.

        Raises:
            WireError: the other side has closed the connection, or sent what is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise WireError(str(error)) from error
        if not data:
            raise WireError("closed")
        *lines, self._read = (self._read + data).split(b"\n")
        if len(self._read) > MAX_BYTES:
            raise WireError("no message")
        return [_parse(line) for line in lines]

    def finish(self) -> None:
        """Sends nothing more. Closing at once, with words of the other side unread, could destroy the last sent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the connection; a thread in `receive` wakes up."""
        with contextlib.suppress(OSError):  # gone already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("no message") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WireError("no message")
    return message
