# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that changes while it serves. Knows no model and no queue.

Readers take `LiveCatalogue.edition` once for a batch and never wait: an edition never changes. Writers take turns.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import Any

import numpy as np

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.sequences import ERRORS_SHOWN, is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.files.text import counted

from .update_log import Base, UpdateLog

logger = logging.getLogger(__name__)

# Of what was compiled: removed items take memory, and nothing else.
LEAST_REMOVED, MOST_REMOVED = 5_000, 0.5  # items, share


@dataclass(frozen=True)
class Edition:
    """The catalogue of one moment, with which a whole batch is answered.

    Attributes:
        version: counts updates.
        index: all items; nobody else changes it.
        rules: named views of it.
        lost: by rule, the ids that it lost when the index was swapped, since the new one does not have them.
        retired: the tokens of removed items, by id: users' histories still have them.
    """

    version: int
    index: ConstraintIndex
    rules: Mapping[str, ConstraintIndex] = field(default_factory=lambda: MappingProxyType({}))
    lost: Mapping[str, tuple[ItemId, ...]] = field(default_factory=lambda: MappingProxyType({}))
    retired: Mapping[ItemId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Update:
    """A change of a catalogue, made as a whole or not at all: first removals, then additions, then rules.

    Attributes:
        add: items, `{"item_id": "B99", "sequence": [5, 7]}`. An id that exists gets a second sequence, unless it is in
            `remove`, too: then the new one replaces the old one, and the item stays in its rules.
        remove: ids of items, which leave every rule.
        rules: by name, the ids of the only items that may be answered under it; None deletes the rule.
    """

    add: Sequence[Mapping[str, Any]] = ()
    remove: Sequence[ItemId] = ()
    rules: Mapping[str, Sequence[ItemId] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "add", tuple(_read_item(item, number) for number, item in enumerate(self.add)))
        object.__setattr__(self, "remove", _read_ids(self.remove, "remove"))
        if not isinstance(self.rules, Mapping):
            raise ValueError(f"rules={self.rules!r}, expected item ids by name: rules={{'europe': ['B01', 'B02']}}")
        rules = {
            _read_name(name): None if ids is None else _read_ids(ids, f"rules[{name!r}]")
            for name, ids in self.rules.items()
        }
        object.__setattr__(self, "rules", rules)

    def to_dict(self) -> dict[str, Any]:
        """The update in JSON's types; what is empty is omitted."""
        rules = {name: None if ids is None else list(ids) for name, ids in self.rules.items()}
        fields = {"remove": list(self.remove), "add": [dict(item) for item in self.add], "rules": rules}
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Update:
        """The update of `to_dict`.

        Raises:
            ValueError: a field that is unknown or malformed.
        """
        for name in fields:
            if name not in ("add", "remove", "rules"):
                raise ValueError(f"{name!r} is no field of an update, expected add, remove or rules: omit it")
        return cls(**fields)


class LiveCatalogue:
    """A catalogue, its rules and its version.

    Attributes:
        check: sees every new index before anybody is served from it, and raises ValueError to refuse the update.
        on_change: hears of every edition that this object has made, once it is served; not of what others wrote.

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
        log: UpdateLog | None = None,
        check: Callable[[ConstraintIndex], None] | None = None,
    ) -> None:
        """Begin with an index as it is now, or with what a log says.

        Args:
            index: later changes of it are not seen. None where the log has one.
            rules: item ids by name.
            version: of what is given.
            log: the truth, shared with other processes. The other arguments begin an empty log; of one that is not
                empty, they are not looked at.
            check: sees every new index before anybody is served from it, and raises ValueError to refuse the update:
                a token that the model lacks would fail the requests of all. May be set later.

        Raises:
            ValueError: a rule has ids that the index does not have; no index, and none in the log; a damaged log.
        """
        self.check = check
        self.on_change: Callable[[Edition], None] | None = None
        self._log = log
        self._writing = Lock()  # held by one update at a time; readers take `edition` once and need none
        self._since: list[Update] | None = None  # the updates made while a compaction is under way
        self._compaction: Thread | None = None
        self._following: tuple[Thread, Event] | None = None
        self._unread: list[Base | Update] = []  # of the log
        with nullcontext() if log is None or not log.is_empty else log.writing():
            if log is None or log.is_empty:
                if index is None:
                    raise ValueError("index=None, expected an index: there is no log, or nothing is in it yet")
                self._edition = self._updated(Edition(version - 1, copy.copy(index)), Update(rules=rules or {}))
                if log is not None:
                    log.begin(_base(self._edition))
        with self._writing:
            self._catch_up()

    @property
    def edition(self) -> Edition:
        """The catalogue of this moment."""
        return self._edition

    def apply(self, update: Update) -> Edition:
        """Make an update, and return the edition with it. Batches under way keep theirs.

        Raises:
            ValueError: unknown ids, sequences that do not fit the catalogue, or what `check` refuses; nothing has
                changed then.
            OSError: the log cannot be written; nothing has changed then.
        """
        with self._turn():
            edition = self._updated(self._edition, update)
            if self._log is not None:
                self._log.append(edition.version, update.to_dict())
            self._publish(edition, update)
        return self._told(edition)

    def swap(self, index: ConstraintIndex) -> Edition:
        """Replace the whole index. Rules keep their ids; those that the new index does not have are in `lost`.

        Raises:
            ValueError: the ids are of another type, or `check` refuses the index; nothing has changed then.
            OSError: the log cannot be written; nothing has changed then.
        """
        index = copy.copy(index)
        with self._turn():
            kind, served = (one.snapshot.are_strings for one in (index, self._edition.index))
            if kind != served:  # requests that wait name items by the ids of the old one
                names = {True: "strings", False: "integers"}
                raise ValueError(
                    f"the index has item ids of {names[kind]}, expected {names[served]} as those of the catalogue: "
                    "start another server for it"
                )
            if self.check is not None:
                self.check(index)
            rules, lost = _carried_over(self._edition.rules, index)
            edition = Edition(self._edition.version + 1, index, rules, lost)
            if self._log is not None:
                self._log.begin(_base(edition))
            self._publish(edition)
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
        """End what `follow` began, and wait for a compaction that is under way."""
        if self._following is not None:
            thread, stop = self._following
            self._following = None
            stop.set()
            thread.join()
        self.wait()

    def wait(self) -> None:
        """Return when no compaction is under way."""
        while (thread := self._compaction) is not None and thread.is_alive():
            thread.join()

    def _updated(self, edition: Edition, update: Update) -> Edition:
        """An edition after an update, of the next version."""
        index = copy.copy(edition.index)
        retired = edition.retired
        if update.remove:
            _refuse_unknown(index, update.remove, "remove")
            sequences = index.snapshot.sequences_of(list(update.remove))[1].tolist()
            tokens = (tuple(token for token in sequence if token != PADDING) for sequence in sequences)
            retired = {**retired, **dict(zip(update.remove, tokens, strict=True))}
            index.remove(list(update.remove))
        before = index.snapshot
        if update.add:
            ids = [item["item_id"] for item in update.add]
            if not retired.keys().isdisjoint(ids):
                retired = {item: tokens for item, tokens in retired.items() if item not in set(ids)}
            try:
                index.add([item["sequence"] for item in update.add], ids)
            except ValueError as error:
                raise ValueError(f"add: {error}") from error
        if self.check is not None:
            self.check(index)
        lost = MappingProxyType({name: ids for name, ids in edition.lost.items() if name not in update.rules})
        return Edition(edition.version + 1, index, _updated_rules(edition, before, index, update), lost, retired)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only writer, of all processes that share the log, who knows all updates."""
        with self._writing, nullcontext() if self._log is None else self._log.writing():
            self._catch_up()
            yield

    def _catch_up(self) -> None:
        """Make what others have written; what fails is tried again the next time."""
        if self._log is None:
            return
        base, updates = self._log.read()
        if base is not None:
            self._unread = [base]
        self._unread += [Update.from_dict(fields) for fields in updates]
        while self._unread:
            new = self._unread[0]
            try:
                if isinstance(new, Base):
                    self._publish(self._begun(new))
                else:
                    self._publish(self._updated(self._edition, new), new)
            except ValueError as error:
                version = new.version if isinstance(new, Base) else self._edition.version + 1
                raise ValueError(f"{self._log.folder}, version {version}: {error}") from error
            del self._unread[0]

    def _begun(self, base: Base) -> Edition:
        """The edition of a saved base."""
        empty = Edition(base.version - 1, base.index, retired={item: tuple(tokens) for item, tokens in base.retired})
        return self._updated(empty, Update(rules=base.rules))

    def _told(self, edition: Edition) -> Edition:
        if self.on_change is not None:
            try:
                self.on_change(edition)
            except Exception:  # the change is made, whoever hears of it
                logger.exception("not everybody was told of catalogue version %d", edition.version)
        return edition

    def _publish(self, edition: Edition, update: Update | None = None) -> None:
        """Serve from an edition: one with an update more, or with another index."""
        self._edition = edition
        if update is None:
            self._since = None  # what is being compacted is no longer wanted
        elif self._since is not None:
            self._since.append(update)
        is_due = needs_compaction(edition.index) or (self._log is not None and self._log.needs_base)
        is_busy = self._compaction is not None and self._compaction.is_alive()
        if is_due and not is_busy and edition.index.num_items:
            self._begin_compaction()

    def _begin_compaction(self) -> None:
        self._since = []
        self._compaction = Thread(
            target=self._compact, args=(self._edition, self._since), name="hf_gr-compaction", daemon=True
        )
        self._compaction.start()

    def _compact(self, edition: Edition, since: list[Update]) -> None:
        """Recompile an edition, repeat what came `since`, and serve from the result; its version stays."""
        try:
            index, snapshot = copy.copy(edition.index), edition.index.snapshot
            index.compact()
            rules = {name: index.where(snapshot.flags_of(view.snapshot)) for name, view in edition.rules.items()}
            compacted = replace(edition, index=index, rules=MappingProxyType(rules))
            if self._repeat(compacted, since) and self._log is not None and self._log.needs_base:
                with self._log.compacting() as is_mine:
                    if is_mine:
                        self._log.compact(_base(compacted))
        except Exception:
            logger.exception("the catalogue could not be compacted: it stays as it is, until the next update")
        finally:
            with self._writing:
                if self._since is since:
                    self._since = None

    def _repeat(self, edition: Edition, since: list[Update]) -> bool:
        """Make updates of an edition that was recompiled, and serve it; False if it is no longer wanted."""
        first = edition.version
        while True:
            with self._writing:
                if self._since is not since:  # swapped meanwhile
                    return False
                left = since[edition.version - first :]
                if len(left) <= 1:  # more are repeated while other updates go on
                    for update in left:
                        edition = self._updated(edition, update)
                    self._edition, self._since = edition, None
                    return True
            for update in left:
                edition = self._updated(edition, update)

    def _follow(self, stop: Event, seconds: float) -> None:
        while not stop.wait(seconds):
            try:
                self.refresh()
            except Exception:
                logger.exception("the catalogue could not be refreshed: version %d stays", self._edition.version)


def needs_compaction(index: ConstraintIndex) -> bool:
    """Whether so many items were removed that compiling the index without them pays."""
    num_items = len(index.snapshot.items)
    return num_items - index.num_items > max(LEAST_REMOVED, MOST_REMOVED * num_items)


def _base(edition: Edition) -> Base:
    """An edition as a log keeps it."""
    rules = {name: _select(view.item_ids, np.ones(view.num_items, dtype=bool)) for name, view in edition.rules.items()}
    retired = [[item, list(tokens)] for item, tokens in edition.retired.items()]
    return Base(edition.version, edition.index, rules, retired)


def _updated_rules(
    edition: Edition, before: Snapshot, index: ConstraintIndex, update: Update
) -> Mapping[str, ConstraintIndex]:
    """The rules of an edition over an updated index, which was `before` its additions."""
    rules: dict[str, ConstraintIndex] = {}
    new_ids = [item["item_id"] for item in update.add]
    items, num_new = index.snapshot.items, index.num_items - before.num_items
    added = items.ids_of(np.arange(len(items) - num_new, len(items)))  # they are the last
    for name, view in edition.rules.items():
        if name in update.rules:
            continue
        kept = set(_select(new_ids, view.has_items(new_ids)))  # another sequence of what is in the rule
        gone = _select(update.remove, view.has_items(list(update.remove))) if update.remove else []
        if gone:
            view = copy.copy(view)
            view.remove(gone)
        if items is not before.items:
            is_kept = np.array([item in kept for item in added], dtype=bool)
            view = index.where(np.append(before.flags_of(view.snapshot), is_kept))
        rules[name] = view
    for name, ids in update.rules.items():
        if ids is not None:
            rules[name] = _view(index, ids, name)
        elif name not in edition.rules:
            raise ValueError(
                f"rules[{name!r}]=None, expected item ids: no rule has this name, so it cannot be deleted; there are "
                f"{', '.join(map(repr, edition.rules)) or 'none'}"
            )
    return MappingProxyType(rules)


def _carried_over(
    rules: Mapping[str, ConstraintIndex], index: ConstraintIndex
) -> tuple[Mapping[str, ConstraintIndex], Mapping[str, tuple[ItemId, ...]]]:
    """Rules over another index, and by rule the ids that this does not have."""
    views: dict[str, ConstraintIndex] = {}
    lost: dict[str, tuple[ItemId, ...]] = {}
    for name, view in rules.items():
        ids = view.item_ids
        known = index.has_items(ids)
        views[name] = index.where(_select(ids, known))
        if not known.all():
            lost[name] = tuple(dict.fromkeys(_select(ids, ~known)))
    return MappingProxyType(views), MappingProxyType(lost)


def _view(index: ConstraintIndex, ids: Sequence[ItemId], name: str) -> ConstraintIndex:
    try:
        return index.where(list(ids))
    except ValueError:
        _refuse_unknown(index, ids, f"rules[{name!r}]")
        raise


def _refuse_unknown(index: ConstraintIndex, ids: Sequence[ItemId], argument: str) -> None:
    try:
        known = index.has_items(list(ids))
    except ValueError as error:  # of another type than the catalogue's
        raise ValueError(str(error).replace("item_ids", argument, 1)) from error
    if not known.all():
        unknown = _select(ids, ~known)
        shown = ", ".join(map(repr, unknown[:ERRORS_SHOWN])) + (", ..." if len(unknown) > ERRORS_SHOWN else "")
        raise ValueError(
            f"{argument} has {counted(len(unknown), 'id')} that the catalogue does not have ({shown}), expected its "
            "items: omit them, or add them in the same update"
        )


def _select(ids: Any, flags: Any) -> list[Any]:
    """The flagged ids, as Python's integers or strings."""
    if isinstance(ids, np.ndarray):
        return ids[flags].tolist()
    return [ids[int(place)] for place in np.flatnonzero(flags)]


def _read_item(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping) or set(item) != {"item_id", "sequence"}:
        raise ValueError(f'add[{number}]={item!r}, expected {{"item_id": "B99", "sequence": [5, 7]}}: name both')
    (item_id,) = _read_ids([item["item_id"]], f"add[{number}]")
    sequence = item["sequence"]
    sequence = sequence.tolist() if hasattr(sequence, "tolist") else sequence
    if not isinstance(sequence, (list, tuple)):
        raise ValueError(f"add[{number}]['sequence']={sequence!r}, expected a list of tokens, such as [5, 7]")
    return {"item_id": item_id, "sequence": [int(token) if is_integer(token) else token for token in sequence]}


def _read_ids(ids: Any, argument: str) -> tuple[ItemId, ...]:
    """Ids as Python's integers or strings."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, Mapping)):
        raise ValueError(f"{argument}={ids!r}, expected a list of item ids")
    ids = tuple(int(item) if isinstance(item, np.integer) else item for item in ids)
    for number, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise ValueError(f"{argument}[{number}]={item!r}, expected an item id: an integer or a string")
    return ids


def _read_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"rules has the name {name!r}, expected a text: rules={{'europe': ['B01', 'B02']}}")
    return name
