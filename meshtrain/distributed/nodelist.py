"""SLURM's short form for lists of hosts, `gpu-[01-03,07]`, in full. `scontrol` could tell too: containers lack it."""

import itertools
import re
from collections.abc import Iterator

from meshtrain.errors import LaunchError

MAX_HOSTS = 1 << 16  # what one list may come to: a slip such as [1-10000000000] must not fill the memory
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TEXT = re.compile(r"[\w.:%-]+", re.ASCII)


def expand_node_list(text: str) -> tuple[str, ...]:
    """The hosts that a node list stands for, in its order.

    A name is text with any number of bracketed groups, and text after them; a group is a list of numbers, of ranges
    whose first number's zeros are kept, or of names with groups of their own.

    >>> expand_node_list("login,gpu-[08-10],r[1-2]n[3,5]-ib")
    ('login', 'gpu-08', 'gpu-09', 'gpu-10', 'r1n3-ib', 'r1n5-ib', 'r2n3-ib', 'r2n5-ib')

    Raises:
        LaunchError: it is no such list, or stands for more than `MAX_HOSTS` hosts; the text says where.
    """
    if not text.strip():
        raise LaunchError("the node list is empty")
    hosts = tuple(itertools.islice(_names(text, text), MAX_HOSTS + 1))
    if len(hosts) > MAX_HOSTS:
        raise LaunchError(f"node list '{text[:200]}': more than {MAX_HOSTS} hosts")
    return hosts


def _names(text: str, whole: str) -> Iterator[str]:
    """Each name of a list, its groups expanded."""
    for name in _split(text, whole):
        yield from _expand(name.strip(), whole)


def _expand(name: str, whole: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not name or (before and not _TEXT.fullmatch(before)):
        raise _bad(whole, f"'{name}' is no host name")
    if not bracket:
        yield before
        return
    end = _closing(rest, whole)
    group, after = rest[:end], rest[end + 1 :]
    for item in _split(group, whole):
        for middle in _items(item, whole):
            if after:
                yield from (before + middle + end for end in _expand(after, whole))
            else:
                yield before + middle


def _items(item: str, whole: str) -> Iterator[str]:
    """What one item of a group stands for."""
    found = _RANGE.fullmatch(item)
    if found is None:
        if "[" not in item:
            raise _bad(whole, f"'{item}' is neither a number nor a range such as 01-16")
        yield from _expand(item, whole)
        return
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first):
        raise _bad(whole, f"the range '{item}' runs backwards")
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))


def _split(text: str, whole: str) -> Iterator[str]:
    """The parts between the commas that stand in no bracket."""
    depth = start = 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            raise _bad(whole, "a bracket ']' closes nothing")
        if letter == "," and not depth:
            yield text[start:position]
            start = position + 1
    if depth:
        raise _bad(whole, "a bracket '[' is not closed")
    yield text[start:]


def _closing(text: str, whole: str) -> int:
    """Where the bracket that was opened before `text` closes."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if not depth:
            return position
    raise _bad(whole, "a bracket '[' is not closed")


def _bad(whole: str, what: str) -> LaunchError:
    return LaunchError(f"node list '{whole[:200]}': {what}")
