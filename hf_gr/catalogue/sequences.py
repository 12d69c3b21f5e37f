# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Users' token sequences, in whatever form, to padded arrays. Knows no trie; torch only by its methods.

Axes: N sequences, T tokens of the longest.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .fanout import Array, smallest_dtype
from .pieces import in_pieces
from .trie import PADDING

LARGEST_TOKEN = 2**31 - 1
ERRORS_SHOWN = 3  # of the same kind, in one message
Rows = npt.NDArray[np.int64]


def to_host(values: Any, name: str = "a tensor") -> Any:
    """Tensors of any device and other arrays as NumPy arrays, everything else as it is, without importing torch."""
    if hasattr(values, "detach"):
        check_is_dense(values, name)
        host = values.detach().cpu()
        try:
            return host.numpy()
        except TypeError:  # bfloat16, which NumPy lacks
            return host.float().numpy()
    return np.asarray(values) if hasattr(values, "__array__") else values


def check_is_dense(tensor: Any, name: str) -> None:
    """Refuse PyTorch's sparse tensors, and those without values."""
    if tensor.is_meta or str(tensor.layout) != "torch.strided":
        kind = "on the meta device" if tensor.is_meta else tensor.layout
        raise ValueError(f"{name} is {kind}, expected a dense tensor with values: call to_dense(), or load it")


def shown(values: Iterable[Any]) -> str:
    """The first few of some values, for a message."""
    texts = [str(value) if is_integer(value) else repr(value) for value in values]
    return ", ".join(texts[:ERRORS_SHOWN]) + (", ..." if len(texts) > ERRORS_SHOWN else "")


def is_integer(value: object) -> bool:
    """Whether a value is an integer, Python's or NumPy's, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_is_unicode(text: str, name: str) -> None:
    """Refuse lone surrogates, such as `errors="surrogateescape"` leaves: no tokenizer and no file takes them."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {text!r}, expected Unicode without lone surrogates: decode it with its encoding"
        ) from error


def read_rows(sequences: Any, *, one_is_enough: bool = False) -> tuple[Rows, Rows]:
    """Sequences as one `[N, T]` array, padded with `PADDING`, and their `[N]` lengths; `[T]` may be one sequence."""
    host = to_host(sequences)
    if isinstance(host, np.ndarray):
        array = cast("npt.NDArray[Any]", host)
        if array.dtype.kind != "O":
            return _read_array(array, one_is_enough)
    if not isinstance(host, Iterable) or isinstance(host, (str, bytes)):
        raise ValueError(f"sequences is {host!r}, expected [N, T] integers or a list of N token lists")
    rows: list[Any] = list(cast("Iterable[Any]", host))
    if one_is_enough and rows and not isinstance(rows[0], Iterable):
        rows = [rows]
    lists: list[Any] = [
        row if isinstance(row, (list, tuple)) else _read_row(row, number) for number, row in enumerate(rows)
    ]
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    tokens = list(chain.from_iterable(lists))
    try:
        if not all(kind is not bool and issubclass(kind, (int, np.integer)) for kind in set(map(type, tokens))):
            raise TypeError
        flat = np.array(tokens, dtype=np.int64)
    except (TypeError, OverflowError) as error:
        number, position, token = next(
            (number, position, token)
            for number, row in enumerate(lists)
            for position, token in enumerate(row)
            if not is_integer(token) or not -(2**63) <= token < 2**63
        )
        if is_integer(token):
            raise _range_error(number, position, token) from error
        raise ValueError(
            f"sequence {number} has {token!r} at position {position}, expected an integer: pass token ids, not text"
        ) from error
    longest = int(lengths.max(initial=0))
    if len(flat) == len(lists) * longest:
        return flat.reshape(len(lists), longest), lengths
    padded = np.full((len(lists), longest), PADDING, dtype=np.int64)
    padded[_before(lengths, longest)] = flat
    return padded, lengths


def read_catalogue(sequences: Any, eos_token_id: int | None) -> Array:
    """Check a catalogue's sequences and bring them to `[N, T]`, the end token appended where there is one.

    The rows are of the smallest type that holds the tokens: a catalogue may be large.
    """
    host: Any = to_host(sequences)
    rows: npt.NDArray[Any] = host
    lengths: Rows | None = None
    if not isinstance(host, np.ndarray) or rows.dtype.kind not in "iu" or rows.ndim != 2:
        rows, lengths = read_rows(host)
        lengths = None if len(rows) and lengths.min() == rows.shape[1] else lengths
    if not len(rows):
        raise ValueError("sequences is empty, expected at least one token sequence: a catalogue needs an item")
    least, largest = (int(rows.min()), int(rows.max())) if rows.shape[1] else (0, 0)
    if lengths is None and least == PADDING:
        found = np.zeros(len(rows), dtype=np.int64)  # right if all padding is after the end, which is checked below
        in_pieces(lambda piece: np.sum(rows[piece] != PADDING, axis=1, out=found[piece]), len(rows))
        # Without an end token, a column of -1 is a mistake.
        lengths = None if eos_token_id is None and found.min() == found.max() else found
    if not rows.shape[1] or (lengths is not None and not lengths.all()):
        number = 0 if lengths is None else int(np.argmin(lengths))
        raise ValueError(f"sequence {number} is empty, expected at least one token: omit it")
    if least < 0 or largest > LARGEST_TOKEN:
        bad = rows < 0 if largest <= LARGEST_TOKEN else (rows < 0) | (rows > LARGEST_TOKEN)
        if lengths is not None:
            bad &= _before(lengths, rows.shape[1])
        if bad.any():
            row, position = divmod(int(np.argmax(bad)), rows.shape[1])
            raise _range_error(row, position, rows[row, position])
    rows = rows.astype(smallest_dtype(max(largest, eos_token_id or 0)), copy=False)
    if eos_token_id is not None:
        return _end_rows(rows, lengths, eos_token_id)
    if lengths is not None:
        raise ValueError(
            f"sequences have {lengths.min()} to {lengths.max()} tokens and eos_token_id=None, expected one length or "
            "an end token: pass eos_token_id= (usually model.generation_config.eos_token_id)"
        )
    return rows


def read_eos_token_id(eos_token_id: object) -> int | None:
    """Check an end token."""
    if eos_token_id is None:
        return None
    if not is_integer(eos_token_id) or not 0 <= cast(int, eos_token_id) <= LARGEST_TOKEN:
        raise ValueError(f"eos_token_id={eos_token_id!r}, expected one token id: choose one where a model has several")
    return int(cast(int, eos_token_id))


def _read_array(array: npt.NDArray[Any], one_is_enough: bool) -> tuple[Rows, Rows]:
    if array.ndim == 1 and one_is_enough:
        array = array[None]
    if array.ndim != 2 and array.shape != (0,):
        raise ValueError(f"sequences has shape {list(array.shape)}, expected [N, T] or a list of N token lists")
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"sequences has dtype {array.dtype}, expected integers: pass token ids, not text or scores")
    array = array.reshape(len(array), array.shape[-1])
    too_large = array > np.iinfo(np.int64).max if array.dtype == np.uint64 else np.zeros(0, dtype=bool)
    if too_large.any():
        row, position = divmod(int(np.argmax(too_large)), array.shape[1])
        raise _range_error(row, position, array[row, position])
    return array.astype(np.int64), np.full(len(array), array.shape[1], dtype=np.int64)


def _before(lengths: Rows, width: int) -> npt.NDArray[np.bool_]:
    """`[N, width]`: whether a position is before the end of its row."""
    return np.arange(width, dtype=np.int64) < lengths[:, None]


def _read_row(row: Any, number: int) -> list[Any]:
    host = to_host(row)
    values: Any = host.tolist() if isinstance(host, np.ndarray) else host
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ValueError(f"sequence {number} is {values!r}, expected a list of token ids: pass token ids, not text")
    return list(cast("Iterable[Any]", values))


def _range_error(row: int, position: int, token: Any) -> ValueError:
    fix = "pass ragged lists, or eos_token_id= if -1 fills up shorter rows" if token < 0 else "is it a token id?"
    return ValueError(f"sequence {row} has token {token} at position {position}, expected 0 to {LARGEST_TOKEN}: {fix}")


def _end_rows(rows: Array, lengths: Rows | None, eos_token_id: int) -> Array:
    """Append the end token to every row that does not end with it, and refuse it anywhere else."""
    width = rows.shape[1]
    # Where the end token is, or goes.
    ends = np.full(len(rows), width, dtype=np.int64) if lengths is None else lengths.astype(np.int64)
    is_bad = np.zeros(len(rows), dtype=bool)

    def find_ends(piece: slice) -> None:
        some, own = rows[piece], ends[piece]
        own -= some[np.arange(len(some)), own - 1] == eos_token_id
        is_bad[piece] = own == 0
        for place, column in enumerate(some.T):
            is_bad[piece] |= (column == eos_token_id) & (own > place)

    in_pieces(find_ends, len(rows))
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise ValueError(
            f"sequence {row} is {[token for token in rows[row].tolist() if token != PADDING]}, expected "
            f"eos_token_id={eos_token_id} at its end only, after at least one other token: is it the right end token?"
        )
    ended = np.empty((len(rows), int(ends.max()) + 1), dtype=rows.dtype)
    shared = min(width, ended.shape[1])

    def fill(piece: slice) -> None:
        some = ended[piece]
        some[:, :shared], some[:, shared:] = rows[piece, :shared], PADDING
        some[np.arange(len(some)), ends[piece]] = eos_token_id

    in_pieces(fill, len(rows))
    return ended
