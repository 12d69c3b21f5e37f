# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that changes while it serves. Knows no model and no queue.

Readers take `LiveCatalogue.edition` once for a batch and never wait: an edition never changes. Writers take turns.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from hf_gr.answering.requests import split_items
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId, check_item_ids
from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.catalogue.snapshot import refuse_unknown
from hf_gr.files.text import counted

from .update_log import Edition, UpdateLog, digest_of

logger = logging.getLogger(__name__)

# An addition forgets the items that earlier updates removed when they are more than this, and more than those left.
MOST_REMOVED = 5_000
MOST_KEYS = 1_000


@dataclass(frozen=True)
class Update:
    """A change of a catalogue, made as a whole or not at all: items restored, removals, additions, then rules.

    Attributes:
        add: items, `{"item_id": "B99", "sequence": [5, 7]}`. An id that exists gets a second sequence (with semantic
            IDs, it is refused), unless it is in `remove`, too: then the new one replaces the old one, and the item
            stays in its rules.
        remove: ids of items, which leave every rule; those that are gone already stay so.
        restore: ids of items that were removed; they come back to no rule.
        rules: by name, the ids of the only items that may be answered under it; None deletes the rule.
        idempotency_key: any text that no other update has: an update that its sender repeats, since he does not know
            whether it was made, is made once. The last `MOST_KEYS` are known.
    """

    add: Sequence[Mapping[str, Any]] = ()
    remove: Sequence[ItemId] = ()
    rules: Mapping[str, Sequence[ItemId] | None] = field(default_factory=dict)
    restore: Sequence[ItemId] = ()
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "add", tuple(_read_item(item, number) for number, item in enumerate(self.add)))
        for name in ("remove", "restore"):
            object.__setattr__(self, name, _read_ids(getattr(self, name), name))
        if not isinstance(self.rules, Mapping):
            raise ValueError(f"rules={self.rules!r}, expected item ids by name: rules={{'europe': ['B01', 'B02']}}")
        for name in self.rules:
            if not isinstance(name, str) or not name:
                raise ValueError(f"rules has the name {name!r}, expected a text: rules={{'europe': ['B01', 'B02']}}")
        rules = {name: None if ids is None else _read_ids(ids, f"rules[{name!r}]") for name, ids in self.rules.items()}
        object.__setattr__(self, "rules", rules)

    def to_dict(self) -> dict[str, Any]:
        """The update in JSON's types; what is empty is omitted."""
        rules = {name: None if ids is None else list(ids) for name, ids in self.rules.items()}
        ids = {"remove": list(self.remove), "restore": list(self.restore)}
        fields = vars(self) | ids | {"add": [dict(item) for item in self.add], "rules": rules}
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Update:
        """The update of `to_dict`.

        Raises:
            ValueError: a field that is unknown or malformed.
        """
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name!r} is no field of an update, expected add, remove, restore or rules: omit it")
        return cls(**fields)


class LiveCatalogue:
    """A catalogue, its rules and its version.

    `on_change` hears of every edition that this object has made, once it is served; not of what others wrote.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
        >>> catalogue = LiveCatalogue(index, {"sweet": ["jam", "yam"]})
        >>> before = catalogue.edition
        >>> after = catalogue.apply(Update(remove=["jam"], add=[{"item_id": "pie", "sequence": [6, 9]}]))
        >>> before.version, list(before.rules["sweet"].item_ids), after.version, list(after.rules["sweet"].item_ids)
        (0, ['jam', 'yam'], 1, ['yam'])
    """

    def __init__(
        self,
        index: ConstraintIndex | None = None,
        rules: Mapping[str, Sequence[ItemId]] | None = None,
        *,
        version: int = 0,
        model: str | None = None,
        log: UpdateLog | None = None,
        check: Callable[[ConstraintIndex], None] | None = None,
    ) -> None:
        """Begin with an index as it is now, or with what a log says.

        Args:
            index: copied: changing it later has no effect. None where the log has one.
            rules: item ids by name.
            version: of what is given.
            model: the folder or repository of the model that it is of, which a log keeps.
            log: the truth, shared with other processes. The other arguments begin an empty log, and are ignored for
                any other.
            check: sees every new index before it serves a request, and raises ValueError to refuse the update:
                a token that the model lacks would fail the requests of all. May be set later.

        Raises:
            ValueError: a rule has ids that the index does not have; no index, and none in the log; a damaged log.
        """
        self.check: Callable[[ConstraintIndex], None] = check or (lambda index: None)
        self.on_change: Callable[[Edition], None] = lambda edition: None
        self._log = log
        self._writing = Lock()  # held by one update at a time; readers take `edition` once and need none
        self._following: tuple[Thread, Event] | None = None
        self._edition: Edition = Edition(-1, None)  # pyright: ignore[reportArgumentType]  # until the log is read
        with nullcontext() if log is None or not log.is_empty else log.writing():
            if log is None or log.is_empty:
                if index is None:
                    raise ValueError("index=None, expected an index: there is no log, or nothing is in it yet")
                first = Edition(version - 1, copy.copy(index), model=model)
                self._edition = self._updated(first, Update(rules=rules or {}))
                if log is not None:
                    log.begin(self._edition)
        self.refresh()

    @property
    def edition(self) -> Edition:
        """The catalogue of this moment."""
        return self._edition

    def answered_by(self, model: str, check: Callable[[ConstraintIndex], None]) -> None:
        """Say which model answers with the catalogue, and what it refuses: see `model` and `check` above."""
        check(self._edition.index)
        with self._writing:
            self.check, self._edition = check, replace(self._edition, model=model)

    def apply(self, update: Update) -> Edition:
        """Make an update, and return the edition with it. Batches in flight keep theirs.

        An addition compiles the whole index: 0.1 s for 100,000 items, 1 s for a million. Send many items at once.

        Raises:
            ValueError: unknown ids, sequences that do not fit the catalogue, or what `check` refuses; nothing has
                changed then.
            OSError: the log cannot be written; nothing has changed then.
            Overloaded: another process keeps the log's lock (`hf_gr.serving.answers`); nothing has changed then.
        """
        with self._turn():
            key = update.idempotency_key
            if key is not None and key in self._edition.keys:
                if self._edition.keys[key] != digest_of(update.to_dict()):
                    raise ValueError(f"idempotency_key={key!r}, expected a new one: another update has had it")
                return self._edition
            edition = self._updated(self._edition, update)
            if self._log is not None:
                self._log.append(edition.version, update.to_dict())
            self._edition = edition
            if self._log is not None and self._log.needs_base:
                try:
                    self._log.begin(edition)
                except OSError:
                    logger.exception("the log cannot begin anew: it grows until the next update")
        return self._told(edition)

    def swap(
        self,
        index: ConstraintIndex,
        *,
        recommender: Any = None,
        model: str | None = None,
        check: Callable[[ConstraintIndex], None] | None = None,
    ) -> Edition:
        """Replace the whole index. Rules lose the ids that the new index does not have: a warning counts them.

        In the same step comes another model, if `check` is given: see `answered_by`, and `recommender` of `Edition`.
        Then items that were removed stay so.

        Raises:
            ValueError: the ids are of another type, or `check` refuses the index; nothing has changed then.
            OSError: the log cannot be written; nothing has changed then.
        """
        index = copy.copy(index)
        with self._turn():
            if index.snapshot.are_strings != self._edition.index.snapshot.are_strings:  # requests that wait name items
                has, expected = ("strings", "integers") if index.snapshot.are_strings else ("integers", "strings")
                raise ValueError(
                    f"the index has item ids of {has}, expected {expected} as before: start another server for it"
                )
            (check or self.check)(index)
            before = self._edition
            if check is not None and (gone := before.index.snapshot.removed()):
                index.remove([item for item, is_there in zip(gone, index.has_items(gone), strict=True) if is_there])
            rules = {name: _living(index, view) for name, view in before.rules.items()}
            edition = replace(before, version=before.version + 1, index=index, rules=rules)
            if check is not None:
                edition = replace(edition, model=model, recommender=recommender)
            for name, view in before.rules.items():
                if lost := view.num_items - rules[name].num_items:
                    logger.warning("rule %r has lost %s: the new index lacks them", name, counted(lost, "item"))
            if self._log is not None:
                self._log.begin(edition)
            self.check, self._edition = check or self.check, edition
        return self._told(edition)

    def refresh(self) -> Edition:
        """Make the updates that other processes have written to the log since; there are none without a log.

        Raises:
            ValueError: the log is damaged, or has an update that `check` refuses; the edition before it stays.
        """
        with self._writing:
            self._catch_up()
        return self._edition

    def follow(self, seconds: float = 1.0) -> None:
        """Refresh every so many seconds, in a thread of its own, until `close`."""
        self.close()
        stop = Event()
        thread = Thread(target=self._follow, args=(stop, seconds), name="hf_gr-catalogue", daemon=True)
        self._following = thread, stop
        thread.start()

    def close(self) -> None:
        """End what `follow` began."""
        if self._following is not None:
            thread, stop = self._following
            self._following = None
            stop.set()
            thread.join()

    def _updated(self, edition: Edition, update: Update) -> Edition:
        """An edition after an update, of the next version."""
        index, rules = copy.copy(edition.index), dict(edition.rules)
        if update.remove:
            ids = index.snapshot.check_ids(update.remove, "remove")
            refuse_unknown(ids, index.snapshot.sequences_of(ids)[0], "remove", fix="omit them")
        if update.restore:
            try:
                index.restore(list(update.restore))
            except ValueError as error:
                raise ValueError(f"restore: {error}") from error
        if update.add and (num_left := index.num_items):
            if len(index.snapshot.items) - num_left > max(MOST_REMOVED, num_left):
                index.compact()
        if update.remove:
            is_there = index.has_items(list(update.remove))
            index.remove([item for item, is_one in zip(update.remove, is_there, strict=True) if is_one])
            for name, view in edition.rules.items():
                if gone := split_items(update.remove, view)[0]:
                    rules[name] = copy.copy(view)  # the arrays of the others stay on their devices
                    rules[name].remove(gone)
        if update.add:
            try:
                index.add([item["sequence"] for item in update.add], [item["item_id"] for item in update.add])
            except ValueError as error:
                raise ValueError(f"add: {error}") from error
            rules = {name: _living(index, view) for name, view in edition.rules.items() if name not in update.rules}
        self.check(index)
        for name, ids in update.rules.items():
            if ids is not None:
                _refuse_unknown(index, ids, f"rules[{name!r}]")
                rules[name] = index.where(list(ids))
            elif name not in edition.rules:
                raise ValueError(
                    f"rules[{name!r}]=None, expected item ids: no rule has this name, so it cannot be deleted; there "
                    f"are {', '.join(map(repr, edition.rules)) or 'none'}"
                )
            else:
                rules.pop(name, None)
        keys = edition.keys
        if (key := update.idempotency_key) is not None:
            keys = dict([*keys.items(), (key, digest_of(update.to_dict()))][-MOST_KEYS:])
        return replace(edition, version=edition.version + 1, index=index, rules=rules, keys=keys)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only writer, of all processes that share the log, who knows all updates."""
        with nullcontext() if self._log is None else self._log.writing(), self._writing:
            self._catch_up()
            yield

    def _catch_up(self) -> None:
        """Make what others have written; what fails is tried again the next time."""
        if self._log is None:
            return
        base, updates = self._log.read(self._edition.version)
        version = self._edition.version + 1 if base is None else base.version
        try:
            if base is not None:
                own = self._edition
                if own.model and base.model and own.model != base.model:  # another process has swapped it
                    raise ValueError(
                        f"it is of the model {base.model}, expected {own.model}, which answers here: start this "
                        "server anew, without MODEL"
                    )
                self.check(base.index)
                self._edition = replace(base, model=own.model or base.model, recommender=own.recommender)
                version += 1
            for fields in updates:
                self._edition = self._updated(self._edition, Update.from_dict(fields))
                version += 1
        except ValueError as error:
            raise ValueError(f"{self._log.folder}, version {version}: {error}") from error

    def _told(self, edition: Edition) -> Edition:
        try:
            self.on_change(edition)
        except Exception:  # the change stays made
            logger.exception("on_change failed for catalogue version %d", edition.version)
        return edition

    def _follow(self, stop: Event, seconds: float) -> None:
        while not stop.wait(seconds):
            try:
                self.refresh()
            except Exception:
                logger.exception("the catalogue could not be refreshed: version %d stays", self._edition.version)


def _living(index: ConstraintIndex, view: ConstraintIndex) -> ConstraintIndex:
    """The items of another index's view that an index has."""
    return index.where(np.asarray(view.item_ids, dtype=object)[index.has_items(view.item_ids)].tolist())


def _refuse_unknown(index: ConstraintIndex, item_ids: Sequence[ItemId], argument: str) -> None:
    ids = index.snapshot.check_ids(item_ids, argument)
    refuse_unknown(ids, index.has_items(ids), argument, fix="omit them, or add them in the same update")


def _read_item(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping) or set(item) != {"item_id", "sequence"}:
        raise ValueError(f'add[{number}]={item!r}, expected {{"item_id": "B99", "sequence": [5, 7]}}: name both')
    (item_id,), sequence = _read_ids([item["item_id"]], f"add[{number}].item_id"), to_host(item["sequence"])
    sequence = sequence.tolist() if isinstance(sequence, np.ndarray) else sequence
    if not isinstance(sequence, (list, tuple)):
        raise ValueError(f"add[{number}]['sequence']={sequence!r}, expected a list of tokens, such as [5, 7]")
    return {"item_id": item_id, "sequence": [int(token) if is_integer(token) else token for token in sequence]}


def _read_ids(item_ids: Any, argument: str) -> tuple[ItemId, ...]:
    """Ids as Python's integers or strings."""
    ids = check_item_ids(item_ids, argument=argument)
    return tuple(ids if isinstance(ids, list) else ids.tolist())
