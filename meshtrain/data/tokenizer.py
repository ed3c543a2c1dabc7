"""The byte tokenizer: a token id is the value of a UTF-8 byte."""

from collections.abc import Iterable

from meshtrain.errors import DataError

VOCAB_SIZE = 256


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of `text`, ids in [0, 256).

    Raises:
        DataError: the text holds half of a surrogate pair, which is no character.
    """
    try:
        return list(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise DataError(f"character {error.start} of the text is half of a surrogate pair: not text") from None


def decode(ids: Iterable[int]) -> str:
    """The text of byte ids; bytes that are not UTF-8, as a model may sample them, become U+FFFD.

    Raises:
        DataError: an id outside [0, 256), which is never clamped.
    """
    ids = [int(token) for token in ids]
    for position, token in enumerate(ids):
        if not 0 <= token < VOCAB_SIZE:
            raise DataError(f"id {token} at position {position} is not a byte: the byte tokenizer has ids 0 to 255")
    return bytes(ids).decode("utf-8", errors="replace")
