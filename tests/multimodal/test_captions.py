"""Scores of captions and answers: known values worked out by hand, and what is said where a tool is missing."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest

from privrep.errors import InputError
from privrep.multimodal import captions
from privrep.multimodal.captions import CaptionScores, caption_scores, exact_match, normal_answer, vqa_score

REFERENCES = {
    "dog": ["A dog runs, on the grass.", "The brown dog is running."],
    "boys": ["Two boys play football"],
    "sea": ["A boat at sea ."],
}


def scores(generated: dict[str, str], references: dict[str, list[str]] = REFERENCES) -> CaptionScores:
    pytest.importorskip("pycocoevalcap")
    return caption_scores(references, generated, meteor=False)


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


@pytest.mark.usefixtures("without_java")
def test_captions_that_equal_a_reference_are_perfect_and_captions_of_other_words_score_nothing() -> None:
    same = scores({key: lines[0].upper() for key, lines in REFERENCES.items()})
    assert same.bleu == pytest.approx((1, 1, 1, 1), abs=1e-6)
    assert same.rouge_l == pytest.approx(1)
    assert same.cider > 5
    other = scores(dict.fromkeys(REFERENCES, "nothing of this kind"))
    assert max(*other.bleu, other.rouge_l, other.cider) < 1e-6


@pytest.mark.usefixtures("without_java")
def test_bleu_and_rouge_are_those_worked_out_by_hand() -> None:
    found = scores({1: "the dog sat on the mat"}, {1: ["the cat sat on the red mat"]})
    brevity = math.exp(1 - 7 / 6)
    assert found.bleu[0] == pytest.approx(brevity * 5 / 6, abs=1e-6)  # all words but dog
    assert found.bleu[1] == pytest.approx(brevity * math.sqrt(5 / 6 * 2 / 5), abs=1e-6)  # sat on, on the
    precision, recall, weight = 5 / 6, 5 / 7, 1.2**2  # the sat on the mat
    assert found.rouge_l == pytest.approx((1 + weight) * precision * recall / (recall + weight * precision))
    assert found.cider == 0  # a word of the only image tells nothing


@pytest.mark.usefixtures("without_java")
def test_cider_counts_rare_words_and_is_the_value_worked_out_by_hand() -> None:
    references = {1: ["red bird"], 2: ["red fish"]}
    found = scores({1: "bird", 2: "red"}, references)
    # red is in both, so its weight is log 2 - log 2 = 0; bird is all of image 1's one-word vector, cut by the length
    # in pairs of words (0 against 1); image 2 shares only red. Four lengths of word groups, times ten, two images.
    assert found.cider == pytest.approx(10 * (1 / 4) * math.exp(-1 / (2 * 6.0**2)) / 2)


@pytest.mark.usefixtures("without_java")
def test_without_java_the_result_says_what_is_left_out_and_why() -> None:
    pytest.importorskip("pycocoevalcap")
    found = caption_scores(REFERENCES, dict.fromkeys(REFERENCES, "a dog"))
    assert found.tokenizer == "words"
    assert found.meteor is None
    assert found.spice is None
    assert "Java" in found.missing["meteor"]
    assert "METEOR none" in str(found)


@pytest.mark.skipif(shutil.which("java") is None, reason="the PTB tokenizer runs on Java")
def test_the_ptb_tokenizer_cuts_as_on_the_server_and_spice_says_what_it_lacks() -> None:
    tool = pytest.importorskip("pycocoevalcap")
    texts = {"a": ["A man's dog, (wet)!", ""], "b": ["It doesn't\nrun."]}
    # Brackets stay: the list of punctuation has them in upper case, and the server's figures are made that way.
    expected = {"a": ["a man 's dog -lrb- wet -rrb-", ""], "b": ["it does n't run"]}
    assert captions._cut_tokens(tool, texts) == expected
    found = scores(dict.fromkeys(REFERENCES, "a dog"))
    assert found.tokenizer == "PTB"
    if found.spice is None:
        assert "stanford-corenlp-3.6.0" in found.missing["spice"]


@pytest.mark.skipif(shutil.which("java") is None, reason="METEOR runs on Java")
def test_meteor_is_the_value_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without its table of paraphrases, which takes ten seconds to read."""
    tool = pytest.importorskip("pycocoevalcap")
    recall = (0.25 + 2 * 0.75) / (0.25 + 3 * 0.75)  # the, dog, sat of the dog sat quietly; function words weigh less
    harmonic = recall / (0.85 + 0.15 * recall)
    expected = harmonic * (1 - 0.6 * (1 / 3) ** 0.2)  # three words in one piece
    plain = ("-m", "exact stem synonym")
    found = captions._run_meteor(tool, {"a": ["nothing at all", "the dog sat quietly"]}, {"a": ["the dog sat"]}, *plain)
    assert found == pytest.approx(expected, abs=1e-6)
    stand_in = tmp_path / "java"
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="METEOR gave no score"):
        captions._run_meteor(tool, {"a": ["x"]}, {"a": ["x"]})


def test_images_without_a_partner_and_a_missing_package_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="image sea has"):
        caption_scores(REFERENCES, {"dog": "a", "boys": "b"})
    with pytest.raises(InputError, match="list of at least one text"):
        caption_scores({1: "a dog"}, {1: "a dog"})
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    with pytest.raises(InputError, match="pip install pycocoevalcap"):
        caption_scores(REFERENCES, dict.fromkeys(REFERENCES, "a dog"))


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The Red bus.", "red bus"),
        ("two", "2"),
        ("None", "0"),
        ("1,000", "1000"),
        ("3.5 ft.", "3.5 ft"),
        ("dont walk!", "don't walk"),
        ("girl's", "girl's"),
        ("2:50 PM", "2:50 pm"),
        ("black/white", "black white"),
        ("T-shirt, an hat", "t shirt hat"),
        ("a.m.", "am"),
        ("theater", "theater"),
    ],
)
def test_answers_are_made_comparable_as_the_vqa_evaluation_does(answer: str, normal: str) -> None:
    assert normal_answer(answer) == normal
    assert normal_answer(normal) == normal


def test_exact_match_and_the_score_of_agreeing_people() -> None:
    assert exact_match(["Two", "a cat", "red"], ["2", "cat.", "blue"]) == pytest.approx(2 / 3)
    ten = ["2"] * 2 + ["two"] + ["3"] * 5 + ["4", "a four"]
    assert vqa_score(["two", "3", "four", "five"], [ten] * 4) == pytest.approx((1 + 1 + 2 / 3 + 0) / 4)


def test_answers_and_truths_must_match() -> None:
    with pytest.raises(InputError, match="2 answers and 1 truths"):
        exact_match(["a", "b"], ["a"])
    with pytest.raises(InputError, match="single text"):
        exact_match("yes", "yes")
    with pytest.raises(InputError, match="answers that people gave"):
        vqa_score(["yes"], [[]])
