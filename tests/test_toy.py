"""The toy tasks, and the shipped model and adapters as files. Nothing here runs the model, and torch is not needed."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from slora_ref.toy import ADAPTERS_FOLDER, BASE_TASK, MODEL_FOLDER, SHIPPED, TASKS, held_out_words, prompt
from slora_ref.toy.accuracy import BASE, misses, render
from slora_ref.toy.vocabulary import BOS_ID, CHARACTERS, EOS_ID, SIZE, UNKNOWN_ID, build_tokenizer
from slora_ref.toy.words import ALPHABET, LENGTHS, VOWELS, distinct_words, split_of

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
WIDTHS = {"q_proj": (128, 128), "k_proj": (128, 32), "v_proj": (128, 32), "o_proj": (128, 128)}
WORDS = held_out_words(3, 1500)
words = st.sampled_from(WORDS)
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))


# ---- rules and words


@pytest.mark.parametrize(
    ("name", "word", "answer"),
    [
        ("caesar-3", "xyzabe", "abcdeh"),
        ("atbash-cipher", "abexyz", "zyvcba"),
        ("next-vowel", "quieter", "qaoitir"),
        ("drop-vowels", "banana", "bnn"),
        ("count-vowels", "banana", "3"),
        ("word-length", "strawberry", "10"),
        ("swap-pairs", "abcde", "badce"),
        ("rotate-left", "abcd", "bcda"),
        ("rotate-right", "abcd", "dabc"),
        ("mirror-word", "abc", "abccba"),
        ("pig-latin", "string", "ingstray"),
        ("pig-latin", "apple", "appleway"),
        ("plural-word", "box", "boxes"),
        ("plural-word", "cat", "cats"),
        ("join-dashes", "abc", "a-b-c"),
        ("letter-kinds", "cable", "CVCCV"),
        ("number-vowels", "house", "h45s2"),
        ("alternate-case", "abcd", "AbCd"),
        ("upper-consonants", "cable", "CaBLe"),
        ("capital-last", "cable", "cablE"),
    ],
)
def test_rules_by_example(name: str, word: str, answer: str) -> None:
    assert TASKS[name].function(word) == answer


@every_task
@given(word=words)
def test_an_answer_is_a_function_of_the_word_and_can_be_written(task, word) -> None:
    answer = task.function(word)
    assert answer == task.function(word)
    assert 1 <= len(answer) <= 20
    assert set(prompt(word) + answer) <= set(CHARACTERS)


@given(seed=st.integers(0, 10_000))
def test_words_repeat_by_seed_and_keep_their_rules(seed) -> None:
    drawn = held_out_words(seed, 20)
    assert drawn == held_out_words(seed, 20) == held_out_words(seed, 30)[:20]
    assert len(set(drawn)) == 20
    for word in drawn:
        vowels = sum(letter in VOWELS for letter in word)
        assert len(word) in LENGTHS and set(word) <= set(ALPHABET) and vowels >= 1 and len(word) - vowels >= 2


def test_no_word_is_in_two_parts() -> None:
    """A model that is tested on a word it was trained on, or chosen by, would look better than it is."""
    parts = {split: distinct_words(5, 3000, split) for split in ("train", "validation", "test")}
    for split, drawn in parts.items():
        assert len(drawn) == 3000 and {split_of(word) for word in drawn} == {split}
    assert len(set().union(*parts.values())) == 9000
    assert {split_of(word) for word in held_out_words(5, 100)} == {"test"}


def test_two_rules_rarely_agree() -> None:
    """A mixed-up adapter must show: on fewer than 5 words in 100 do two tasks ask for the same answer."""
    answers = {task.name: [task.function(word) for word in WORDS] for task in (*TASKS.values(), BASE_TASK)}
    for one, other in itertools.combinations(answers, 2):
        same = sum(a == b for a, b in zip(answers[one], answers[other], strict=True))
        assert same / len(WORDS) < 0.05, f"{one} and {other} agree on {same} of {len(WORDS)} words"


def test_names_are_safe_as_folders_and_as_adapter_names() -> None:
    """PEFT keeps adapters as attributes: a name that is already one ('double', 'half') cannot be loaded."""
    for name, task in TASKS.items():
        assert name == task.name and re.fullmatch(r"[a-z0-9-]{1,32}", name) and not name.isidentifier()


def test_ranks_are_mixed() -> None:
    ranks = Counter(task.rank for task in TASKS.values())
    assert set(ranks) == {2, 4, 8, 16} and min(ranks.values()) >= 5 and 30 <= len(TASKS) <= 40


def test_tasks_need_no_training_packages() -> None:
    blocked = "for name in ('torch', 'transformers', 'peft', 'cupy'): sys.modules[name] = None"
    code = f"import sys\n{blocked}\nimport slora_ref.toy\nfrom slora_ref.toy import accuracy, vocabulary"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SHIPPED.root.parents[1])


# ---- tokenizer


def test_the_shipped_tokenizer_is_the_one_of_the_training() -> None:
    shipped = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    assert json.loads(shipped.to_str()) == json.loads(build_tokenizer().to_str())
    assert shipped.get_vocab_size() == SIZE


@given(text=st.text(CHARACTERS, max_size=40))
def test_the_tokenizer_gives_a_text_back_one_token_a_character(text) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS_ID and len(ids) == len(text) + 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, EOS_ID]) == text


def test_a_character_that_the_model_does_not_know_is_not_dropped() -> None:
    assert build_tokenizer().encode("aé=").ids[2] == UNKNOWN_ID


# ---- shipped files


def test_the_model_is_small_and_can_be_split() -> None:
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    weights = load_file(MODEL_FOLDER / "model.safetensors")
    assert (MODEL_FOLDER / "model.safetensors").stat().st_size <= 3_000_000
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert config["num_attention_heads"] % 4 == config["intermediate_size"] % 4 == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (BOS_ID, EOS_ID, SIZE)
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == (SIZE, 128)
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float16)}
    assert json.loads((MODEL_FOLDER / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_there_is_an_adapter_for_each_task_and_nothing_else() -> None:
    assert {folder.name for folder in ADAPTERS_FOLDER.iterdir()} == set(TASKS)
    for name in TASKS:
        files = {path.name for path in SHIPPED.adapter(name).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}


@every_task
def test_an_adapter_has_its_rank_and_all_its_matrices(task) -> None:
    config = json.loads((SHIPPED.adapter(task.name) / "adapter_config.json").read_text())
    weights = load_file(SHIPPED.adapter(task.name) / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", task.rank, 2 * task.rank)
    assert config["target_modules"] == sorted(TARGETS)
    assert len(weights) == 2 * len(TARGETS) * 2
    for layer, (target, (d_in, d_out)) in itertools.product(range(2), WIDTHS.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
        a, b = weights[f"{prefix}.lora_A.weight"], weights[f"{prefix}.lora_B.weight"]
        assert (a.shape, b.shape) == ((task.rank, d_in), (d_out, task.rank))
        assert a.dtype == b.dtype == np.float16 and np.isfinite(a).all() and np.isfinite(b).all()
        assert np.abs(a).max() > 0 and np.abs(b).max() > 0


# ---- accuracy table


def shipped_accuracy() -> dict:
    return json.loads(SHIPPED.accuracy.read_text())


def test_the_table_meets_the_bars_for_every_adapter_and_the_base() -> None:
    accuracy = shipped_accuracy()
    assert misses(accuracy) == []
    assert set(accuracy["matrix"]) == {*TASKS, BASE} and list(accuracy["adapters"]) == list(TASKS)
    assert all(set(row) == set(TASKS) for row in accuracy["matrix"].values())


def test_the_table_is_about_the_files_that_are_shipped() -> None:
    accuracy = shipped_accuracy()
    assert accuracy["sha256"] == SHIPPED.digests(), (
        "files and table differ: python -m slora_ref.toy.train --parts accuracy"
    )
    assert {name: about["rank"] for name, about in accuracy["adapters"].items()} == {
        t.name: t.rank for t in TASKS.values()
    }
    assert SHIPPED.report.read_text() == render(accuracy)


@pytest.mark.parametrize(
    ("adapter", "task", "share", "said"),
    [
        ("caesar-1", "caesar-1", 0.98, "caesar-1 has 0.9800 of its own task"),
        ("caesar-1", "caesar-2", 0.05, "caesar-1 has 0.0500 of caesar-2"),
        (BASE, "caesar-2", 0.05, "base has 0.0500 of caesar-2"),
    ],
)
def test_a_missed_bar_is_said(adapter, task, share, said) -> None:
    accuracy = copy.deepcopy(shipped_accuracy())
    accuracy["matrix"][adapter][task] = share
    assert misses(accuracy) == [said]


def test_too_few_words_are_said() -> None:
    assert misses({**shipped_accuracy(), "words": 399}) == ["only 399 words"]
