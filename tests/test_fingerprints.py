# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: users have them on their disks, so they are what the code of 55573ba made of the same things."""

from types import SimpleNamespace
from typing import Any

import torch

from hf_gr import ConstraintIndex
from hf_gr.generation.torch.fingerprints import fingerprint_model, probe_model


def make_index(item_ids: list[str]) -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[3, 4], [3, 5, 7], [6]], item_ids=item_ids, eos_token_id=1)


class Small(torch.nn.Module):
    """A model that is the same in every release of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 64 - number)
        self.config: Any = SimpleNamespace(
            to_dict=lambda: {"hidden_size": 8, "dtype": "float32", "model_type": "small"}
        )


def test_fingerprints_of_catalogues_are_what_they_were() -> None:
    index = make_index(["ham", "jam", "yam"])
    assert index.snapshot.fingerprint() == "d63f641a4207afe33d555e19cc845282e6422bca90b250d268ecc64829223805"
    before = index.snapshot.fingerprint_of_sequences()
    assert before == "6a0f0d6277a7b6b10709fb9a1f14feda19b9744e7dff8c8a844a07bf9e743796"
    renamed = make_index(["ham", "jam", "clam"])
    assert renamed.snapshot.fingerprint() != index.snapshot.fingerprint()
    assert renamed.snapshot.fingerprint_of_sequences() == before
    index.remove(["jam"])
    assert index.snapshot.fingerprint() == "4014f9b680f7a2232edce5c49cfe1d9ede70051c58b5c067b703ee1a5f670351"
    left = index.snapshot.compact().fingerprint_of_sequences()
    assert left == "e32bb0bf7dc5d17e5361153b1726f6d8811f8e31fc1bd61cfb00420bce4d4550"


def test_fingerprints_of_models_are_what_they_were() -> None:
    model = Small()
    assert fingerprint_model(model) == "554328aea5f45201919e69054a5efb3a5595b4c392bbbb65c54cd4433aa72475"
    assert probe_model(model) == "45b6e341fc41013fb1f2e846c517aebb914d7b6e0c9cf7ccabfc7b7f03c37a71"
    with torch.no_grad():
        model.layer.bias[3] += 1
    assert fingerprint_model(model) != "554328aea5f45201919e69054a5efb3a5595b4c392bbbb65c54cd4433aa72475"
    assert probe_model(model) != "45b6e341fc41013fb1f2e846c517aebb914d7b6e0c9cf7ccabfc7b7f03c37a71"
