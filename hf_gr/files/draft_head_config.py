# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The shape of a draft head, for both backends. Knows no framework.

Source: NEZHA, sections 3 and 4 (its ablations).

Axes: L levels, H hidden size, T_l codes of level l.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Transition = Literal["rnn", "add", "none"]


@dataclass(frozen=True)
class DraftHeadConfig:
    """The shape of a draft head.

    The paper's ablations are settings: NEZHA-1 is `use_state=False`, NEZHA-2 `use_placeholders=False`, NEZHA-3
    `transition="add"` (NEZHA-4, no verification, is `generate(verification="none")`). Independent heads on the
    prompt's last hidden state (MTP) are `use_placeholders=False, transition="none"`.

    Args:
        hidden_size: H, the model's.
        codebook_sizes: T_1 to T_L.
        placeholder_tokens: how a tokenizer spells the placeholders; by default `<SP_1>` to `<SP_L>`.
        placeholder_token_ids: their ids; empty without placeholders.
        transition: `"rnn"` (the paper's tanh cell), `"add"` (adds the token's embedding) or `"none"`. `"gru"` and
            `"mlp"` of heads made before 0.2 are refused: train a new one.
        use_state: whether logits read the state; if not, levels are independent.
        use_placeholders: whether logits read the placeholders' hidden states; if not, the prompt gets none.
        code_book: what tokens mean, as `index.code_book()` has it; empty if unknown.

    Raises:
        ValueError: a field has another value than those above, or fields contradict each other.

    Example:
        >>> config = DraftHeadConfig(hidden_size=64, codebook_sizes=(256, 256, 32), placeholder_token_ids=(9, 10, 11))
        >>> config.num_levels, config.placeholder_tokens
        (3, ('<SP_1>', '<SP_2>', '<SP_3>'))
    """

    hidden_size: int
    codebook_sizes: tuple[int, ...]
    placeholder_tokens: tuple[str, ...] = ()
    placeholder_token_ids: tuple[int, ...] = ()
    transition: Transition = "rnn"
    use_state: bool = True
    use_placeholders: bool = True
    code_book: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("codebook_sizes", "placeholder_tokens", "placeholder_token_ids"):
            if isinstance(getattr(self, name), (str, int)):
                raise ValueError(f"{name}={getattr(self, name)!r}, expected a sequence with an entry for every level")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "code_book", tuple(dict(self.code_book).items()))
        sizes = (self.hidden_size, *self.codebook_sizes)
        if not self.codebook_sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"hidden_size={self.hidden_size!r} and codebook_sizes={self.codebook_sizes!r}, expected positive "
                "integers and a size for every level"
            )
        if self.transition not in get_args(Transition):
            raise ValueError(f"transition={self.transition!r}, expected one of {get_args(Transition)}")
        if not self.use_state and (self.transition != "none" or not self.use_placeholders):
            raise ValueError(
                f"use_state=False with transition={self.transition!r} and use_placeholders={self.use_placeholders}, "
                "expected transition='none' and placeholders: nothing else tells the levels apart"
            )
        names = self.placeholder_tokens or tuple(f"<SP_{level}>" for level in range(1, self.num_levels + 1))
        object.__setattr__(self, "placeholder_tokens", names if self.use_placeholders else ())
        for name in ("placeholder_tokens", "placeholder_token_ids"):
            values: tuple[Any, ...] = getattr(self, name)
            if len(values) != self.num_placeholders or len(set(values)) != len(values):
                raise ValueError(
                    f"{name}={values!r}, expected {self.num_placeholders} distinct ones: one for each level, none "
                    "without placeholders"
                )

        if not all(type(token) is int and token >= 0 for token in self.placeholder_token_ids):
            raise ValueError(f"placeholder_token_ids={self.placeholder_token_ids!r}, expected integers, 0 or more")

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.codebook_sizes)

    @property
    def num_placeholders(self) -> int:
        """Tokens after the prompt."""
        return self.num_levels if self.use_placeholders else 0

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON; without an empty code book, as in files of before 0.2."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        book = dict(fields.pop("code_book"))
        return fields | ({"code_book": book} if book else {})
