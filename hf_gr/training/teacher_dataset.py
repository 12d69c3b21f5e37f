# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Teacher data as a map-style dataset, and its batches. Knows no model.

Parquet is for keeping and sharing; rows are read in any order from Arrow files made from it once and mapped into
memory (as `datasets` does), so that a process holds only the pages that it has read.

Axes: B batch, K sequences, L positions, T tokens of a label, P prompt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_gr.files.atomic import replaced_file
from hf_gr.torch.draft_head import IGNORED

from .packing import pad_prompts
from .teacher import SHARD, SUMMARY_FILE

Sample = dict[str, np.ndarray]


class TeacherDataset(Dataset):
    """The data of `write_teacher_data`, one prompt per entry.

    An entry is a dictionary of NumPy arrays:

    - `input_ids` `[P]`: the prompt.
    - `sequences` `[K, L]`: the target's sequences, best first; -1 after the end, and in missing ones.
    - `scores` `[K]`: their scores, `-inf` where there is none.
    - `log_probs`: log p over the legal children of each distinct prefix, level by level, in the order of
      `hf_gr.torch.transition.children`; `level_sizes` `[L]` is the number of values per level.
    - `label` `[T]`, if there are labels.

    Args:
        directory: that of `write_teacher_data`; the Arrow files are in its folder `arrow`.

    Raises:
        ValueError: the directory has no data, or only a part: the call that wrote it was interrupted.
        ImportError: pyarrow is missing: `pip install "hf-gr[tables]"`.
    """

    def __init__(self, directory: str | Path) -> None:
        from hf_gr.tables.files import pa
        from hf_gr.tables.shards import Shards

        self.directory = Path(directory)
        summary = self.directory / SUMMARY_FILE
        paths = Shards(self.directory, SHARD, {}).paths()
        if not summary.is_file():
            found = f"{len(paths)} shards and no {SUMMARY_FILE}" if paths else "no teacher data"
            raise ValueError(
                f"{self.directory} holds {found}, expected complete data: call write_teacher_data (again)"
            )
        self.settings: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
        if len(paths) != self.settings["num_shards"]:
            raise ValueError(
                f"{self.directory} holds {len(paths)} shards, expected {self.settings['num_shards']}: write it again"
            )
        self._table = pa.concat_tables(list(map(_mapped, paths)))
        if len(self) != self.settings["num_prompts"]:
            raise ValueError(
                f"{self.directory} holds {len(self)} prompts, expected {self.settings['num_prompts']}: write it again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherDataset, (self.directory,)  # workers map the files themselves

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, number: int) -> Sample:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{number} is out of range for {len(self)} prompts")
        at = int(number) % len(self)
        row = {name: self._table.column(name)[at].values.to_numpy() for name in self._table.column_names}
        return row | {"sequences": row["sequences"].reshape(self.settings["num_beams"], -1)}

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the prompts, for sampling by length."""
        from hf_gr.tables.files import pc

        return pc.list_value_length(self._table.column("input_ids")).to_numpy()

    @property
    def max_token_id(self) -> int:
        """The largest token of all prompts and labels."""
        from hf_gr.tables.files import pc

        names = {"input_ids", "label"}.intersection(self._table.column_names)
        return max(pc.max(pc.list_flatten(self._table.column(name))).as_py() for name in names)


def _mapped(path: Path) -> Any:
    """The table of a shard, mapped from its Arrow file, which is written if it is missing or of an older shard."""
    from hf_gr.tables.files import pa, pyarrow

    stat, folder = path.stat(), path.parent / "arrow"
    mapped = folder / f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}.arrow"
    if not mapped.exists():
        folder.mkdir(exist_ok=True)
        table = pyarrow.parquet.read_table(path, memory_map=True).combine_chunks()
        # Several processes may be here at once: each has its own temporary file.
        with replaced_file(mapped) as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        for old in folder.glob(f"{path.stem}-*.arrow"):
            if old != mapped:
                old.unlink(missing_ok=True)
    return pa.ipc.open_file(pa.memory_map(str(mapped), "r")).read_all().replace_schema_metadata()


class TeacherCollator:
    """Batches entries of a `TeacherDataset` for `AtSpeedTrainer`.

    Args:
        pad_token_id: fills short prompts, on the left.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch of tensors.

        `sequences` are `[B, K, L]`, -1 where there is no token; `log_probs` the target's after their prefixes, L flat
        tensors in half precision; `labels`, if there are some, `[B, T]`, -100 after the end.
        """
        input_ids, mask = pad_prompts([sample["input_ids"] for sample in samples], pad_token_id=self.pad_token_id)
        parts = [np.split(sample["log_probs"], np.cumsum(sample["level_sizes"])[:-1]) for sample in samples]
        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "sequences": torch.from_numpy(np.stack([sample["sequences"] for sample in samples])).long(),
            "log_probs": [torch.from_numpy(np.concatenate(level)) for level in zip(*parts, strict=True)],
        }
        if "label" in samples[0]:
            labels = [sample["label"] for sample in samples]
            batch["labels"], _ = pad_prompts(labels, pad_token_id=IGNORED, side="right")
        return batch
