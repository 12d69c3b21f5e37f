# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement (GRPO, by TRL) of a recommender on rollouts that are items, and whether it helped.

1. A recommender learns from the histories of the most rated films of MovieLens-latest-small, without every user's last
   five films.
2. GRPO goes on, with prompts of the same histories. The rollouts of a prompt are distinct films, drawn without
   replacement by `generate(exact=True, do_sample=True)`, for which the prompt is computed once. Rewards are those of
   MiniOneRec: a hit; and in groups with one, NDCG's weight against every other film. The loss has log-probabilities
   among the tokens that the catalogue allows. Prompts without a hit in a first draw would teach nothing: omitted.
3. The same recommender is trained for as many more steps without rewards. All three name the last five films.

    pip install -c constraints.txt -e ".[demo]" && pip install -c constraints.txt trl
    OMP_NUM_THREADS=1 python examples/train_grpo.py    # minutes of one core
    python examples/train_grpo.py --fast               # seconds: shows the method, not its quality

The first command found no gain: recall@10 is level with before, and worse than training longer (guides/training.md).
"""

import argparse
import copy
import math
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, SemanticIds, evaluate
from hf_gr.demo.data import film_features, keep_most_rated, load_movielens
from hf_gr.training import semantic_ids_from_features, small_recommender, train_recommender

HELD_OUT = 5  # films of every user, each a row of the evaluation
MAX_ITEMS = 9  # of a prompt
AT_ONCE = 64  # prompts that are tried together


def hit(completion_ids: Sequence[Any], target: Sequence[Any], **_: Any) -> list[float]:
    """1 for the item that followed."""
    return [float(list(found) == list(wanted)) for found, wanted in zip(completion_ids, target, strict=True)]


def others(completion_ids: Sequence[Any], target: Sequence[Any], group: Sequence[int], **_: Any) -> list[float]:
    """In groups with a hit: minus the share of NDCG's weights for each other item, by its place in the group."""
    hits, rewards = hit(completion_ids, target), []
    weights = [1 / math.log2(place + 2) for place in range(group[0])]
    for start in range(0, len(hits), group[0]):
        found = hits[start : start + group[0]]
        rewards += [any(found) * (one - 1) * weight / sum(weights) for one, weight in zip(found, weights, strict=True)]
    return rewards


REWARDS = [hit, others]


class ItemGRPOTrainer(GRPOTrainer):
    """GRPO over a catalogue: rollouts of a prompt are distinct items; the loss is normalised over what is allowed."""

    def __init__(self, *args: Any, index: ConstraintIndex, **kwargs: Any) -> None:
        self.index = index
        super().__init__(*args, rollout_func=rollouts, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any
    ) -> Any:
        kept = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1).logits
        legal = ConstraintLogitsProcessor(self.index, prompt_length=input_ids.shape[1] - logits_to_keep)
        log_probs = legal(input_ids[:, :-1], kept[:, :-1]).log_softmax(-1)
        chosen = log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])
        return chosen.squeeze(-1), torch.special.entr(log_probs.exp()).sum(-1), None


def rollouts(prompts: list[list[int]], trainer: Any) -> dict[str, Any]:
    """Equal prompts follow each other; each group is one call's draws."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    group = trainer.num_generations
    items = draw(model, prompts[::group], trainer.index, group, seed=trainer.state.global_step)
    model.train()
    return {"prompt_ids": prompts, "completion_ids": items.flatten(0, 1).tolist(), "logprobs": None}


@torch.no_grad()
def draw(model: Any, prompts: list[list[int]], index: ConstraintIndex, number: int, *, seed: int) -> torch.Tensor:
    """`[prompts, number, levels]` distinct items, drawn without replacement, the most probable first."""
    pad = model.config.pad_token_id
    rows = [torch.tensor(prompt).flip(0) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(rows, True, pad).flip(1).to(model.device)
    how = {"exact": True, "do_sample": True, "renormalize_logits": True, "num_return_sequences": number, "seed": seed}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    out = model.generate(padded, attention_mask=(padded != pad).long(), constraint_index=index, **how, **outputs)
    order = out.sequences_scores.view(-1, number).argsort(dim=1, descending=True)
    items = out.sequences[:, padded.shape[1] :].view(len(rows), number, -1)
    return items.take_along_dim(order[:, :, None], dim=1)


def learnable(model: Any, histories: list[Any], ids: SemanticIds, options: argparse.Namespace) -> list[Any]:
    """Prompts, chosen at random, whose next item is in a first draw: a group without a hit teaches nothing."""
    index, rows = ids.constraint_index(), []
    places = [(history, place) for history in histories for place in range(1, len(history))]
    random.Random(options.seed).shuffle(places)
    for start in range(0, len(places), AT_ONCE):
        some = [
            {"prompt": ids.encode(history[max(0, place - MAX_ITEMS) : place]), "target": ids.encode([history[place]])}
            for history, place in places[start : start + AT_ONCE]
        ]
        found = draw(model, [row["prompt"] for row in some], index, options.group, seed=start).tolist()
        more = {"group": options.group}
        rows += [row | more for row, items in zip(some, found, strict=True) if row["target"] in items]
        if len(rows) >= options.grpo_steps * options.prompts:
            return rows
    if len(rows) < options.prompts:  # of which TRL would make no step, and say nothing
        raise SystemExit(
            f"{len(rows)} prompts have their next item in a draw, expected {options.prompts} or more: raise --group"
        )
    return rows


def reinforce(model: Any, histories: list[Any], ids: SemanticIds, options: argparse.Namespace, **more: Any) -> Any:
    """Train a model on rewards; `more` are arguments of TRL's `GRPOConfig`."""
    rows = learnable(model.eval(), histories, ids, options)
    given = {"bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True} | more
    pad = str(model.config.pad_token_id)
    names = {str(token): token for token in range(int(pad) + 1)}  # TRL wants a tokenizer; prompts are tokens already
    words = Tokenizer(WordLevel(names, unk_token=pad))
    with tempfile.TemporaryDirectory() as folder:
        trainer = ItemGRPOTrainer(
            model=model,
            reward_funcs=REWARDS,
            args=GRPOConfig(
                folder,
                max_steps=options.grpo_steps,
                per_device_train_batch_size=options.prompts * options.group,
                num_generations=options.group,
                max_completion_length=ids.num_levels,
                learning_rate=options.learning_rate,
                logging_steps=max(options.grpo_steps // 10, 1),
                seed=options.seed,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                **given,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=pad),
            index=ids.constraint_index(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    rates = [line["rewards/hit/mean"] * options.group for line in trainer.state.log_history if "reward" in line]
    print(f"{len(rows):,} prompts; groups with a hit, from first to last: {', '.join(f'{one:.0%}' for one in rates)}")
    return trainer.accelerator.unwrap_model(trainer.model).eval()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--films", type=int, default=1000, help="the most rated ones")
    parser.add_argument("--steps", type=int, default=400, help="of training before")
    parser.add_argument("--grpo-steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--group", type=int, default=32, help="rollouts a prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few films, few steps")
    options = parser.parse_args(arguments)
    if options.fast:
        options.films, options.steps, options.grpo_steps, options.group = 100, 20, 2, 4
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    films = keep_most_rated(load_movielens(), options.films)
    rated = [history for history in films.histories if len(history) > HELD_OUT + 1]
    rated = rated[:: 10 if options.fast else 1]
    features = film_features(films, [history[:-HELD_OUT] for history in rated], seed=options.seed)
    ids = semantic_ids_from_features(features, films.titles, num_codes=128 if len(films) > 500 else 8)
    histories = [[films.titles[film] for film in history] for history in rated]
    known = [history[:-HELD_OUT] for history in histories]

    size: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "seed": options.seed}
    how: dict[str, Any] = {"max_items": MAX_ITEMS, "seed": options.seed}
    model = small_recommender(ids, max_items=MAX_ITEMS, **size)
    models = {"trained": train_recommender(known, ids, model=model, max_steps=options.steps, **how)}
    models["reinforced"] = reinforce(copy.deepcopy(models["trained"]), known, ids, options)
    how |= {"max_steps": options.grpo_steps, "learning_rate": options.learning_rate, "warmup_steps": 0}
    models["trained longer"] = train_recommender(known, ids, model=copy.deepcopy(models["trained"]), **how)

    rows = [(user, one[:at], one[at]) for user, one in enumerate(histories) for at in range(-HELD_OUT, 0)]
    table = dict(zip(("user", "history", "next"), zip(*rows, strict=True), strict=True))
    columns: dict[str, Any] = {"user": "user", "history": "history", "target": "next", "exclude": "history"}
    found = evaluate(
        models, table, constraint_index=ids.constraint_index(), num_beams=20, cutoffs=(10,), baselines=False, **columns
    )
    print(found)
    before, after, longer = found.results
    for name, other in (("before", before), ("training longer", longer)):
        one = next(one for one in found.difference(after, other) if one.metric == "recall@10")
        verdict = "better than" if one.low > 0 else "worse than" if one.high < 0 else "level with"
        print(f"{verdict} {name}: recall@10 {one.difference:+.4f} ({one.low:+.4f} to {one.high:+.4f})")


if __name__ == "__main__":
    main()
